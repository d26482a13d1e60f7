"""The time grid and the summary, as a person reads them."""

from itertools import pairwise

import pytest
from rich.console import Console

from fxpipe.costs import Costs
from fxpipe.cut import Kind
from fxpipe.figures import figures
from fxpipe.front import Point
from fxpipe.grid import grid, window
from fxpipe.marks import marks
from fxpipe.simulate import simulate
from fxpipe.summary import front, summary
from fxpipe.table import Op, Table
from fxpipe.timeline import Span, Timeline

TABLE = Table.parse(
    """
ranks 2
region vision encoder replicated
region llm backbone sharded
stage vision of vision: FW, owner, cost 1
stage llm0 of llm: FBW, rank 0, cost 1
stage llm1 of llm: FBW, rank 1, cost 1
seam vision -> llm0: features*
seam llm0 -> llm1: hidden*
shared vision
rank 0: vision.F0 llm0.F0 llm0.F1 llm0.B0 llm0.W0 llm0.B1 llm0.W1 vision.W0
rank 1: vision.F1 llm1.F0 llm1.B0 llm1.W0 llm1.F1 llm1.B1 llm1.W1 vision.W1
"""
)
COSTS = Costs.uniform(TABLE.cut)
WIDE = """\
       0       2       4       6       8       10
rank 0 v0--F0--F1--....B0--W0--....B1--W1--V0------
rank 1 v1--....F0--B0--W0--F1--B1--W1--V1------....

vision v:F V:W   llm F:F B:B W:W
one column is 0.25 s
"""
NARROW = """\
       0
rank 0 vFF.BW.BWV0
rank 1 v.FBWFBWV1.

vision v:F V:W
llm F:F B:B W:W
one column is 1 s
"""
SUMMARY = """\
makespan 11 s, lower bound 9 s (22.2% above it), mean bubble 18.2%

        bubble  live vision  live llm  E  w  spill
rank 0   18.2%            1         2  1  0      1
rank 1   18.2%            1         1  1  1      0

owners vision: 0 1"""


def run(*rows: str) -> Timeline:
    """A timeline from rows such as `F0:0-1 B0:1-3`, all of one stage per rank."""
    names = [f"llm{rank}" for rank in range(len(rows))]
    lines = [f"stage {name} of llm: FB, rank {rank}, cost 1" for rank, name in enumerate(names)]
    head = f"ranks {len(rows)}\nregion llm backbone sharded\n"
    cut = Table.parse(head + "\n".join(lines)).cut
    spans = []
    for rank, row in enumerate(rows):
        for word in row.split():
            op, times = word.split(":")
            start, end = map(float, times.split("-"))
            spans.append(Span(rank, Op.parse(f"{names[rank]}.{op}"), start, end))
    return Timeline(cut, tuple(spans))


@pytest.mark.parametrize(("width", "text"), [(90, WIDE), (22, NARROW)])
def test_letters(width: int, text: str) -> None:
    assert grid(simulate(TABLE, COSTS), width, colour=False).plain == text


def test_colours_say_the_same_without_letters() -> None:
    text = grid(simulate(TABLE, COSTS), 45, colour=True)
    assert text.plain.splitlines()[1] == "rank 0 0  0  1  ···0  0  ···1  1  0     "
    styles = {mark.style for mark in marks(TABLE.cut).values()}
    assert styles <= {str(span.style) for span in text.spans}
    console = Console(force_terminal=True, color_system="truecolor", width=45, record=True)
    with console.capture() as shown:
        console.print(text)
    assert "\x1b[" in shown.get()


def test_a_step_that_no_slot_divides_is_compressed() -> None:
    timeline = run("F0:0-10 F1:10-21.37 B0:21.37-30", "F0:10-20 B0:20-21.37")
    assert grid(timeline, 23, colour=False).plain == (
        "       0          20\n"
        "rank 0 F0---F1----B0---\n"
        "rank 1 .....F0----B....\n"
        "\n"
        "llm F:F B:B\n"
        "one column is 1.88 s; times are rounded to columns\n"
    )


def test_of_a_long_step_the_middle_is_left_out() -> None:
    ops = " ".join(f"F{mb}:{mb}-{mb + 1}" for mb in range(100))
    assert grid(run(ops), 27, colour=False).plain == (
        "       0        :\n"
        "rank 0 FFFFFFFF : FFFFFFFF\n"
        "\n"
        "llm F:F\n"
        "one column is 1 s; 84 of 100 s in the middle are left out\n"
    )


def test_an_op_that_is_shown_in_part_has_its_whole_number() -> None:
    ops = " ".join(f"F{mb}:{mb * 4}-{mb * 4 + 4}" for mb in range(40))
    text = grid(run(f"{ops} B0:160-161"), 27, colour=False).plain
    assert text.splitlines()[1] == "rank 0 F0--F1-- : F38F39-B"


@pytest.mark.parametrize("columns", [8, 40, 73, 191])
@pytest.mark.parametrize("length", [0.1, 1 / 3, 1.0, 2.5])
def test_a_window_fits_and_starts_ops_where_they_start(columns: int, length: float) -> None:
    starts = [mb * length for mb in range(30)]
    timeline = run(" ".join(f"F{mb}:{t}-{t + length}" for mb, t in enumerate(starts)))
    view = window(timeline, columns)
    shown = view.shown([(" ", "")] * view.total)
    assert len(shown) <= columns
    assert all(view.column(a) < view.column(b) for a, b in pairwise(starts))


def test_every_region_has_letters_of_its_own() -> None:
    names = ["vision", "video", "fbw", "image"]
    lines = ["ranks 1", "region llm backbone sharded"]
    lines += [f"region {name} generator replicated" for name in names]
    lines += [f"stage {name} of {name}: FBW, owner, cost 1" for name in names]
    lines += [f"stage llm{at} of llm: FBW, rank 0, cost 1" for at in range(3)]
    marked = marks(Table.parse("\n".join(lines)).cut)
    letters = {
        name: "".join(marked[name, kind].letter for kind in (Kind.F, Kind.B, Kind.W))
        for name in [*names, "llm0", "llm1", "llm2"]
    }
    assert letters == {
        "vision": "vVI",
        "video": "dDE",
        "fbw": "aAC",
        "image": "mMG",
        "llm0": "FBW",
        "llm1": "fbw",
        "llm2": "FBW",
    }
    assert marked["llm0", Kind.F] == marked["llm2", Kind.F]


def test_summary() -> None:
    assert summary(figures(TABLE, COSTS, simulate(TABLE, COSTS)), 80) == SUMMARY


def test_owners_fit_the_line() -> None:
    rows = [" ".join(f"vision.F{mb}" for mb in range(rank, 60, 2)) for rank in range(2)]
    text = "ranks 2\nregion vision encoder replicated\nstage vision of vision: F, owner, cost 1"
    table = Table.parse("\n".join([text, *(f"rank {r}: {row}" for r, row in enumerate(rows))]))
    costs = Costs.uniform(table.cut)
    last = summary(figures(table, costs, simulate(table, costs)), 50).splitlines()[-1]
    assert last == "owners vision: 0 1 0 1 0 1 0 1 0 ... (60 in all)"


def test_front() -> None:
    units = {"vision": 2, "llm": 4}
    points = (
        Point("nested/zb-h1", "free", 3, (), 1, 30.0, 9e9, units, best=True, chosen=True),
        Point("stage/zb-h1", "", None, (), 1, 32.25, 9.5e9, units, fits=False),
        Point("nested/1f1b", "free", 2, ("vision", "llm"), 1, 32.5, 7e9, units, best=True),
    )
    assert front(points) == (
        "3 schedules tried; > chosen, * none is better in seconds and bytes\n"
        "\n"
        "                 seconds    bytes  vision  llm  chunks  window   recompute  owners  fits\n"
        ">* nested/zb-h1       30    9e+09       2    4       1       3                free   yes\n"
        "   stage/zb-h1     32.25  9.5e+09       2    4       1                                no\n"
        " * nested/1f1b      32.5    7e+09       2    4       1       2  vision llm    free   yes"
    )
