"""The planner: a front that nothing beats, and a choice from it that keeps to its limits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from fxpipe.choices import Option
from fxpipe.costs import Costs
from fxpipe.cut import Kind
from fxpipe.errors import ScheduleError
from fxpipe.forecast import Ask, costs_of, forecast, sketched
from fxpipe.front import Point, shown
from fxpipe.planner import Planned, plan
from fxpipe.rates import Rates
from fxpipe.scheduler import Options, scheduler
from fxpipe.sketch import regions
from fxpipe.table import Op
from fxpipe.verify import ORDER, verify
from tests.pure.cuts import Shape, build

BOTH = ("vision=encoder:1,2", "llm=backbone:1,1,1", "image=generator:1,2")
KEPT = {"vision": 3.0, "llm": 10.0, "image": 2.0}
SENT = {"vision": 1.0, "llm": 1.0}


def planned(
    ranks: int, microbatches: int, *sketches: str, kept: Mapping[str, float] = KEPT, **options: Any
) -> Planned:
    """The plan of some regions, found with little effort."""
    rates = Rates(kept=kept, sent=SENT if kept else {})
    ask = Ask(regions(sketches), ranks, microbatches, rates=rates)

    def lay(schedule: str, chunks: int) -> Option:
        cut = sketched(Ask(ask.sketches, ranks, microbatches, schedule, chunks))
        return Option(cut, costs_of(ask, cut))

    defaults: dict[str, Any] = {"effort": 0.02, "chunks": (1, 2)}
    return plan(lay, microbatches, **(defaults | options))


@pytest.fixture(scope="module")
def free() -> Planned:
    return planned(2, 6, *BOTH)


def beats(one: Point, other: Point) -> bool:
    """Whether a point is better in seconds or bytes, and as good in both."""
    mine, theirs = (one.seconds, one.bytes), (other.seconds, other.bytes)
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def test_nothing_beats_the_front(free: Planned) -> None:
    for point in free.front:
        assert point.best is not any(beats(other, point) for other in free.front)
    assert [point.seconds for point in free.front] == sorted(x.seconds for x in free.front)
    placements = {point.schedule.partition("/")[0] for point in free.front}
    assert placements >= {"nested", "upfront", "transpose", "stage"}
    assert {point.chunks for point in free.front} == {1, 2}
    assert {point.recompute for point in free.front} == {
        (),
        ("vision", "image"),
        ("llm",),
        ("vision", "llm", "image"),
    }


def test_the_choice_is_the_quickest_and_the_same_each_time(free: Planned) -> None:
    assert free.chosen.seconds == free.front[0].seconds
    assert sum(point.chosen for point in free.front) == 1
    again = planned(2, 6, *BOTH)
    assert (again.table, again.front) == (free.table, free.front)


def test_a_smaller_budget_is_kept_and_costs_time(free: Planned) -> None:
    before = free.chosen.seconds
    for budget in (45.0, 30.0, 20.0):
        found = planned(2, 6, *BOTH, memory=budget)
        verify(found.table, ORDER)
        assert found.chosen.bytes <= budget
        assert found.chosen.seconds >= 0.99 * before  # an order that is searched for is by chance
        before = found.chosen.seconds
    assert before > 1.1 * free.chosen.seconds


def test_a_budget_that_nothing_fits_says_what_would() -> None:
    with pytest.raises(
        ScheduleError, match=r"no schedule keeps to 0\.5 bytes on each rank; of all"
    ):
        planned(2, 6, *BOTH, memory=0.5)
    with pytest.raises(ScheduleError, match=r"least: .* of llm, .* bytes; allow as much, or"):
        planned(2, 6, *BOTH, memory=11.0, recompute=False)
    assert planned(2, 6, *BOTH, memory=11.0).chosen.recompute


def test_resident_bytes_count() -> None:
    cut = build("nested/1f1b", 2, Shape(encoders=(True,)))
    kept = {(stage.name, Kind.F): 1.0 for stage in cut.stages}
    costs = Costs(Costs.uniform(cut).seconds, kept=kept, resident={"enc0": 5.0, "llm0": 2.0})
    found = plan(lambda schedule, chunks: Option(cut, costs), 4, memory=10.0, effort=0.02)
    assert 7 < found.chosen.bytes <= 10
    with pytest.raises(ScheduleError, match=r"no schedule keeps to 7\.5 bytes"):
        plan(lambda schedule, chunks: Option(cut, costs), 4, memory=7.5, recompute=False)


def test_units_are_kept_to_and_owners_too() -> None:
    limits = {"modality": 1, "llm": 4}
    found = planned(4, 8, *BOTH, kept={}, live=limits, owners="round_robin", chunks=(1,))
    assert found.chosen.fits
    assert all(
        units <= limits["llm" if name == "llm" else "modality"]
        for name, units in found.chosen.units.items()
    )
    assert [found.table.place[Op("vision", Kind.F, mb)] for mb in range(8)] == [0, 1, 2, 3] * 2


def test_a_backbone_alone_and_a_cut_that_is_given() -> None:
    alone = planned(4, 8, "llm=backbone:1,1,1", kept={})
    assert {point.schedule.partition("/")[0] for point in alone.front} == {"nested"}
    assert alone.chosen.seconds <= 26
    cut = build("stage/1f1b", 3, Shape(encoders=(True,)))
    option = Option(cut, Costs.uniform(cut))
    assert plan(lambda schedule, chunks: option, 6, effort=0.02).table.microbatches == 6


def test_wrong_options_are_named() -> None:
    with pytest.raises(ScheduleError, match="live names"):
        planned(2, 4, *BOTH, live={"vision": 3})
    with pytest.raises(ScheduleError, match="owner map 'all' is unknown"):
        planned(2, 4, *BOTH, owners="all")


def test_few_points_are_shown(free: Planned) -> None:
    few = shown(free.front, 8)
    assert len(few) == 8
    assert free.chosen in few
    assert len({point.schedule.partition("/")[0] for point in few}) == 4


def test_compile_tells_what_would_have_to_recompute() -> None:
    cut = build("auto", 2, Shape(encoders=(True,)))
    kept = {(stage.name, Kind.F): 4.0 for stage in cut.stages}
    costs = Costs(Costs.uniform(cut).seconds, kept=kept)
    made = scheduler("auto", Options(memory_budget=12.0, costs=costs)).table(cut, 4)
    verify(made)
    with pytest.raises(ScheduleError, match=r"with recompute=\['enc0', 'llm'\], nested/"):
        scheduler("auto", Options(memory_budget=3.0, costs=costs)).table(cut, 4)
    with pytest.raises(ScheduleError, match="memory_budget needs costs that say how many bytes"):
        scheduler("auto", Options(memory_budget=3.0)).table(cut, 4)


# Ranks, microbatches, encoder and generator forwards in those of a backbone stage, whether B and W
# are apart, most live units of the backbone, and the best seconds that are known: facts.
KNOWN = [
    (2, 8, 0.25, 0, False, 2, 28.5),
    (2, 8, 1, 1, True, 4, 48.0),
    (2, 8, 0.5, 2, False, 4, 54.0),
    (4, 8, 0.25, 0, True, 4, 27.75),
    (4, 8, 1, 0, False, 4, 36.0),
    (4, 8, 1, 0, True, 4, 32.0),
    (4, 8, 2, 0, False, 4, 41.0),
    (4, 8, 1, 1, False, 8, 39.0),
    (4, 8, 0.5, 2, True, 8, 40.5),
    (4, 16, 1, 0, True, 4, 61.0),
    (4, 16, 2, 0, False, 4, 74.0),
    (4, 16, 1, 1, True, 8, 73.0),
]


@pytest.mark.parametrize("known", KNOWN, ids=str)
def test_the_best_that_is_known_is_near(
    known: tuple[int, int, float, float, bool, int, float],
) -> None:
    ranks, microbatches, encoder, generator, splits, most, best = known
    sketches = [f"vision=encoder:{encoder},{2 * encoder}"]
    sketches += ["llm=backbone:1,1,1" if splits else "llm=backbone:1,2"]
    sketches += [f"image=generator:{generator},{2 * generator}"] if generator else []
    limits = {"modality": 3, "llm": most}
    found = planned(ranks, microbatches, *sketches, kept={}, live=limits, chunks=(1,), effort=0.1)
    assert found.chosen.fits
    assert found.chosen.seconds <= 1.05 * best


def test_much_effort_is_not_slower_than_any_schedule_by_name() -> None:
    """Each placement of a base is looked at again: at a glance they are hard to tell apart."""
    sketches = "vision=encoder:2,4", "llm=backbone:1,1,1"
    found = planned(2, 6, *sketches, kept={}, effort=1.2)
    ask = Ask(regions(sketches), 2, 6, chunks=2, effort=1.2)
    for schedule in ("nested/zb-v", "transpose/zb-v", "nested/interleaved-zb"):
        named = forecast(replace(ask, schedule=schedule)).timeline.makespan
        assert found.chosen.seconds <= named, schedule
