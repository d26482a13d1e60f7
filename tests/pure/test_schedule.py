"""Every schedule of every small shape is a sound table."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe import passes
from fxpipe.costmodel import base_alone
from fxpipe.costs import Costs
from fxpipe.cut import Cut, Kind, Layout
from fxpipe.errors import ScheduleError
from fxpipe.schedule import PLACEMENTS, base_rows, derive, layout
from fxpipe.simulate import simulate
from fxpipe.skeletons import PATTERNS
from fxpipe.table import Op, Table
from fxpipe.timeline import Timeline
from fxpipe.verify import verify
from tests.pure.cuts import QUICK, Shape, build, shapes

SCHEDULES = [f"{placement}/{base}" for placement in PLACEMENTS for base in PATTERNS]
VISION = Shape(encoders=(True,))
BOTH = Shape(encoders=(True,), generators=(True,))

schedules = st.sampled_from(SCHEDULES)
ranks = st.integers(1, 8)
microbatches = st.integers(1, 24)


@settings(max_examples=50, deadline=None)
@given(schedules, ranks, microbatches, shapes(), st.data())
def test_every_schedule_is_sound(
    schedule: str, ranks: int, mbs: int, shape: Shape, data: st.DataObject
) -> None:
    """It verifies, round-trips, strips to its base, and does all work, whatever ops cost."""
    cut = build(schedule, ranks, shape)
    times = st.sampled_from([0.25, 0.5, 1.0, 3.0])
    costs = Costs.uniform(cut, {stage.name: data.draw(times) for stage in cut.stages})
    table = passes.run(derive(cut, mbs, schedule, costs=costs, effort=QUICK))
    verify(table)
    assert Table.parse(str(table)) == table
    assert table.microbatches == mbs
    assert table.schedule == schedule
    sharded = [region.name for region in cut.regions if region.layout is Layout.SHARDED]
    assert table.only(sharded) == base_rows(cut, mbs, schedule)
    timeline = simulate(table, costs)
    work = mbs * sum(costs.seconds.values())
    assert sum(map(timeline.busy, range(ranks))) == pytest.approx(work)
    assert timeline.makespan >= work / ranks * (1 - 1e-9)


@settings(max_examples=25, deadline=None)
@given(ranks, microbatches, shapes(), st.integers(1, 3))
def test_an_order_that_is_searched_for_is_sound(
    ranks: int, mbs: int, shape: Shape, window: int
) -> None:
    cut = build("auto", ranks, shape)
    table = passes.run(derive(cut, mbs, "auto", effort=QUICK))
    verify(table)
    assert Table.parse(str(table)) == table
    assert table.microbatches == mbs


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(("nested", "transpose", "upfront")), ranks, microbatches, st.data())
def test_owners_are_kept(placement: str, ranks: int, mbs: int, data: st.DataObject) -> None:
    cut = build(f"{placement}/1f1b", ranks, BOTH)
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=mbs, max_size=mbs))
    given = {"enc0": tuple(owners), "gen0": "round_robin"}
    table = derive(cut, mbs, f"{placement}/1f1b", owners=given, effort=QUICK)
    assert [table.place[Op("enc0", Kind.W, mb)] for mb in range(mbs)] == owners
    assert [table.place[Op("gen0", Kind.F, mb)] for mb in range(mbs)] == [
        mb % ranks for mb in range(mbs)
    ]


@pytest.mark.parametrize("shape", [VISION, BOTH], ids=["encoder", "encoder and generator"])
@pytest.mark.parametrize("base", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("cost", [0.25, 1, 4])
def test_nested_does_not_lose(base: str, shape: Shape, cost: float) -> None:
    """Neither to all forwards first, nor to warmup slack, whatever memory those take."""
    cut = build(f"nested/{base}", 4, shape)
    costs = Costs.uniform(cut, {"enc0": cost})
    nested, upfront, transpose = (
        simulate(derive(cut, 16, f"{placement}/{base}", costs=costs, effort=0.2), costs).makespan
        for placement in ("nested", "upfront", "transpose")
    )
    assert nested <= min(upfront, transpose)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("shape", [VISION, BOTH], ids=["encoder", "encoder and generator"])
def test_live_units_do_not_grow_with_microbatches(ranks: int, shape: Shape) -> None:
    """BigMac holds three units of encoders and one of generators."""
    cut = build("nested/1f1b", ranks, shape)
    few, many = (
        _peaks(simulate(passes.run(derive(cut, mbs, "nested/1f1b", effort=0.05))), cut)
        for mbs in (4 * ranks, 32 * ranks)
    )
    assert {region: max(units) for region, units in few.items()} == {
        region: max(units) for region, units in many.items()
    }
    assert max(few["enc0"]) <= 4
    assert max(few.get("gen0", [1])) == 1


def test_what_a_table_holds_is_stated() -> None:
    """And the backbone holds what its base holds."""
    cut = build("nested/1f1b", 4, BOTH)
    table = derive(cut, 16, "nested/1f1b", effort=QUICK)
    held = {live.region: list(live.units) for live in table.live}
    assert held == _peaks(simulate(table), cut)
    base = simulate(base_alone(table))
    alone = [base.peak(["llm"], rank) for rank in range(4)]
    assert held["llm"] == alone == [7, 6, 5, 4], "1F1B and a wave of generator units"


def test_without_units_there_is_only_the_base() -> None:
    cut = build("nested/zb-h1", 4, Shape())
    base = base_rows(cut, 8, "nested/zb-h1")
    assert derive(cut, 8, "nested/zb-h1").rows == base
    assert derive(cut, 8, "nested/zb-h1", live={"llm": 8}, effort=QUICK).rows == base
    with pytest.raises(ScheduleError, match="allow more"):
        derive(cut, 8, "nested/zb-h1", live={"llm": 1}, effort=QUICK)


def test_limits_are_kept() -> None:
    cut = build("auto", 4, BOTH)
    table = derive(cut, 12, "auto", live={"modality": 2, "llm": 5}, effort=QUICK)
    held = {live.region: max(live.units) for live in table.live}
    assert held["llm"] <= 5
    assert max(held["enc0"], held["gen0"]) <= 2
    with pytest.raises(ScheduleError, match="live names"):
        derive(cut, 12, "auto", live={"encoder": 2})
    with pytest.raises(ScheduleError, match="allow more"):
        derive(cut, 12, "nested/1f1b", live={"modality": 0}, effort=QUICK)


def test_the_same_search_finds_the_same_rows() -> None:
    """Every rank of a job derives the table for itself."""
    cut = build("auto", 3, BOTH)
    costs = Costs.uniform(cut, {"enc0": 0.7, "gen0": 1.3})
    one, other = (derive(cut, 7, "auto", costs=costs, effort=0.02) for _ in range(2))
    assert one == other


def _peaks(timeline: Timeline, cut: Cut) -> dict[str, list[int]]:
    return {
        region: [timeline.peak([region], rank) for rank in range(cut.ranks)]
        for region in cut.region
    }


def test_1f1b_holds_what_it_says() -> None:
    cut = build("stage/1f1b", 4, Shape())
    timeline = simulate(derive(cut, 12, "stage/1f1b"))
    assert [timeline.peak(["llm"], rank) for rank in range(4)] == [4, 3, 2, 1]
    assert simulate(derive(cut, 12, "stage/gpipe")).peak(["llm"], 3) == 12


@pytest.mark.parametrize(
    ("ranks", "encoders", "generators", "home", "backbone"),
    [
        (4, ["v"], ["g"], {"v": 0, "g": 3}, (1, 2)),
        (4, ["v", "a"], [], {"v": 0, "a": 0}, (1, 2, 3)),
        (3, ["v"], ["g"], {"v": 0, "g": 2}, (1,)),
        (2, ["v"], ["g"], {"v": 0, "g": 1}, (0, 1)),
        (2, ["v"], [], {"v": 0}, (1,)),
        (2, [], ["g"], {"g": 1}, (0,)),
        (1, ["v"], ["g"], {"v": 0, "g": 0}, (0,)),
        (2, [], [], {}, (0, 1)),
    ],
)
def test_stage_layout(
    ranks: int,
    encoders: list[str],
    generators: list[str],
    home: dict[str, int],
    backbone: tuple[int, ...],
) -> None:
    plan = layout("stage/1f1b", ranks, encoders, generators)
    assert (plan.layout, plan.home, plan.backbone) == (Layout.SHARDED, home, backbone)


def test_replicated_layout() -> None:
    plan = layout("NESTED/1F1B", 3, ["v"], ["g"])
    assert plan.layout is Layout.REPLICATED
    assert (plan.home, plan.backbone) == ({"v": None, "g": None}, (0, 1, 2))


def test_upfront_with_a_returning_generator_runs_all_forwards_first() -> None:
    cut = build("upfront/1f1b", 2, BOTH)
    rows = base_rows(cut, 4, "upfront/1f1b")
    assert [op.kind for op in rows[1]][:4] == [Kind.F] * 4
    detached = build("upfront/1f1b", 2, Shape((True,), (True,), detached=True))
    assert [op.kind for op in base_rows(detached, 4, "upfront/1f1b")[1]][:2] == [Kind.F, Kind.B]


@pytest.mark.parametrize(
    "text", ["nested", "nested/zb", "sideways/1f1b", "", "nested/1f1b/2", "stage/auto"]
)
def test_an_unknown_schedule_lists_what_exists(text: str) -> None:
    with pytest.raises(
        ScheduleError, match=r"stage, ends, upfront, transpose, nested.*gpipe, looped-bfs"
    ):
        layout(text, 2)


def test_what_a_cut_cannot_have() -> None:
    replicated = build("nested/1f1b", 2, VISION)
    with pytest.raises(ScheduleError, match="enc0 has none"):
        derive(replicated, 4, "stage/1f1b")
    with pytest.raises(ScheduleError, match="0 microbatches"):
        derive(replicated, 0)
    with pytest.raises(ScheduleError, match="0 ranks"):
        layout("nested/1f1b", 0)
