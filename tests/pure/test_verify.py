"""Each rule finds the table that breaks it, and says what to do."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe import passes
from fxpipe.costs import Costs
from fxpipe.errors import TableError
from fxpipe.schedule import derive
from fxpipe.simulate import simulate
from fxpipe.table import Live, Table, live_units
from fxpipe.verify import MOVES, ORDER, RULES, verify
from tests.pure.cuts import QUICK, Shape, build, shapes

CUT = """\
ranks 2
region vision encoder replicated
region llm backbone sharded
stage vision of vision: FW, owner, cost 1
stage llm0 of llm: FBW, rank 0, cost 1
stage llm1 of llm: FBW, rank 1, cost 1
seam vision -> llm0: features*
seam llm0 -> llm1: hidden* mask
shared vision
shared llm0 llm1
"""
ROWS = """\
rank 0: vision.F0 vision.F1<1 llm0.F0 llm0.F0>1 llm0.F1 llm0.F1>1 llm1.B0<1 llm0.B0 llm0.W0 \
llm1.B1<1 llm0.B1 llm0.B1>1 llm0.W1 vision.W0 vision.R llm0+llm1.R
rank 1: vision.F1 vision.F1>0 llm0.F0<0 llm1.F0 llm0.F1<0 llm1.B0 llm1.B0>0 llm1.W0 llm1.F1 \
llm1.B1 llm1.B1>0 llm1.W1 llm0.B1<0 vision.W1 vision.R llm0+llm1.R
"""
TEXT = CUT + "schedule nested/1f1b\nlive vision: 1 1\nlive llm: 2 1\n" + ROWS


def test_the_whole_table_is_sound() -> None:
    verify(Table.parse(TEXT))


BROKEN = [
    ("known", "llm1.F0 llm0.F1<0", "llm7.F0 llm0.F1<0", "the cut has vision, llm0, llm1"),
    ("known", "vision.W1", "vision.B1", "vision has only FW"),
    ("known", "llm0.F0>1", "llm0.F0>5", "names rank 5; expected another one of 0..1"),
    ("known", "llm0.F0>1", "llm0.F0>0", "names rank 0"),
    ("known", "llm0.W0", "llm0.W0 llm0.W0>1", "weight gradients stay on their rank"),
    ("known", "llm0+llm1.R", "llm0.R", "it has vision, llm0+llm1"),
    ("known", "vision.W0 vision.R", "vision.W0 vision.R>1 vision.R", "no value to move"),
    ("known", "rank 1: ", "rank 1: vision.F0\nrank 2: ", "the cut has 2 ranks, the table 3 rows"),
    ("known", "schedule nested/1f1b", "schedule nested/2f2b", "leave the line `schedule` out"),
    ("known", "live llm: 2 1", "live audio: 2 1", "`live audio: 2 1` names no region; the cut has"),
    (
        "known",
        "live llm: 2 1",
        "live llm: 2",
        "states 1 of 2 ranks; write a number",
    ),
    ("footprint", "features*", "features", "no starred value enters llm0, so nothing reads"),
    (
        "footprint",
        "llm1 of llm: FBW",
        "llm1 of llm: FW",
        "llm1 must make the gradient, but has only",
    ),
    ("footprint", "vision: FW", "vision: F", "vision must read the gradient, but has no backward"),
    ("footprint", "vision: FW", "vision: F", "`shared vision`: none of these has a backward op"),
    ("defined_once", "llm0.W0 ", "llm0.W0 llm0.W0 ", "runs already on rank 0"),
    ("placed", "vision.F0 ", "vision.F0 llm1.F0 ", "llm1.F0 belongs on rank 1: the stage lives"),
    (
        "placed",
        "vision.W0 vision.R",
        "vision.W1 vision.R",
        "belongs on rank 0: its forward is there",
    ),
    ("complete", "llm0.W0 ", "", "llm0.W0 is missing; add it to the row of rank 0"),
    ("complete", "vision.W1 ", "", "vision.W1 is missing; add it to the row of its owner"),
    ("complete", ROWS, "rank 0:\nrank 1:\n", "the rows run no microbatch"),
    (
        "bounded",
        "live vision: 1 1",
        "live vision: 1 0",
        "vision on rank 1 to 1, and the",
    ),
    (
        "bounded",
        "live llm: 2 1",
        "live llm: 1 1",
        "llm0.F1 brings the live units of llm on rank 0 to 2",
    ),
    ("base_kept", "1f1b", "gpipe", "llm1.B0 stands where nested/gpipe has llm1.F1; keep the order"),
    (
        "read_after_write",
        "llm0.B0 llm0.W0",
        "llm0.W0 llm0.B0",
        "reads llm0.B0, which is made after",
    ),
    ("read_after_write", "llm0.F0 llm0.F0>1", "llm0.F0>1 llm0.F0", "llm0.F0>1 reads llm0.F0"),
    ("posted", "llm0.F0<0 llm1.F0", "llm1.F0 llm0.F0<0", "put llm0.F0<0 before it"),
    ("made_where_sent", "llm1.W0 ", "llm1.W0 llm0.F0>0 ", "llm0.F0 is made on rank 0"),
    ("sends_meet_receives", "llm0.F0>1 ", "", "llm0.F0>1 0 times, rank 1 has llm0.F0<0 1 times"),
    ("sends_meet_receives", "llm1.B0<1 ", "llm1.B0<1 llm1.B0<1 ", "llm1.B0<1 2 times"),
    ("read_where_received", "llm0.W0 ", "llm0.W0 llm1.F0<1 ", "no op on rank 0 reads llm1.F0"),
    ("channels_in_order", "llm0.F0<0 llm1.F0 llm0.F1<0", "llm0.F1<0 llm0.F0<0 llm1.F0", "post in"),
    ("reduced_once", "vision.W0 vision.R", "vision.W0", "rank 0 has vision.R 0 times"),
    ("reduced_once", "vision.W0 vision.R", "vision.R vision.W0", "stands before vision.W0; put"),
    ("reduced_in_order", "vision.W1 vision.R llm0+llm1.R", "vision.W1 llm0+llm1.R vision.R", "one"),
    (
        "makes_progress",
        "vision.F0 vision.F1<1 llm0.F0",
        "vision.F1<1 llm1.B0<1 vision.F0 llm0.F0",
        "has not met its other end",
    ),
]


@pytest.mark.parametrize(("rule", "good", "bad", "says"), BROKEN)
def test_a_broken_rule_is_named(rule: str, good: str, bad: str, says: str) -> None:
    text = TEXT.replace(good, bad, 1)
    if rule == "makes_progress":
        text = text.replace("llm1.B0<1 llm0.B0", "llm0.B0")
    assert text != TEXT
    with pytest.raises(TableError, match=re.escape(says)) as error:
        verify(Table.parse(text))
    assert f"{rule}: " in str(error.value)


def test_every_rule_has_a_broken_table() -> None:
    assert {rule.__name__ for rule in RULES} == {rule for rule, *_ in BROKEN}


def test_all_broken_rules_are_listed_with_the_row_around_them() -> None:
    rows = ROWS.replace("llm0.F0>1 ", "", 1).replace("vision.W1 ", "", 1)
    with pytest.raises(TableError) as error:
        verify(Table.parse(CUT + rows))
    lines = str(error.value).splitlines()
    rules = [line.split(":")[0] for line in lines]
    assert rules == ["complete", "sends_meet_receives", "read_where_received"]


def test_a_long_list_is_cut() -> None:
    forwards = (" ".join(f"llm{rank}.F{mb}" for mb in range(40)) for rank in range(2))
    rows = (f"rank {rank}: {row}\n" for rank, row in enumerate(forwards))
    with pytest.raises(TableError, match="and 220 more"):
        verify(Table.parse(CUT + "".join(rows)), ORDER)


@pytest.mark.parametrize(
    ("old", "new", "gap", "other"), [("0", "2", "0", "1"), ("1", "999999999", "1", "999999999")]
)
def test_microbatches_have_no_gap(old: str, new: str, gap: str, other: str) -> None:
    rows = re.sub(rf"\.([FBW]){old}\b", rf".\g<1>{new}", ROWS)
    with pytest.raises(TableError) as error:
        verify(Table.parse(TEXT.replace(ROWS, rows)))
    assert (
        f"complete: no op of microbatch {gap}, but ops of microbatch {other}; "
        "number the 2 microbatches from 0 to 1"
    ) in str(error.value)


def test_live_units_are_counted_in_row_order() -> None:
    table = Table.parse(TEXT)
    assert live_units(table, "llm", 0) == [0, 1, 2, 2, 1, 1, 0, 0]
    assert live_units(table, "vision", 1) == [1, 1, 1, 1, 1, 1, 1, 0]


def test_an_order_that_has_no_base_is_not_compared() -> None:
    """`stage` has none for a cut with a replicated encoder."""
    verify(Table.parse(TEXT.replace("schedule nested/1f1b", "schedule stage/gpipe")))


def test_a_message_shows_the_row_around_the_op() -> None:
    rows = ROWS.replace("llm0.F0<0 llm1.F0", "llm1.F0 llm0.F0<0", 1)
    with pytest.raises(TableError) as error:
        verify(Table.parse(CUT + rows))
    assert str(error.value) == (
        "posted: rank 1: vision.F1 vision.F1>0 [llm1.F0] llm0.F0<0 llm0.F1<0 llm1.B0 ...: "
        "llm1.F0 reads llm0.F0; put llm0.F0<0 before it"
    )


def test_receives_posted_too_early_are_stuck_where_a_send_needs_its_receive() -> None:
    """Each rank waits for what the other computes next; with buffers the same table ends."""
    cut = str(build("stage/1f1b", 2, Shape()))
    rows = """
    rank 0: llm0.F0 llm0.F0>1 llm1.B0<1 llm0.F1 llm0.F1>1 llm0.W0 llm1.B1<1 llm0.W1
    rank 1: llm0.F0<0 llm0.F1<0 llm1.F0 llm1.B0 llm1.B0>0 llm1.W0 llm1.F1 llm1.B1 llm1.B1>0 llm1.W1
    """
    table = Table.parse(cut + rows)
    simulate(table)
    with pytest.raises(TableError) as error:
        verify(table)
    assert str(error.value).splitlines() == [
        "makes_progress: rank 0: llm0.F0 llm0.F0>1 llm1.B0<1 [llm0.F1] llm0.F1>1 llm0.W0 llm1.B1<1 "
        "...: stuck, llm1.B0<1 has not met its other end",
        "makes_progress: rank 1: llm0.F0<0 llm0.F1<0 [llm1.F0] llm1.B0 llm1.B0>0 llm1.W0 "
        "...: stuck, llm0.F1<0 has not met its other end",
    ]


def test_a_table_of_compute_ops_is_checked_without_transfers() -> None:
    table = derive(build("nested/1f1b", 2, Shape(encoders=(True,))), 4)
    verify(table, ORDER)
    with pytest.raises(TableError, match="posted: "):
        verify(table)
    swapped = str(table).replace("llm0.F0 llm0.F1", "llm0.B0 llm0.F1 llm0.F0", 1)
    with pytest.raises(TableError, match=re.escape("llm0.B0 runs already on rank 0")):
        verify(Table.parse(swapped), ORDER)


def test_a_cycle_of_compute_ops_makes_no_progress() -> None:
    cut = str(build("stage/1f1b", 2, Shape()))
    rows = """
    rank 0: llm0.F1 llm0.F0 llm0.W0 llm0.W1
    rank 1: llm1.F0 llm1.B0 llm1.W0 llm1.F1 llm1.B1 llm1.W1
    """
    verify(Table.parse(cut + rows), ORDER)
    late = rows.replace("llm0.F1 llm0.F0 llm0.W0 llm0.W1", "llm0.F1 llm0.W1 llm0.F0 llm0.W0")
    with pytest.raises(
        TableError, match=re.escape("stuck, llm0.W1 reads llm1.B1, which is not made")
    ):
        verify(Table.parse(cut + late), ORDER)


UNSPLIT = """
ranks 2
region llm backbone sharded
stage llm0 of llm: FW, rank 0, cost 1
stage llm1 of llm: FB, rank 1, cost 1
seam llm0 -> llm1: hidden*
shared llm0 llm1
live llm: 1 1
rank 0: llm0.F0 llm0.F0>1 llm1.B0<1 llm0.W0 llm0+llm1.R
rank 1: llm0.F0<0 llm1.F0 llm1.B0 llm1.B0>0 llm0+llm1.R
"""


def test_a_backward_that_is_not_split_ends_with_its_b() -> None:
    table = Table.parse(UNSPLIT)
    verify(table)
    assert live_units(table, "llm", 1) == [1, 0]
    early = UNSPLIT.replace("llm1.B0 llm1.B0>0 llm0+llm1.R", "llm0+llm1.R llm1.B0 llm1.B0>0")
    with pytest.raises(TableError, match=re.escape("llm0+llm1.R stands before llm1.B0; put")):
        verify(Table.parse(early))


def test_passes_say_which_one_broke_the_table() -> None:
    def unsend(table: Table) -> Table:
        return replace(table, rows=tuple(row[:-1] for row in table.rows))

    table = derive(build("stage/1f1b", 2, Shape()), 4, "stage/1f1b")
    with pytest.raises(TableError, match=r"after unsend \(passes before it: communicate\)"):
        passes.run(table, [passes.communicate, unsend])


Damage = Callable[[Table], Table]


def _without(kind: str, way: str) -> Damage:
    """A pass that loses the last op of a kind and way on rank 0."""

    def lose(table: Table) -> Table:
        row = table.rows[0]
        at = max(at for at, op in enumerate(row) if op.kind == kind and op.way == way)
        return replace(table, rows=(row[:at] + row[at + 1 :], *table.rows[1:]))

    return lose


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (_without("W", ""), "complete"),
        (_without("F", ">"), "sends_meet_receives"),
        (_without("B", "<"), "posted"),
        (_without("R", ""), "reduced_once"),
        (lambda table: replace(table, live=(Live("llm", (1, 1)),)), "bounded"),
        (lambda table: replace(table, schedule="nested/gpipe"), "base_kept"),
        (lambda table: replace(table, cut=replace(table.cut, ranks=3)), "known"),
    ],
)
def test_a_rule_is_asked_again_after_a_pass_that_touches_what_it_reads(
    damage: Damage, rule: str
) -> None:
    table = derive(build("nested/1f1b", 2, Shape(encoders=(True,))), 4)
    with pytest.raises(TableError, match=f"^the table after .*\n.*{rule}: "):
        passes.run(table, [*passes.DEFAULT, damage])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_text_is_refused_or_sound(data: st.DataObject) -> None:
    text = TEXT
    for _ in range(data.draw(st.integers(1, 2))):
        start = data.draw(st.integers(0, len(text)))
        words = data.draw(st.sampled_from([*TEXT.split(), *"0123456789FBWR<>.*+ "]))
        text = text[:start] + words + text[start + data.draw(st.integers(0, 8)) :]
    try:
        table = Table.parse(text)
        verify(table)
    except TableError:
        return
    simulate(table)


@settings(max_examples=30, deadline=None)
@given(st.data(), shapes(), st.integers(1, 4), st.integers(1, 8))
def test_transfers_are_placed_where_ops_take_no_time(
    data: st.DataObject, shape: Shape, ranks: int, mbs: int
) -> None:
    """Many ops, or all, at one time: an order in which all can run decides."""
    cut = build("nested/1f1b", ranks, shape)
    kinds = [(stage.name, kind) for stage in cut.stages for kind in stage.kinds]
    seconds = {kind: data.draw(st.sampled_from([0.0, 0.0, 1.0])) for kind in kinds}
    table = derive(cut, mbs, effort=QUICK)
    verify(passes.run(table, [partial(passes.communicate, costs=Costs(seconds))]), MOVES)


@settings(max_examples=30, deadline=None)
@given(st.data(), shapes())
def test_a_damaged_table_is_refused_or_runs(data: st.DataObject, shape: Shape) -> None:
    """Whatever is taken out, doubled or moved: an error of ours, or a table that simulates."""
    table = passes.run(derive(build("nested/1f1b", 2, shape), 3, effort=QUICK))
    rank = data.draw(st.integers(0, 1))
    row = list(table.rows[rank])
    op = row.pop(data.draw(st.integers(0, len(row) - 1)))
    for _ in range(data.draw(st.integers(0, 2))):
        row.insert(data.draw(st.integers(0, len(row))), op)
    rows = tuple(tuple(row) if r == rank else other for r, other in enumerate(table.rows))
    damaged = Table(table.cut, rows)
    try:
        verify(damaged)
    except TableError:
        return
    simulate(damaged)
