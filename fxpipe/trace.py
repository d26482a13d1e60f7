"""A timeline as a Perfetto trace: one track per rank, arrows for transfers, counters of live units.

Open the file at ui.perfetto.dev. The format is Chrome's trace event JSON; its times are
microseconds, counted here from the start of the timeline.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fxpipe.cut import Cut, Kind
from fxpipe.table import Op, inputs
from fxpipe.timeline import Span, Timeline

_Event = dict[str, Any]


def write_perfetto(timeline: Timeline, path: str | Path) -> Path:
    """Write the trace of a timeline; returns where it lies."""
    file = Path(path)
    file.write_text(json.dumps(perfetto(timeline)), encoding="utf-8")
    return file


def perfetto(timeline: Timeline) -> dict[str, Any]:
    """The trace: a thread per rank, a slice per compute op, a flow per transfer."""
    events = [*_names(timeline.cut), *_slices(timeline), *_flows(timeline), *_counters(timeline)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(cut: Cut) -> Iterator[_Event]:
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "fxpipe"}}
    for rank in range(cut.ranks):
        common = {"ph": "M", "pid": 0, "tid": rank}
        yield {**common, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {**common, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _slices(timeline: Timeline) -> Iterator[_Event]:
    for span in timeline.compute:
        yield {
            "ph": "X",
            "pid": 0,
            "tid": span.rank,
            "name": str(span.op),
            "cat": _category(span.op, timeline.cut),
            "ts": _microseconds(span.start, timeline),
            "dur": span.seconds * 1e6,
        }


def _category(op: Op, cut: Cut) -> str:
    """The region of an op; several stages that share a reduction name none."""
    return "reduce" if op.kind is Kind.R else cut.stage[op.stage].region


def _flows(timeline: Timeline) -> Iterator[_Event]:
    """From the slice that makes a value to the first one that reads it on the other rank.

    Perfetto ties an arrow to the slice around its time, so it leaves just before its slice ends.
    """
    made = {span.op: span for span in timeline.compute}
    readers = _readers(timeline)
    for number, transfer in enumerate(timeline.transfers):
        value = transfer.op.value
        reader = readers.get((value, transfer.op.peer))
        if reader is None or value not in made:
            continue
        source = made[value]
        leaves = _microseconds(source.end - source.seconds * 1e-3, timeline)
        arrives = _microseconds(reader.start, timeline)
        common = {"pid": 0, "name": str(value), "cat": "transfer", "id": number}
        yield {**common, "ph": "s", "tid": source.rank, "ts": leaves}
        yield {**common, "ph": "f", "bp": "e", "tid": reader.rank, "ts": arrives}


def _readers(timeline: Timeline) -> dict[tuple[Op, int | None], Span]:
    """The first span on each rank that reads a value."""
    first: dict[tuple[Op, int | None], Span] = {}
    for span in sorted(timeline.compute, key=lambda span: span.start):
        for value in inputs(span.op, timeline.cut):
            first.setdefault((value, span.rank), span)
    return first


def _counters(timeline: Timeline) -> Iterator[_Event]:
    """Live units of each region on each rank."""
    for region in timeline.cut.region:
        for rank in range(timeline.cut.ranks):
            for time, units in timeline.live([region], rank):
                yield {
                    "ph": "C",
                    "pid": 0,
                    "name": f"live {region}, rank {rank}",
                    "ts": _microseconds(time, timeline),
                    "args": {"units": units},
                }


def _microseconds(seconds: float, timeline: Timeline) -> float:
    return (seconds - timeline.start) * 1e6
