"""torch's CSV of actions: what it means, what cannot be written, and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe import passes
from fxpipe.actions import read_actions, write_actions
from fxpipe.cut import Cut
from fxpipe.errors import ScheduleError
from fxpipe.skeletons import PATTERNS, base
from fxpipe.table import Table
from tests.pure.chains import FIRST, SPLIT, WHOLE, chain, chained

# Two ranks with two stages each in a v, as torch writes it with transfers and parameters.
CSV = """\
0UNSHARD,3UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,,3RECV_F0,3F0,3I0,3SEND_B0,3W0,3F1,3B1,3SEND_B1,\
0RECV_B0,0I0,0W0,0B1,0REDUCE_GRAD,3REDUCE_GRAD,0RESHARD
,1RECV_F0,1F0,2F0,2SEND_F0,1F1,(2F1;2B0)OVERLAP_F_B,1I0,1SEND_B0,2I1,1W0,1B1,2W1
"""
ROWS = """\
llm0.F0 llm0.F1 llm3.F0 llm3.B0 llm3.W0 llm3.F1 llm3.B1 llm3.W1 llm0.W0 llm0.W1
llm1.F0 llm2.F0 llm1.F1 llm2.F1 llm2.B0 llm2.W0 llm1.B0 llm2.B1 llm1.W0 llm1.B1 llm1.W1 llm2.W1\
"""
CUT = chain((0, 1, 1, 0), FIRST, SPLIT)


def test_actions_become_ops() -> None:
    rows = read_actions(CSV, CUT)
    assert "\n".join(" ".join(map(str, row)) for row in rows) == ROWS
    passes.run(Table(CUT, rows))


def test_ops_become_actions() -> None:
    lines = write_actions(Table(CUT, read_actions(CSV, CUT))).splitlines()
    assert lines == [
        "0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1",
        "1F0,2F0,1F1,2F1,2B0,1I0,2I1,1W0,1B1,2W1",
    ]


def test_a_stage_may_do_its_whole_backward_in_one_op() -> None:
    cut = chain((0, 1), FIRST, WHOLE)
    rows = read_actions("0F0,0I0,0W0\n1F0,1I0,1W0\n", cut)
    assert [" ".join(map(str, row)) for row in rows] == ["llm0.F0 llm0.W0", "llm1.F0 llm1.B0"]
    assert write_actions(Table(cut, rows)) == "0F0,0B0\n1F0,1B0\n"


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(list(PATTERNS)), st.integers(1, 6), st.integers(1, 10))
def test_what_is_written_reads_back(name: str, ranks: int, mbs: int) -> None:
    table = chained(base(name), ranks, base(name).default_chunks, mbs)
    assert read_actions(write_actions(table), table.cut) == table.rows
    if mbs < 4:
        assert write_actions(passes.run(table)) == write_actions(table)


def test_what_torch_cannot_express() -> None:
    cut = Cut.parse(
        "ranks 2\nregion vision encoder replicated\nregion llm backbone sharded\n"
        "stage vision of vision: FW, owner, cost 1\nstage llm0 of llm: FBW, rank 1, cost 1\n"
        "seam vision -> llm0: h*\nshared vision"
    )
    owned = Table.parse(f"{cut}\nrank 0: vision.F0 vision.W0\nrank 1: llm0.F0 llm0.B0 llm0.W0")
    with pytest.raises(ScheduleError, match=r"rank 0: vision\.F0 is no action of torch"):
        write_actions(owned)
    frozen = Table.parse(
        "ranks 1\nregion llm backbone sharded\nstage llm0 of llm: F, rank 0, cost 1\n"
        "rank 0: llm0.F0"
    )
    with pytest.raises(ScheduleError, match=r"llm0\.F0 .* llm0 has none"):
        write_actions(frozen)


@pytest.mark.parametrize(
    "text, message",
    [
        ("0F0\n", "1 lines of actions for 2 ranks"),
        ("0F0\n1F0,1X0\n", "line 2: '1X0' is no action"),
        ("0F0\n1F\n", "line 2: '1F' is no action"),
        ("0F0,(3F0;9B0)OVERLAP_F_B\n\n", "line 1: '9B0' is of stage 9; the cut has 4 sharded"),
        ("0F0\n3F0\n", "line 2: '3F0' stands in the line of rank 1, .* llm3 on rank 0"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        read_actions(text, CUT)
