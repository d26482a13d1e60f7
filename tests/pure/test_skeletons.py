"""Every base is sound, ends, is as fast as published, and holds no more than it says."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe import passes
from fxpipe.costs import Costs
from fxpipe.cut import Kind
from fxpipe.errors import ScheduleError
from fxpipe.simulate import simulate
from fxpipe.skeletons import PATTERNS, Base, base, homes, pattern_rows
from fxpipe.table import Op, Table
from fxpipe.verify import verify
from tests.pure.chains import SPLIT, WHOLE, chain, chained, rows_of

ranks = st.integers(1, 8)
microbatches = st.integers(1, 24)


@st.composite
def laid(draw: st.DrawFn) -> tuple[Base, int]:
    """A base, and how many stages each rank has."""
    drawn = draw(st.sampled_from(list(PATTERNS.values())))
    return drawn, drawn.chunks or draw(st.integers(1, 3))


@settings(max_examples=80, deadline=None)
@given(laid(), ranks, microbatches, st.sampled_from(("none", "one", "group")))
def test_every_step_stands_once_and_on_its_rank(
    kind: tuple[Base, int], ranks: int, mbs: int, ahead: str
) -> None:
    base, chunks = kind
    places = homes(base, ranks, chunks)
    rows = pattern_rows(base, places, mbs, {"none": 0, "one": 1, "group": ranks - 1}[ahead])
    for rank, row in enumerate(rows):
        stages = [stage for stage, home in enumerate(places) if home == rank]
        assert sorted(row) == sorted(product(SPLIT, stages, range(mbs)))
        backwards = [(stage, mb) for kind, stage, mb in row if kind is Kind.B]
        if not base.splits:
            assert [row[row.index((Kind.B, *x)) + 1] for x in backwards] == [
                (Kind.W, *x) for x in backwards
            ]


@settings(max_examples=25, deadline=None)
@given(laid(), ranks, st.integers(1, 12))
def test_every_base_is_sound_under_the_strictest_transport(
    kind: tuple[Base, int], ranks: int, mbs: int
) -> None:
    verify(passes.run(chained(*_on(kind, ranks), mbs)))


def _on(kind: tuple[Base, int], ranks: int) -> tuple[Base, int, int]:
    return kind[0], ranks, kind[1]


@settings(max_examples=60, deadline=None)
@given(laid(), ranks, microbatches, st.integers(1, 8))
def test_it_ends_if_gradients_return_for_groups(
    kind: tuple[Base, int], ranks: int, mbs: int, group: int
) -> None:
    base, chunks = kind
    places = homes(base, ranks, chunks)
    cut = chain((*places, ranks), SPLIT)
    rows = rows_of(pattern_rows(base, places, mbs, group - 1), cut)
    last = cut.stages[-1].name
    units = (range(at, min(mbs, at + group)) for at in range(0, mbs, group))
    behind = [Op(last, kind, mb) for unit in units for kind in SPLIT for mb in unit]
    assert simulate(Table(cut, (*rows, tuple(behind))))


def _live(row: tuple[tuple[Kind, int, int], ...]) -> int:
    """Most stages x microbatches between F and W."""
    held = most = 0
    for kind, _, _ in row:
        held += {Kind.F: 1, Kind.W: -1}.get(kind, 0)
        most = max(most, held)
    return most


def _bound(base: Base, ranks: int, rank: int, chunks: int, mbs: int, lead: int) -> int:
    """What the docstrings of the orders promise."""
    behind = ranks - 1 - rank
    uneven = -(-(mbs % ranks) // max(1, mbs // ranks)) if mbs > ranks else 0
    reach = (chunks - 1) * (ranks + uneven) + lead
    match base.name:
        case "1f1b" | "interleaved":
            return reach + behind * (2 if chunks > 1 else 1) + 1
        case "zb-h1" | "interleaved-zb":
            return reach + ranks
        case "zb-v":
            return 2 * (ranks + lead)
        case "dualpipe-v":
            return 2 * (ranks + lead) + 1
        case _:
            return mbs * chunks


@settings(max_examples=100, deadline=None)
@given(laid(), ranks, microbatches, st.booleans())
def test_no_rank_holds_more_than_promised(
    kind: tuple[Base, int], ranks: int, mbs: int, group: bool
) -> None:
    base, chunks = kind
    if chunks > 1 and base.shape == "loop" and group:
        mbs *= ranks  # what groups add to rounds of another size has no short formula
    lead = ranks - 1 if group else 0
    for rank, row in enumerate(pattern_rows(base, homes(base, ranks, chunks), mbs, lead)):
        assert _live(row) <= min(mbs * chunks, _bound(base, ranks, rank, chunks, mbs, lead))


@pytest.mark.parametrize(
    "name, chunks", [("zb-h1", 1), ("interleaved-zb", 2), ("zb-v", 2), ("dualpipe-v", 2)]
)
@pytest.mark.parametrize("ranks, mbs", [(1, 3), (2, 5), (4, 8), (4, 11), (8, 16)])
def test_split_bases_wait_for_nothing_but_their_first_forward(
    name: str, chunks: int, ranks: int, mbs: int
) -> None:
    table = chained(base(name), ranks, chunks, mbs, SPLIT)
    assert simulate(table, Costs.uniform(table.cut)).makespan == 3 * mbs * chunks + ranks - 1


@pytest.mark.parametrize("name, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 3)])
@pytest.mark.parametrize("ranks, mbs", [(1, 3), (2, 5), (4, 8), (4, 11), (8, 16)])
def test_whole_backwards_leave_the_bubble_of_1f1b(
    name: str, chunks: int, ranks: int, mbs: int
) -> None:
    table = chained(base(name), ranks, chunks, mbs, WHOLE)
    seconds = {
        (s.name, kind): 2.0 if kind is Kind.B else 1.0 for s in table.cut.stages for kind in s.kinds
    }
    assert simulate(table, Costs(seconds)).makespan == 3 * mbs * chunks + 3 * (ranks - 1)


def test_rows_read_as_published() -> None:
    def row(name: str, ranks: int, rank: int, mbs: int) -> str:
        steps = pattern_rows(base(name), homes(base(name), ranks), mbs)[rank]
        return " ".join(f"{stage}{kind}{mb}" for kind, stage, mb in steps)

    assert row("1f1b", 2, 0, 3) == "0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2"
    assert row("zb-h1", 2, 1, 3) == "1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2"
    assert row("interleaved", 2, 1, 2) == ("1F0 1F1 3F0 3B0 3W0 3F1 3B1 3W1 1B0 1W0 1B1 1W1")
    assert row("zb-v", 2, 0, 2) == "0F0 0F1 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 0B1 0W1"


def test_names_of_ours_and_of_torch() -> None:
    assert [base(x.torch or x.name) for x in PATTERNS.values()] == list(PATTERNS.values())
    assert base(" zbvZEROBUBBLE ") is PATTERNS["zb-v"]
    with pytest.raises(ScheduleError, match=r"'2f2b' is unknown.*zb-h1.*InterleavedZeroBubble"):
        base("2f2b")


def test_homes() -> None:
    assert homes(base("interleaved"), 3) == (0, 1, 2, 0, 1, 2)
    assert homes(base("dualpipe-v"), 3) == (0, 1, 2, 2, 1, 0)
    with pytest.raises(ScheduleError, match=r"1f1b on 2 ranks with chunks=3.* 1 on each"):
        homes(base("1f1b"), 2, 3)


def test_a_pipeline_may_leave_ranks_out_but_not_change_its_shape() -> None:
    rows = pattern_rows(base("1f1b"), (3, 1), 2)
    assert [len(row) for row in rows] == [0, 6, 0, 6]
    assert rows[3] == pattern_rows(base("1f1b"), (0, 1), 2)[0]
    with pytest.raises(
        ScheduleError, match=r"zb-v cannot run stages on ranks 0, 1, 0, 1;.*0, 1, 1, 0"
    ):
        pattern_rows(base("zb-v"), (0, 1, 0, 1), 2)
    with pytest.raises(ScheduleError, match="0 microbatches"):
        pattern_rows(base("zb-v"), (0, 1, 1, 0), 0)
