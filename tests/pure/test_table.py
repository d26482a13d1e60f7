"""The text of ops, cuts and tables, and the one dependency rule."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.cut import Cut, Kind, Layout, Region, Role, Stage
from fxpipe.errors import TableError
from fxpipe.passes import run
from fxpipe.schedule import derive
from fxpipe.table import Op, Table, inputs
from tests.pure.cuts import QUICK, Shape, build, shapes

names = st.text("abz09_+", min_size=1, max_size=8)


@given(names, st.sampled_from("FBW"), st.integers(0, 999), st.sampled_from(["", "<", ">"]))
def test_an_op_round_trips(stage: str, kind: str, mb: int, way: str) -> None:
    op = Op(stage, Kind(kind), mb, way, 3 if way else None)
    assert Op.parse(str(op)) == op
    assert Op.parse(str(op)).value == Op(stage, Kind(kind), mb)


@given(st.sampled_from(["stage/gpipe", "nested/1f1b"]), st.integers(1, 5), shapes())
def test_a_cut_round_trips(schedule: str, ranks: int, shape: Shape) -> None:
    cut = build(schedule, ranks, shape)
    assert Cut.parse(str(cut)) == cut


@given(st.floats(0, allow_nan=False, allow_infinity=False))
def test_a_cost_keeps_every_digit(cost: float) -> None:
    region = Region("llm", Role.BACKBONE, Layout.SHARDED)
    cut = Cut(1, (region,), (Stage("llm0", "llm", (Kind.F,), 0, cost),), ())
    assert Cut.parse(str(cut)) == cut


@pytest.mark.parametrize("token", ["llm0", "llm0.F", "llm0.X1", "llm0.F1>", "llm0.F1>a", ".F1"])
def test_what_is_not_an_op(token: str) -> None:
    with pytest.raises(TableError, match="not an op"):
        Op.parse(token)


TEXT = """\
ranks 2

region vision encoder replicated recompute
region llm backbone sharded
stage vision of vision: FW, owner, cost 1
stage llm0 of llm: FBW, rank 0, cost 1
stage llm1 of llm: FBW, rank 1, cost 0.5
seam vision -> llm0: features*
seam llm0 -> llm1: hidden* mask
shared llm0 llm1
schedule nested/1f1b
live llm: 2 1
rank 0: vision.F0 vision.F1<1 llm0.F0
rank 1: vision.F1 vision.F1>0
"""
LINES = (  # line, what stands there, what it is made, what the message says
    (1, "ranks 2", "ranks x", "not a ranks: 'ranks x'; expected `ranks 2`"),
    (1, "ranks 2", "ranks 99999999999", "expected `ranks 2`"),
    (1, "ranks 2", "ranks 0", "a pipeline has at least one rank"),
    (1, "ranks 2", "ranks 1", "rank 1 is none of the 1 ranks"),
    (2, "\n\n", "\nranks 2\n", "an earlier line has it already"),
    (2, "\n\n", "\nwhat\n", "not a line of a cut: 'what'; expected ranks, region, stage"),
    (3, "encoder", "x", "'x' is not a valid Role; expected `region llm encoder|backbone|generator"),
    (
        3,
        "replicated",
        "x",
        "'x' is not a valid Layout; expected `region llm encoder|backbone|generator",
    ),
    (3, "recompute", "recompute now", "not a region"),
    (3, "vision", "audio", "no region vision; the cut has audio, llm"),
    (4, "llm backbone", "vision backbone", "an earlier line has it already"),
    (5, "owner", "rank 0", "region vision is replicated; expected `owner`"),
    (5, "FW", "FF", "kinds FF; there are F, FB, FW, FBW"),
    (5, "stage vision of", "stage vi.sion of", "not a stage; expected `stage llm0 of llm"),
    (6, "rank 0,", "owner,", "region llm is sharded; expected `rank N`"),
    (6, "rank 0,", "rank 2,", "rank 2 is none of the 2 ranks"),
    (6, "llm0 of llm", "llm0 of l", "no region l; the cut has vision, llm"),
    (6, "FBW, rank 0, cost 1", "FBW, rank 0", "not a stage"),
    (7, "llm1 of", "llm0 of", "an earlier line has it already"),
    (7, "0.5", "nan", "cost nan is no finite number of at least 0"),
    (7, "0.5", "-1", "cost -1 is no finite number"),
    (7, "0.5", "much", "could not convert string to float: 'much'"),
    (8, "vision -> llm0", "vision -> l", "no stage l; the cut has vision, llm0, llm1"),
    (8, "->", "to", "not a seam"),
    (9, "llm0 -> llm1", "llm1 -> llm1", "a stage has no seam to itself"),
    (9, "llm0 -> llm1", "vision -> llm0", "an earlier line has it already"),
    (9, "mask", "hidden", "a value stands twice"),
    (10, "shared llm0 llm1", "shared", "not a shared"),
    (10, "shared llm0 llm1", "shared llm0 llm7", "no stage llm7"),
    (10, "shared llm0 llm1", "schedule a/b", "the schedule is stated twice"),
    (12, "live llm: 2 1", "live llm:", "not a line of a cut: 'live llm:'"),
    (12, "live llm: 2 1", "live llm: 2 x", "not a line of a cut"),
    (12, "nested/1f1b", "x\nlive llm: 1 1", "live of llm is stated twice"),
    (13, "llm0.F0", "llm0.X0", "not an op: 'llm0.X0'; expected one like"),
    (13, "llm0.F0", "llm0.F9999999999", "not an op"),
    (13, "rank 0:", "rank 1:", "rank 1 stands where rank 0 is expected"),
    (14, "rank 1:", "rank 99999999999:", "not a line of a cut"),
    (14, "rank 1:", "rank 3:", "rank 3 stands where rank 1 is expected"),
)


def test_a_whole_table_round_trips() -> None:
    table = Table.parse(TEXT)
    assert Table.parse(str(table)) == table
    assert str(table) == TEXT.replace("\n\n", "\n").rstrip()


@pytest.mark.parametrize(("line", "good", "bad", "says"), LINES)
def test_a_wrong_line_is_named(line: int, good: str, bad: str, says: str) -> None:
    at = 0 if good == "\n\n" or "\n" in bad else line - 1
    before, after = "".join(TEXT.splitlines(True)[:at]), "".join(TEXT.splitlines(True)[at:])
    text = before + after.replace(good, bad, 1)
    assert text != TEXT
    with pytest.raises(TableError) as error:
        Table.parse(text)
    message = str(error.value)
    assert says in message
    assert message.count("\n") == 0
    assert re.match(r"line \d+: ", message)


def test_the_number_is_that_of_the_line_in_the_file() -> None:
    for number, bad in ((4, "sharded"), (7, "0.5"), (11, "schedule"), (14, "vision.F1>0")):
        with pytest.raises(TableError, match=f"^line {number}: "):
            Table.parse(TEXT.replace(bad, "what", 1))


def test_a_long_line_is_cut() -> None:
    for text in ("x" * 9999, "ranks 1\nrank 0: " + "x" * 9999):
        with pytest.raises(TableError) as error:
            Table.parse(text)
        assert len(str(error.value)) < 250


def test_a_text_without_ranks() -> None:
    for text in ("", "\n", "region llm backbone sharded"):
        with pytest.raises(TableError, match="no line says how many ranks there are"):
            Table.parse(text)


def fragments() -> st.SearchStrategy[str]:
    words = st.sampled_from(
        [*TEXT.split(), "\n", " ", ":", "*", "-1", "9" * 5000, "\x0c", "٣", "é"]
    )
    return words | st.text(max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_text_is_refused_in_one_line_or_read(data: st.DataObject) -> None:
    text = TEXT
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        stop = min(len(text), start + data.draw(st.integers(0, 12)))
        text = text[:start] + data.draw(fragments()) + text[stop:]
    try:
        table = Table.parse(text)
    except TableError as error:
        assert "\n" not in str(error)
        return
    assert Table.parse(str(table)) == table


@given(st.text())
def test_any_text_is_refused(text: str) -> None:
    with pytest.raises(TableError):
        Table.parse(text)


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 5), shapes())
def test_numbers_stand_for_values(ranks: int, mbs: int, shape: Shape) -> None:
    table = run(derive(build("nested/1f1b", ranks, shape), mbs, effort=QUICK))
    for row, numbers in zip(table.rows, table.numbered.rows, strict=True):
        for op, number in zip(row, numbers, strict=True):
            assert table.numbered.op(number) == op.value
            read = [table.numbered.op(value) for value in table.numbered.inputs(number)]
            assert read == list(inputs(op.value, table.cut))
    assert {table.numbered.op(n): rank for n, rank in table.numbered.home.items()} == table.place


def test_inputs() -> None:
    cut = build("nested/1f1b", 2, Shape((True,), (True,), taps=True))
    reads = {
        "enc0.F1": [],
        "llm1.F1": ["enc0.F1", "llm0.F1"],
        "gen0.B1": ["gen0.F1"],
        "gen0.W1": ["gen0.B1"],
        "llm0.B1": ["llm0.F1", "llm1.B1"],
        "enc0.W1": ["enc0.F1", "llm0.B1", "llm1.B1"],
        "enc0.R": [],
    }
    for op, expected in reads.items():
        assert [str(x) for x in inputs(Op.parse(op), cut)] == expected, op
