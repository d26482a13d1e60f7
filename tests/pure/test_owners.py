"""Owner maps, and the tables that come of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe import passes
from fxpipe.costs import Costs
from fxpipe.cut import Cut, Kind, Layout, Region, Role, Seam, Stage
from fxpipe.errors import ScheduleError
from fxpipe.owners import balanced, owners_of, round_robin, slack
from fxpipe.schedule import derive, layout
from fxpipe.simulate import simulate
from fxpipe.table import Table
from fxpipe.verify import verify

seconds = st.lists(st.floats(0.1, 10), min_size=1, max_size=24)
idle = st.lists(st.floats(0, 20), min_size=1, max_size=8)


def test_maps() -> None:
    assert round_robin(3, 5) == (0, 1, 2, 0, 1)
    assert balanced([1, 1, 1, 5, 2], 2) == (1, 1, 1, 0, 1)
    assert slack([1] * 6, [0, 1, 2]) == (0, 1, 2, 1, 2, 2)
    assert slack([1] * 6, [0, 1, 2], backward=True) == (1, 2, 2, 0, 1, 2)


@given(seconds, idle)
def test_every_microbatch_has_an_owner(seconds: list[float], idle: list[float]) -> None:
    for rule in ("round_robin", "slack", "balanced"):
        owners = owners_of(rule, seconds, idle)
        assert len(owners) == len(seconds)
        assert set(owners) <= set(range(len(idle)))


@given(seconds, st.integers(1, 8))
def test_balanced_is_within_a_third_of_the_best(seconds: list[float], ranks: int) -> None:
    """Longest processing time first: at most 4/3 of the optimum (Graham 1969)."""
    owners = balanced(seconds, ranks)
    work = [sum(s for s, r in zip(seconds, owners, strict=True) if r == k) for k in range(ranks)]
    least = max(sum(seconds) / ranks, max(seconds))
    assert max(work) <= least + max(seconds) * (1 - 1 / ranks) + 1e-9


@given(seconds, idle)
def test_slack_fills_before_it_spills(seconds: list[float], idle: list[float]) -> None:
    owners, ranks = slack(seconds, idle), len(idle)
    later = range(min(ranks, len(seconds)), len(seconds))
    for mb in later:
        filled = [
            sum(seconds[x] for x in later if x < mb and owners[x] == rank) for rank in range(ranks)
        ]
        room = [filled[r] + seconds[mb] <= idle[r] for r in range(ranks)]
        assert room[owners[mb]] or not any(room), f"{mb} spills, though a rank has room"


@pytest.mark.parametrize("rule", ["nearest", None, (0, 1), (0, 1, 5)])
def test_owners_that_cannot_be(rule: str | tuple[int, ...] | None) -> None:
    with pytest.raises(ScheduleError, match="owner"):
        owners_of(rule, [1.0] * 3, [0.0, 1.0])


def kimi(recompute: bool) -> tuple[Cut, Costs]:
    """Three ranks, four virtual stages on each, an encoder of a third of one."""
    plan = layout("transpose/interleaved", 3, ["vision"], chunks=4)
    names = [f"llm{i}" for i in range(len(plan.backbone))]
    kinds = (Kind.F, Kind.B, Kind.W)
    cut = Cut(
        3,
        (
            Region("vision", Role.ENCODER, Layout.REPLICATED, recompute),
            Region("llm", Role.BACKBONE, Layout.SHARDED),
        ),
        (
            Stage("vision", "vision", (Kind.F, Kind.W), None),
            *(Stage(n, "llm", kinds, r) for n, r in zip(names, plan.backbone, strict=True)),
        ),
        tuple(
            Seam(one, other, ("h",), ("h",))
            for one, other in zip(("vision", *names), names, strict=False)
        ),
        (("vision",),),
    )
    return cut, Costs.uniform(cut, dict.fromkeys(names, 1.0) | {"vision": 1 / 3})


def test_the_published_placement_of_kimi_k3() -> None:
    """Its figure 11. Forwards before the schedule {1}, {2}, {3}; in the head slack of rank 1 {4},
    of rank 2 {5, 6}. Backwards in the tail slack of rank 1 {1}, of rank 2 {2, 3}; after it {4},
    {5}, {6}. Its encoder computes its forward again, so that a backward may run anywhere."""
    cut, costs = kimi(recompute=True)
    table = passes.run(derive(cut, 6, "transpose/interleaved", costs=costs))
    verify(table)
    assert units(table, Kind.F) == [[1], [2, 4], [3, 5, 6]]
    assert units(table, Kind.W) == [[4], [1, 5], [2, 3, 6]]
    for row in table.compute:
        encoder = [at for at, op in enumerate(row) if op.stage == "vision"]
        forwards = [at for at in encoder if row[at].kind is Kind.F]
        assert forwards == list(range(len(forwards))), "before the first backbone forward"
        assert encoder[len(forwards) :] == list(
            range(len(row) - len(encoder) + len(forwards), len(row))
        )
    assert simulate(table, costs).peak(["vision"]) == 0


def test_an_encoder_that_keeps_activations_has_one_owner() -> None:
    cut, costs = kimi(recompute=False)
    table = derive(cut, 6, "transpose/interleaved", costs=costs)
    assert units(table, Kind.F) == units(table, Kind.W) == [[1], [2, 4], [3, 5, 6]]


def units(table: Table, kind: Kind) -> list[list[int]]:
    """The encoder's microbatches of each rank, counted from 1."""
    return [
        [(op.mb or 0) + 1 for op in row if op.stage == "vision" and op.kind is kind]
        for row in table.compute
    ]
