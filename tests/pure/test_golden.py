"""Tables that a person has read. A change of one is a change of a schedule."""

import pytest

from fxpipe import passes
from fxpipe.schedule import derive
from tests.conftest import Golden
from tests.pure.cuts import Shape, build

VISION = Shape(encoders=(True,))
BOTH = Shape(encoders=(True,), generators=(True,))
FROZEN = Shape(encoders=(False,), backbone=False, generators=(True,))


@pytest.mark.parametrize(
    ("name", "schedule", "ranks", "mbs", "shape"),
    [
        ("stage_gpipe_3x4", "stage/gpipe", 3, 4, VISION),
        ("stage_1f1b_2x4", "stage/1f1b", 2, 4, BOTH),
        ("upfront_1f1b_2x4", "upfront/1f1b", 2, 4, VISION),
        ("upfront_1f1b_generator_2x4", "upfront/1f1b", 2, 4, BOTH),
        ("nested_1f1b_2x6", "nested/1f1b", 2, 6, VISION),
        ("nested_1f1b_generator_4x8", "nested/1f1b", 4, 8, BOTH),
        ("nested_1f1b_frozen_2x4", "nested/1f1b", 2, 4, FROZEN),
    ],
)
def test_table(
    golden: Golden, name: str, schedule: str, ranks: int, mbs: int, shape: Shape
) -> None:
    golden.check(name, str(passes.run(derive(build(schedule, ranks, shape), mbs, schedule))))
