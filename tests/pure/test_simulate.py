"""What the simulator and the timeline say about tables that a person can work out."""

import re
import time

import pytest

from fxpipe import passes
from fxpipe.costs import Costs
from fxpipe.cut import Kind
from fxpipe.errors import TableError
from fxpipe.schedule import derive
from fxpipe.simulate import simulate
from fxpipe.table import Op, Table
from fxpipe.timeline import Peak, Span, Timeline
from tests.pure.cuts import Shape, build

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


def test_a_late_post_delays_a_transfer() -> None:
    late = Table.parse(str(TABLE).replace("llm0.F0<0 llm1.F0", "llm0.F0<0 llm1.F0"))
    costs = Costs(Costs.uniform(CUT).seconds, latency=1.0)
    assert simulate(late, costs).makespan == 1 + 1 + 2 + 1 + 2


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
    timeline = simulate(passes.run(derive(cut, 3)), costs)
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
    text = str(passes.run(derive(cut, 2)))
    lone = Table.parse(text.removesuffix(" enc0.R"))
    with pytest.raises(TableError, match=re.escape("at enc0.R, which only ranks 0 have reached")):
        simulate(lone)


def test_a_hundred_thousand_ops_take_seconds() -> None:
    cut = build("stage/1f1b", 4, CHAIN)
    table = derive(cut, 9100, "stage/1f1b")
    assert sum(map(len, table.rows)) >= 100_000
    start = time.perf_counter()
    simulate(table)
    assert time.perf_counter() - start < 10


def test_costs_follow_the_flops() -> None:
    costs = Costs.from_flops(CUT, 0.5)
    assert costs.compute(Op("llm1", Kind.B, 3)) == 2
    assert costs.compute(Op("llm0", Kind.W, 3)) == 4, "W does the whole backward without a B"
    assert costs.compute(Op("llm0+llm1", Kind.R)) == 0


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
