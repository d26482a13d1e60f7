"""The text of ops, cuts and tables, and the one dependency rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.cut import Cut, Kind, Stage
from fxpipe.errors import TableError
from fxpipe.table import Op, Table, inputs
from tests.pure.cuts import Shape, build, shapes

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
    cut = Cut(1, (), (Stage("llm0", "llm", (Kind.F,), 0, cost),), ())
    assert Cut.parse(str(cut)) == cut


@pytest.mark.parametrize("token", ["llm0", "llm0.F", "llm0.X1", "llm0.F1>", "llm0.F1>a", ".F1"])
def test_what_is_not_an_op(token: str) -> None:
    with pytest.raises(TableError, match="not an op"):
        Op.parse(token)


@pytest.mark.parametrize(
    "line", ["region vision encoder", "stage llm0 of llm: FX, rank 0, cost 1", "what", "rank 1:"]
)
def test_what_is_not_a_table(line: str) -> None:
    with pytest.raises(TableError):
        Table.parse(f"ranks 2\n{line}\n")


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
