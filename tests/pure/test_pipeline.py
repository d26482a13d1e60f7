"""Rows of the sharded stages of whole cuts: the orders that bases write down are the ones taken."""

import pytest

from fxpipe.costs import Costs
from fxpipe.schedule import base_rows, derive
from fxpipe.simulate import simulate
from fxpipe.skeletons import PATTERNS, pattern_rows
from tests.pure.cuts import Shape, build


@pytest.mark.parametrize("base", PATTERNS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_backbone_takes_the_order_of_its_base(base: str, ranks: int) -> None:
    """Also in a v, where two stages that follow one another are on one rank."""
    shape = Shape(encoders=(True,))  # trained, so that every backbone stage has a B
    cut = build(f"nested/{base}", ranks, shape)
    homes = [stage.rank or 0 for stage in cut.stages if stage.region == "llm"]
    rows = [
        [(op.kind, int(op.stage.removeprefix("llm")), op.mb) for op in row]
        for row in base_rows(cut, 8, f"nested/{base}")
    ]
    assert rows == [list(row) for row in pattern_rows(PATTERNS[base], homes, 8)]


def test_a_v_leaves_next_to_no_bubble() -> None:
    cut = build("nested/zb-v", 4, Shape(encoders=(False,)))
    costs = Costs.of_regions(cut, {"enc0": (0,), "llm": (1, 1, 1)})
    table = derive(cut, 16, "upfront/zb-v", costs=costs)
    assert simulate(table, costs).makespan <= 3 * 16 + 1.5
