"""Costs: amounts per microbatch, by region, scaled, recomputed, and as JSON."""

import json
import math
import re
from dataclasses import replace

import pytest

from fxpipe.costs import Costs, combine
from fxpipe.cut import Cut, Kind
from fxpipe.errors import ScheduleError
from fxpipe.table import Op
from tests.pure.cuts import Shape, build

CUT = build("stage/1f1b", 2, Shape())
BOTH = build("nested/1f1b", 2, Shape(encoders=(True,), generators=(True,)))


def test_uniform_and_from_flops() -> None:
    costs = Costs.from_flops(CUT, 0.5)
    assert costs.compute(Op("llm1", Kind.B, 3)) == 2
    assert costs.compute(Op("llm0", Kind.W, 3)) == 4, "W does the whole backward without a B"
    assert costs.compute(Op("llm0+llm1", Kind.R)) == 0
    assert Costs.uniform(CUT, {"llm1": 3.0}).compute(Op("llm1", Kind.F, 0)) == 3


def test_an_amount_may_differ_by_microbatch() -> None:
    """A list that is too short starts again."""
    costs = Costs(
        {("llm0", Kind.F): [40, 0]},
        latency=1.0,
        bandwidth=2.0,
        bytes={("llm0", Kind.F): (8, 2)},
        kept={("llm0", Kind.F): (16, 4)},
    )
    ops = [Op("llm0", Kind.F, mb) for mb in range(3)]
    assert [costs.compute(op) for op in ops] == [40, 0, 40]
    assert [costs.transfer(op) for op in ops] == [5, 2, 5]
    assert [costs.occupies(op) for op in ops] == [4, 1, 4]
    assert [costs.keeps(op) for op in ops] == [16, 4, 16]
    assert combine(sum, ((1, 2), (1, 2, 3), 10)) == (12, 14, 14, 13, 13, 15)
    assert combine(math.prod, (2, 3.0)) == 6


def test_regions_give_their_stages_costs() -> None:
    """Encoders and generators as a whole; the backbone's numbers are one rank's share."""
    costs = Costs.of_regions(
        BOTH,
        {"enc0": (1, 2), "llm": (1, 1, 3), "gen0": (2, 1, 2)},
        bytes={"enc0": 5},
        kept={"llm": 8},
        latency=0.5,
    )
    seconds = {f"{stage}.{kind}": x for (stage, kind), x in costs.seconds.items()}
    assert seconds == {
        **dict(zip(("enc0.F", "enc0.W"), (1, 2), strict=True)),
        **{f"gen0.{kind}": x for kind, x in zip("FBW", (2, 1, 2), strict=True)},
        **{f"llm{i}.{kind}": x for i in (0, 1) for kind, x in zip("FBW", (1, 1, 3), strict=True)},
    }
    assert costs.bytes == {("enc0", Kind.F): 5}
    assert costs.kept == {("llm0", Kind.F): 8, ("llm1", Kind.F): 8}
    assert costs.latency == 0.5


def test_a_backbone_on_fewer_ranks_has_the_same_work() -> None:
    """Three numbers of a stage without B are W's; one number for B and W is halved."""
    cut = build("stage/1f1b", 4, Shape(encoders=(False,)))
    costs = Costs.of_regions(cut, {"enc0": (1,), "llm": (3, 1, 2)})
    assert [costs.compute(Op(f"llm{i}", Kind.F, 0)) for i in range(3)] == [4, 4, 4]
    assert costs.compute(Op("llm0", Kind.W, 0)) == pytest.approx(4)
    whole = Costs.of_regions(cut, {"enc0": (1,), "llm": (3, 6)})
    assert [whole.compute(Op("llm1", kind, 0)) for kind in (Kind.B, Kind.W)] == [4, 4]
    with pytest.raises(ScheduleError, match="llm0 runs FW, but region llm has 1 numbers"):
        Costs.of_regions(cut, {"enc0": (1,), "llm": (3,)})


def test_scaled() -> None:
    costs = Costs.of_regions(BOTH, {"enc0": (1, 2), "llm": (1, 1, 1), "gen0": (1, 2)})
    costs = replace(costs, kept={("enc0", Kind.F): 3}, bytes={("enc0", Kind.F): 2})
    many = costs.scaled(BOTH, {"enc0": (1, 0, 40)})
    for mb, factor in enumerate((1, 0, 40)):
        op = Op("enc0", Kind.F, mb)
        assert (many.compute(op), many.keeps(op)) == (factor, 3 * factor)
        assert many.compute(Op("llm1", Kind.W, mb)) == 1
    assert many.bytes["enc0", Kind.F] == (2, 0, 80)
    with pytest.raises(ScheduleError, match="no region vision to scale"):
        costs.scaled(BOTH, {"vision": 2.0})


def test_recomputing_moves_the_forward_and_keeps_what_was_received() -> None:
    regions = tuple(replace(region, recompute=region.name != "gen0") for region in BOTH.regions)
    cut = replace(BOTH, regions=regions)
    assert Cut.parse(str(cut)) == cut
    kept = {(stage, Kind.F): 100.0 for stage in cut.stage} | {("llm0", Kind.B): 10.0}
    sent = {("enc0", Kind.F): (4, 6), ("llm0", Kind.F): 5.0}
    seconds = Costs.of_regions(cut, {"enc0": (1, 2), "llm": (1, 2, 3), "gen0": (1, 2)}).seconds
    costs = Costs(seconds, bytes=sent, kept=kept, received={"llm1": 7}).recomputed(cut)
    assert costs.compute(Op("enc0", Kind.W, 0)) == 3
    assert [costs.compute(Op("llm1", kind, 0)) for kind in (Kind.F, Kind.B, Kind.W)] == [1, 3, 3]
    assert costs.compute(Op("gen0", Kind.B, 0)) == seconds["gen0", Kind.B]
    assert costs.kept == {
        ("enc0", Kind.F): 0,
        ("llm0", Kind.F): (4, 6),
        ("llm1", Kind.F): 7,
        ("gen0", Kind.F): 100,
        ("llm0", Kind.B): 10,
    }
    assert costs.seconds.keys() == seconds.keys()


def test_json_round_trip() -> None:
    costs = Costs(
        {("llm0", Kind.F): 0.1, ("llm0", Kind.B): [1, 2.5], ("llm0+llm1", Kind.R): 3},
        latency=1e-6,
        bandwidth=1e9,
        bytes={("llm0", Kind.F): 4096},
        kept={("llm0", Kind.F): 1 / 3},
        resident={"llm0": 8},
        received={"llm0": (1, 2)},
    )
    assert Costs.from_json(costs.to_json()) == costs
    assert Costs.from_json(Costs({}).to_json()) == Costs({})
    assert json.loads(costs.to_json())["seconds"]["llm0.B"] == [1, 2.5]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "no JSON"),
        ("[]", "no object with `seconds`"),
        ('{"seconds": {}, "speed": 1}', "no object with `seconds`"),
        ('{"seconds": 1}', "seconds of the costs is 1; expected an object"),
        ('{"seconds": {"llm0": 1}}', "names 'llm0'; expected an op like llm0.F"),
        ('{"seconds": {"llm0.F": -1}}', "seconds of llm0.F is -1"),
        ('{"seconds": {"llm0.F": "1"}}', "seconds of llm0.F is '1'"),
        ('{"seconds": {"llm0.F": []}}', "seconds of llm0.F is []"),
        ('{"seconds": {"llm0.F": NaN}}', "seconds of llm0.F is nan"),
        ('{"seconds": {}, "latency": -1}', "latency of all transfers is -1"),
        ('{"seconds": {}, "bandwidth": 0}', "bandwidth is 0"),
        ('{"seconds": {}, "bandwidth": "x"}', "bandwidth is 'x'"),
        (
            '{"seconds": {}, "resident": {"llm0": [1, 2]}}',
            "resident of llm0 is one for each microbatch",
        ),
    ],
)
def test_bad_costs_are_refused(text: str, found: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(found)):
        Costs.from_json(text)
