"""Put the transfers into a table of compute ops."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fxpipe.costs import Costs
from fxpipe.rendezvous import execution
from fxpipe.simulate import simulate
from fxpipe.table import Op, Table

_Moment = tuple[float, float]  # seconds, and an order among what happens in the same second


def communicate(table: Table, *, costs: Costs | None = None) -> Table:
    """Send what another rank reads right after it is made, and post its receive in time.

        rank 0: llm0.F0 llm0.F1        ->  llm0.F0 llm0.F0>1 llm0.F1 llm0.F1>1
        rank 1: llm1.F0 llm1.B0 ...    ->  llm0.F0<0 llm1.F0 llm0.F1<0 llm1.B0 ...

    A receive is posted before the reading rank's first op that starts no earlier than the value is
    made, in a simulation with `costs` (uniform by default). All compute ops and transfers then
    follow one order in time, and by induction over it no rank waits for ever under the strictest
    transport: whatever precedes both ends of a transfer has run before it.
    """
    readers = _readers(table)
    starts, ends = _moments(table, costs or Costs.uniform(table.cut), readers)
    sends: list[dict[int, list[Op]]] = [{} for _ in table.rows]
    posts: list[dict[int, list[Op]]] = [{} for _ in table.rows]
    for end, rank, at, number in sorted(ends):
        op = table.rows[rank][at]
        sends[rank][at] = [op.to(peer) for peer in sorted(readers[number])]
        for peer in readers[number]:
            spot = bisect_left(starts[peer], end)
            posts[peer].setdefault(spot, []).append(op.source(rank))
    rows = map(_row, table.rows, sends, posts)
    return replace(table, rows=tuple(map(tuple, rows)))


def _moments(
    table: Table, costs: Costs, readers: Mapping[int, set[int]]
) -> tuple[list[list[_Moment]], list[tuple[_Moment, int, int, int]]]:
    """When each op of each row starts; when others can read it, with its rank, place and number.

    At one time, values are made before the ops that read them start: first those of ops that took
    time, then ops that take none, one after the other in an order in which all can run.
    """
    spans = {op: (start, end) for _, op, start, end in simulate(table, costs).compute}
    turns = execution(table)
    starts: list[list[_Moment]] = [[] for _ in table.rows]
    ends: list[tuple[_Moment, int, int, int]] = []
    for rank, (row, numbers) in enumerate(zip(table.rows, table.numbered.rows, strict=True)):
        for at, (op, number) in enumerate(zip(row, numbers, strict=True)):
            start, end = spans[op]
            turn = turns[number] if start == end else None
            starts[rank].append((start, math.inf if turn is None else turn))
            if number in readers:
                ends.append(((end, -1 if turn is None else turn + 0.5), rank, at, number))
    return starts, ends


def _readers(table: Table) -> Mapping[int, set[int]]:
    """The other ranks that read each value."""
    readers: dict[int, set[int]] = {}
    home = table.numbered.home
    for number, rank in home.items():
        for value in table.numbered.inputs(number):
            if home.get(value, rank) != rank:
                readers.setdefault(value, set()).add(rank)
    return readers


def _row(
    row: Sequence[Op], sends: Mapping[int, list[Op]], posts: Mapping[int, list[Op]]
) -> Iterator[Op]:
    for at, op in enumerate(row):
        yield from posts.get(at, ())
        yield op
        yield from sends.get(at, ())
    yield from posts.get(len(row), ())
