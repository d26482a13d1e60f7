"""The order of a forward alone: complete, free of deadlock, and no longer memory for more of it."""

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.cut import Cut, Kind
from fxpipe.table import Table
from fxpipe.verify import verify
from fxpipe.waves import waves
from tests.pure.cuts import Shape, build, shapes

SCHEDULES = ("nested/1f1b", "stage/1f1b", "ends/1f1b", "nested/interleaved", "nested/zb-v")


def forward_of(cut: Cut) -> Cut:
    stages = tuple(replace(stage, kinds=(Kind.F,)) for stage in cut.stages)
    seams = tuple(replace(seam, grads=()) for seam in cut.seams)
    return Cut(cut.ranks, cut.regions, stages, seams)


def most_waiting(table: Table) -> int:
    """The most values that have come to a rank, or are on their way to it, and are not all read."""
    most = 0
    for row in table.rows:
        last = {
            (seam.source, op.mb): at
            for at, op in enumerate(row)
            if not op.way
            for seam in table.cut.seams_into[op.stage]
        }
        spans = [(at, last[op.stage, op.mb]) for at, op in enumerate(row) if op.way == "<"]
        at_each = Counter(at for start, end in spans for at in range(start, end))
        most = max(most, *at_each.values(), 0)
    return most


@settings(max_examples=40)
@given(st.sampled_from(SCHEDULES), st.sampled_from([1, 2, 4]), shapes())
def test_waves_hold_and_do_not_grow(schedule: str, ranks: int, shape: Shape) -> None:
    cut = forward_of(build(schedule, ranks, shape))
    tables = [waves(cut, count) for count in (3, 24, 40)]
    for table, count in zip(tables, (3, 24, 40), strict=True):
        verify(table)
        assert len(table.place) == count * len(cut.stages)
    assert most_waiting(tables[1]) == most_waiting(tables[2])
