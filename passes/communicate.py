"""Put the transfers into a table of compute ops."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

from fxpipe.costs import Costs
from fxpipe.simulate import simulate
from fxpipe.table import Op, Table, inputs


def communicate(table: Table, *, costs: Costs | None = None) -> Table:
    """Send what another rank reads right after it is made, and post its receive in time.

        rank 0: llm0.F0 llm0.F1        ->  llm0.F0 llm0.F0>1 llm0.F1 llm0.F1>1
        rank 1: llm1.F0 llm1.B0 ...    ->  llm0.F0<0 llm1.F0 llm0.F1<0 llm1.B0 ...

    A receive is posted before the reading rank's first op that starts no earlier than the value is
    made, in a simulation with `costs` (uniform by default; every op must take time). All compute
    ops and transfers then follow one order in time, and by induction over it no rank waits for ever
    under the strictest transport: whatever precedes both ends of a transfer has run before it.
    """
    spans = simulate(table, costs or Costs.uniform(table.cut)).compute
    starts: list[list[float]] = [[] for _ in table.rows]
    for span in spans:
        starts[span.rank].append(span.start)
    readers = _readers(table)
    sends: dict[Op, list[Op]] = {}
    posts: list[dict[int, list[Op]]] = [{} for _ in table.rows]
    for span in sorted(spans, key=lambda span: span.end):
        for peer in sorted(readers.get(span.op, set()) - {span.rank}):
            sends.setdefault(span.op, []).append(span.op.to(peer))
            spot = bisect_left(starts[peer], span.end)
            posts[peer].setdefault(spot, []).append(span.op.source(span.rank))
    rows = (tuple(_row(row, sends, post)) for row, post in zip(table.rows, posts, strict=True))
    return replace(table, rows=tuple(rows))


def _readers(table: Table) -> dict[Op, set[int]]:
    """The ranks that read each value."""
    readers: dict[Op, set[int]] = {}
    for op, rank in table.place.items():
        for value in inputs(op, table.cut):
            readers.setdefault(value, set()).add(rank)
    return readers


def _row(
    row: tuple[Op, ...], sends: dict[Op, list[Op]], posts: dict[int, list[Op]]
) -> Iterator[Op]:
    for at, op in enumerate(row):
        yield from posts.get(at, ())
        yield op
        yield from sends.get(op, ())
    yield from posts.get(len(row), ())
