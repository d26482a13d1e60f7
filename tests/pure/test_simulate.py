"""What the simulator and the timeline say about tables that a person can work out."""

import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe import passes
from fxpipe.costs import Costs
from fxpipe.cut import Kind
from fxpipe.errors import FxpipeError, TableError
from fxpipe.passes.communicate import communicate
from fxpipe.passes.reduce import reduce
from fxpipe.schedule import derive
from fxpipe.simulate import simulate
from fxpipe.table import Op, Table, inputs
from fxpipe.timeline import Peak, Span, Timeline
from tests.pure.cuts import QUICK, Shape, build, shapes

CHAIN = Shape()
CUT = build("stage/1f1b", 2, CHAIN)
ROWS = """
rank 0: llm0.F0 llm0.F0>1 llm1.B0<1 llm0.W0
rank 1: llm0.F0<0 llm1.F0 llm1.B0 llm1.B0>0 llm1.W0
"""
TABLE = Table.parse(str(CUT) + ROWS)


def test_spans_with_latency_and_bandwidth() -> None:
    costs = Costs.uniform(CUT)
    costs = Costs(costs.seconds, latency=0.5, bandwidth=100, bytes={("llm0", Kind.F): 50})
    timeline = simulate(TABLE, costs)
    assert {(str(span.op), span.start, span.end) for span in timeline.spans} == {
        ("llm0.F0", 0, 1),
        ("llm0.F0>1", 1, 2),
        ("llm1.F0", 2, 3),
        ("llm1.B0", 3, 4),
        ("llm1.B0>0", 4, 4.5),
        ("llm1.W0", 4, 5),
        ("llm0.W0", 4.5, 6.5),
    }
    assert timeline.makespan == 6.5
    assert timeline.busy(0) == 3
    assert timeline.bubble(1) == pytest.approx(1 - 3 / 6.5)
    assert timeline.live(["llm"]) == ((0, 1), (2, 2), (5, 1), (6.5, 0))
    assert timeline.peak(["llm"], rank=0) == 1


GPIPE = """
rank 0: llm0.F0 llm0.F0>1 llm0.F1 llm0.F1>1 llm1.B0<1 llm0.W0 llm1.B1<1 llm0.W1
rank 1: llm0.F0<0 llm0.F1<0 llm1.F0 llm1.F1 llm1.B0 llm1.B0>0 llm1.W0 llm1.B1 llm1.B1>0 llm1.W1
"""
SLOW = replace(
    Costs.uniform(CUT),
    latency=0.5,
    bandwidth=1,
    bytes={("llm0", Kind.F): 3, ("llm1", Kind.B): (2, 1)},
)


def spans(text: str, costs: Costs) -> dict[str, tuple[float, float]]:
    timeline = simulate(Table.parse(str(CUT) + text), costs)
    return {str(span.op): (span.start, span.end) for span in timeline.spans}


def test_a_timeline_prints_what_each_rank_does() -> None:
    assert str(simulate(TABLE)) == (
        "timeline of 5 ops in 5 s\nrank 0: busy 3 s, bubble 40.0%\nrank 1: busy 3 s, bubble 40.0%"
    )


def test_values_queue_at_a_link_and_a_late_post_delays_a_transfer() -> None:
    """Bytes follow bytes; latencies overlap; the two directions are links of their own."""
    found = spans(GPIPE, SLOW)
    assert found == {
        "llm0.F0": (0, 1),
        "llm0.F0>1": (1, 4.5),
        "llm0.F1": (1, 2),
        "llm0.F1>1": (2, 7.5),  # on the link from 4 to 7
        "llm1.F0": (4.5, 5.5),
        "llm1.F1": (7.5, 8.5),
        "llm1.B0": (8.5, 9.5),
        "llm1.B0>0": (9.5, 12),
        "llm1.W0": (9.5, 10.5),
        "llm1.B1": (10.5, 11.5),
        "llm0.W0": (12, 14),
        "llm1.B1>0": (11.5, 15.5),  # on the link from 14, when it is posted, to 15
        "llm1.W1": (11.5, 12.5),
        "llm0.W1": (15.5, 17.5),
    }
    early = GPIPE.replace("llm1.B0<1 llm0.W0 llm1.B1<1", "llm1.B0<1 llm1.B1<1 llm0.W0")
    changed = {op: span for op, span in spans(early, SLOW).items() if found[op] != span}
    assert changed == {"llm1.B1>0": (11.5, 13), "llm0.W1": (14, 16)}


def test_a_transfer_that_is_not_posted_holds_up_the_ones_behind_it() -> None:
    rows = GPIPE.replace(
        "llm0.F0<0 llm0.F1<0 llm1.F0 llm1.F1", "llm0.F1<0 llm0.F0<0 llm1.F0 llm1.F1"
    )
    assert spans(rows, SLOW) == spans(GPIPE, SLOW), "both are posted at once"
    rows = GPIPE.replace(
        "llm0.F0<0 llm0.F1<0 llm1.F0 llm1.F1", "llm0.F1<0 llm1.F1 llm0.F0<0 llm1.F0"
    )
    with pytest.raises(TableError, match=re.escape("rank 1 stands at llm1.F1, which waits for")):
        spans(rows, SLOW)


def test_each_microbatch_has_its_own_costs() -> None:
    seconds = {**Costs.uniform(CUT).seconds, ("llm0", Kind.F): (1, 3), ("llm1", Kind.W): [0, 2]}
    found = spans(GPIPE, Costs(seconds))
    assert (found["llm0.F0"], found["llm0.F1"]) == ((0, 1), (1, 4))
    assert (found["llm1.F1"], found["llm1.B0"], found["llm1.W0"]) == ((4, 5), (5, 6), (6, 6))
    assert (found["llm1.B1"], found["llm1.W1"]) == ((6, 7), (7, 9))


def test_without_transfers_values_leave_when_they_are_made() -> None:
    """Each to every reader, by the same links; the table says nothing of posts."""
    bare = re.sub(r"\S+[<>]\d+ ?", "", GPIPE)
    found = spans(bare, SLOW)
    early = GPIPE.replace("llm1.B0<1 llm0.W0 llm1.B1<1", "llm1.B0<1 llm1.B1<1 llm0.W0")
    assert found == {op: span for op, span in spans(early, SLOW).items() if ">" not in op}


def test_one_value_for_two_ranks_takes_two_links() -> None:
    cut = build("nested/1f1b", 3, Shape(encoders=(False,), taps=True))
    rows = """
    rank 0: enc0.F0 enc0.F0>1 enc0.F0>2 llm0.F0 llm0.F0>1 llm1.B0<1 llm0.W0
    rank 1: enc0.F0<0 llm0.F0<0 llm1.F0 llm1.F0>2 llm2.B0<2 llm1.B0 llm1.B0>0 llm1.W0
    rank 2: enc0.F0<0 llm1.F0<1 llm2.F0 llm2.B0 llm2.B0>1 llm2.W0
    """
    costs = replace(Costs.uniform(cut), bandwidth=1, bytes={("enc0", Kind.F): 2})
    timeline = simulate(Table.parse(str(cut) + rows), costs)
    found = {str(span.op): (span.start, span.end) for span in timeline.spans}
    assert found["enc0.F0>1"] == found["enc0.F0>2"] == (1, 3)
    assert found["llm0.F0>1"] == (2, 3), "it waits for the link until 3"
    assert (found["llm1.F0"], found["llm2.F0"]) == ((3, 4), (4, 5))


def test_a_table_without_transfers_sends_at_once() -> None:
    table = derive(CUT, 6, "stage/1f1b")
    costs = Costs(Costs.uniform(CUT).seconds, latency=0.25)
    assert simulate(table, costs).makespan <= simulate(passes.run(table), costs).makespan


@pytest.mark.parametrize(("ranks", "mbs"), [(1, 3), (2, 8), (4, 8), (8, 16)])
def test_the_bubble_of_1f1b_and_gpipe(ranks: int, mbs: int) -> None:
    """Filling and draining idle for P - 1 times one F and one B; W fills nothing."""
    cut = build("stage/1f1b", ranks, CHAIN)
    for base in ("1f1b", "gpipe"):
        timeline = simulate(passes.run(derive(cut, mbs, f"stage/{base}")))
        assert timeline.makespan == 3 * mbs + 2 * (ranks - 1)


def test_reductions_wait_for_all_their_ranks() -> None:
    cut = build("nested/1f1b", 2, Shape(encoders=(True,)))
    costs = Costs({**Costs.uniform(cut).seconds, ("enc0", Kind.R): 3.0})
    timeline = simulate(passes.run(derive(cut, 3, effort=QUICK)), costs)
    last = [span for span in timeline.compute if span.op.kind is Kind.R]
    assert len(last) == 2
    assert last[0].start == last[1].start == timeline.makespan - 3


def test_a_stuck_table_says_where_each_rank_is() -> None:
    rows = ROWS.replace("llm1.B0>0 ", "")
    with pytest.raises(
        TableError, match=re.escape("rank 0 stands at llm0.W0, which waits for llm1.B0")
    ):
        simulate(Table.parse(str(CUT) + rows))
    cut = build("nested/1f1b", 2, Shape(encoders=(True,)))
    text = str(passes.run(derive(cut, 2, effort=QUICK)))
    lone = Table.parse(text.removesuffix(" enc0.R"))
    with pytest.raises(TableError, match=re.escape("at enc0.R, which only ranks 0 have reached")):
        simulate(lone)


def test_an_op_that_the_cut_has_not_is_named() -> None:
    with pytest.raises(TableError, match=r"the cut has no .*vision"):
        simulate(Table.parse(f"{CUT}\nrank 0: vision.F0\nrank 1:"))


def test_fifty_thousand_ops_take_a_fifth_of_a_second() -> None:
    """All that a timeline says of them is as quick: each look at the spans is linear."""
    cut = build("nested/1f1b", 16, Shape(encoders=(True,), generators=(True,)))
    table = reduce(communicate(derive(cut, 512, "upfront/1f1b")))
    assert sum(map(len, table.rows)) >= 50_000
    start = time.process_time()
    timeline = replace(simulate(table), costs=Costs({}, kept={("llm0", Kind.F): 8.0}))
    live = {region: [timeline.peak([region], r) for r in range(16)] for region in cut.region}
    held = [timeline.peak_bytes(rank) for rank in range(16)]
    assert time.process_time() - start < 5
    assert held == [8.0 * live["llm"][0]] + [0.0] * 15


def test_an_empty_timeline() -> None:
    timeline = Timeline(CUT, ())
    assert (timeline.makespan, timeline.bubble(0), timeline.peak(["llm"])) == (0, 0, 0)


def test_a_measured_timeline_keeps_its_clock_and_counts() -> None:
    spans = (
        Span(0, Op("llm0", Kind.F, 0), 100.0, 101.0),
        Span(0, Op("llm0", Kind.W, 0), 103.0, 104.0),
    )
    timeline = Timeline(CUT, spans, (Peak(0, "llm0", 1, 64),))
    assert (timeline.start, timeline.makespan, timeline.bubble(0)) == (100, 4, 0.5)
    assert timeline.live(["llm0"]) == ((100, 1), (104, 0))


def test_memory_by_region_and_idle_time() -> None:
    """F of a stage keeps from its start to the end of its B, B from there to the end of W."""
    kept = {("llm0", Kind.F): (4, 6), ("llm1", Kind.F): 5, ("llm1", Kind.B): 2}
    costs = replace(Costs.uniform(CUT), kept=kept, resident={"llm0": 100})
    timeline = simulate(Table.parse(str(CUT) + GPIPE), costs)
    found = {str(span.op): (span.start, span.end) for span in timeline.spans}
    assert (found["llm0.W0"], found["llm0.W1"]) == ((4, 6), (6, 8))
    assert timeline.memory(0) == (
        (0, {"llm": 104}),
        (1, {"llm": 110}),
        (6, {"llm": 106}),
        (8, {"llm": 100}),
    )
    assert timeline.memory(1) == (
        (0, {"llm": 0}),
        (1, {"llm": 5}),
        (2, {"llm": 10}),
        (4, {"llm": 7}),
        (5, {"llm": 5}),
        (6, {"llm": 2}),
        (7, {"llm": 0}),
    )
    assert (timeline.peak_bytes(0), timeline.peak_bytes(1, ["llm"])) == (110, 10)
    assert timeline.idle(0) == ((2, 4),)
    assert timeline.idle(1) == ((0, 1), (7, 8))
    assert timeline.bubble(1) == 2 / 8
    with pytest.raises(FxpipeError, match="knows no bytes"):
        replace(timeline, costs=None).memory(0)


def test_memory_of_several_regions_on_a_rank() -> None:
    cut = build("nested/1f1b", 1, Shape(encoders=(True,)))
    rows = "\nrank 0: enc0.F0 llm0.F0 llm0.B0 llm0.W0 enc0.W0"
    kept = {("enc0", Kind.F): 3, ("llm0", Kind.F): 7, ("llm0", Kind.B): 1}
    costs = replace(Costs.uniform(cut), kept=kept)
    timeline = simulate(Table.parse(str(cut) + rows), costs)
    assert timeline.memory(0) == (
        (0, {"enc0": 3, "llm": 0}),
        (1, {"enc0": 3, "llm": 7}),
        (3, {"enc0": 3, "llm": 1}),
        (4, {"enc0": 3, "llm": 0}),
        (6, {"enc0": 0, "llm": 0}),
    )
    assert timeline.peak_bytes(0) == 10
    assert timeline.peak_bytes(0, ["enc0"]) == 3


class Pulled:
    """The simulator's equations, each asked for what it needs: slow, and of another make."""

    def __init__(self, table: Table, costs: Costs) -> None:
        self.table, self.costs = table, costs
        self.spot = {
            (op, rank): at for rank, row in enumerate(table.rows) for at, op in enumerate(row)
        }
        self.time = cache(self._time)
        self.leaves = cache(self._leaves)

    def _time(self, rank: int, count: int) -> float:
        """When a rank has run so many ops of its row."""
        if not count:
            return 0.0
        op, before = self.table.rows[rank][count - 1], self.time(rank, count - 1)
        if op.way:
            return before
        if op.kind is Kind.R:
            holders = self.table.cut.ranks_of(self.table.cut.groups[op.stage])
            before = max(self.time(r, self.spot[op, r]) for r in holders)
        return max([before, *self._inputs(op, rank)]) + self.costs.compute(op)

    def _inputs(self, op: Op, rank: int) -> Iterator[float]:
        for value in inputs(op, self.table.cut) if op.kind is not Kind.R else ():
            home = self.table.place[value]
            if home != rank:
                yield self.leaves(home, self.spot[value.to(rank), home]) + self.costs.latency

    def _leaves(self, source: int, at: int) -> float:
        """When the bytes of the send at a place of a row are through."""
        op, row = self.table.rows[source][at], self.table.rows[source]
        earlier = [i for i in range(at) if (row[i].way, row[i].peer) == (">", op.peer)]
        free = self.leaves(source, earlier[-1]) if earlier else 0.0
        target = op.peer or 0
        posted = self.time(target, self.spot[op.value.source(source), target])
        return max(free, self.time(source, at), posted) + self.costs.occupies(op.value)


@settings(max_examples=60, deadline=None)
@given(st.data(), shapes(), st.integers(1, 4), st.integers(1, 6))
def test_every_time_is_that_of_the_equations(
    data: st.DataObject, shape: Shape, ranks: int, mbs: int
) -> None:
    placement = data.draw(st.sampled_from(["stage/1f1b", "upfront/gpipe", "nested/1f1b"]))
    cut = build(placement, ranks, shape)
    table = reduce(communicate(derive(cut, mbs, placement, effort=QUICK)))
    amount = st.one_of(st.integers(0, 4), st.lists(st.integers(0, 4), min_size=1, max_size=3))
    keys = [(stage.name, kind) for stage in cut.stages for kind in stage.kinds]
    costs = Costs(
        {key: data.draw(amount) for key in [*keys, *[(name, Kind.R) for name in cut.groups]]},
        latency=data.draw(st.integers(0, 2)),
        bandwidth=data.draw(st.sampled_from([1, 2, math.inf])),
        bytes={key: data.draw(amount) for key in keys},
    )
    pulled = Pulled(table, costs)
    for span in simulate(table, costs).spans:
        spot = pulled.spot[span.op, span.rank]
        end = pulled.leaves(span.rank, spot) + costs.latency if span.op.way else None
        assert span.end == (pulled.time(span.rank, spot + 1) if end is None else end), span
    assert simulate(table, costs) == simulate(table, costs)
