"""The simulator: a table and costs to the timeline that a faultless machine would give.

A row runs in order. A send and the posting of a receive take no time of the rank; a compute op
waits for its inputs; a value is received at max(send, post) + transfer. R waits for all its ranks.
In a table without transfers every value is sent when it is made and posted at once.
"""

from collections import defaultdict, deque
from collections.abc import Iterator

from fxpipe.costs import Costs
from fxpipe.cut import Kind
from fxpipe.errors import TableError
from fxpipe.table import Op, Table, inputs
from fxpipe.timeline import Span, Timeline

_Edge = tuple[Op, int, int]  # a value, the rank that makes it, the rank that reads it


def simulate(table: Table, costs: Costs | None = None) -> Timeline:
    """The timeline of a table. Raises TableError, naming every stuck rank, if it cannot end.

    Each rank runs until it lacks something and is woken when that is there; every op is looked at
    once, and once more for each time that its rank had to wait.
    """
    run = _Run(table, costs or Costs.uniform(table.cut))
    ready = deque(range(len(table.rows)))
    while ready:
        ready.extend(run.advance(ready.popleft()))
    stuck = [rank for rank, row in enumerate(table.rows) if run.at[rank] < len(row)]
    if stuck:
        raise TableError("\n".join(["the table cannot end:", *map(run.explain, stuck)]))
    return Timeline(table.cut, tuple(run.spans))


class _Run:
    """One simulation: where each rank is in its row, its time, and what is made and sent."""

    def __init__(self, table: Table, costs: Costs) -> None:
        self.table, self.costs = table, costs
        self.at = [0] * len(table.rows)
        self.clock = [0.0] * len(table.rows)
        self.spans: list[Span] = []
        self.explicit = any(op.way for row in table.rows for op in row)
        self.made: dict[Op, tuple[int, float]] = {}
        self.sent: dict[_Edge, float] = {}
        self.posted: dict[_Edge, float] = {}
        self.arrived: dict[tuple[Op, int], float] = {}
        self.gathered: dict[Op, dict[int, float]] = defaultdict(dict)
        self.waiting: dict[object, list[int]] = defaultdict(list)

    def advance(self, rank: int) -> Iterator[int]:
        """Run a rank until it lacks something; yields the ranks that it wakes."""
        row = self.table.rows[rank]
        while self.at[rank] < len(row):
            op = row[self.at[rank]]
            match op.way, op.kind:
                case ">", _:
                    done = self._send(op, rank)
                case "<", _:
                    done = self._post(op, rank)
                case _, Kind.R:
                    done = self._reduce(op, rank)
                case _:
                    done = self._compute(op, rank)
            if done is None:
                return
            self.at[rank] += 1
            for key in done:
                yield from self.waiting.pop(key, ())

    def explain(self, rank: int) -> str:
        """Where a stuck rank stands and what it waits for."""
        op = self.table.rows[rank][self.at[rank]]
        if op.kind is Kind.R and not op.way:
            there = ", ".join(map(str, self.gathered[op]))
            return f"rank {rank} stands at {op}, which only ranks {there} have reached"
        wants = [op.value] if op.way else inputs(op, self.table.cut)
        lacks = ", ".join(str(x) for x in wants if self._available(x, rank) is None)
        return f"rank {rank} stands at {op}, which waits for {lacks}"

    def _send(self, op: Op, rank: int) -> tuple[object, ...] | None:
        if self.made.get(op.value, (None, 0.0))[0] != rank or op.peer is None:
            return None
        self.sent[op.value, rank, op.peer] = self.clock[rank]
        return self._match(op.value, rank, op.peer)

    def _post(self, op: Op, rank: int) -> tuple[object, ...] | None:
        if op.peer is None:
            return None
        self.posted[op.value, op.peer, rank] = self.clock[rank]
        return self._match(op.value, op.peer, rank)

    def _match(self, value: Op, source: int, target: int) -> tuple[object, ...]:
        """Complete a transfer once both ends have started it."""
        sent = self.sent.get((value, source, target))
        posted = self.posted.get((value, source, target))
        if sent is None or posted is None:
            return ()
        end = max(sent, posted) + self.costs.transfer(value)
        self.arrived[value, target] = end
        self.spans.append(Span(source, value.to(target), sent, end))
        return ((value, target),)

    def _compute(self, op: Op, rank: int) -> tuple[object, ...] | None:
        start = self.clock[rank]
        for value in inputs(op, self.table.cut):
            there = self._available(value, rank)
            if there is None:
                self.waiting[self._key(value, rank)].append(rank)
                return None
            start = max(start, there)
        end = start + self.costs.compute(op)
        self.made[op], self.clock[rank] = (rank, end), end
        self.spans.append(Span(rank, op, start, end))
        return ((op, rank), op)

    def _available(self, value: Op, rank: int) -> float | None:
        """When a rank can read a value; None if that is not known yet."""
        home, end = self.made.get(value, (None, 0.0))
        if home == rank:
            return end
        if self.explicit:
            return self.arrived.get((value, rank))
        return None if home is None else end + self.costs.transfer(value)

    def _key(self, value: Op, rank: int) -> object:
        return (value, rank) if self.explicit else value

    def _reduce(self, op: Op, rank: int) -> tuple[object, ...] | None:
        """The last rank to come sets the end for all."""
        there = self.gathered[op]
        there.setdefault(rank, self.clock[rank])
        stages = self.table.cut.groups.get(op.stage, ())
        if len(there) < len(self.table.cut.ranks_of(stages)):
            self.waiting[op].append(rank)
            return None
        start = max(there.values())
        self.clock[rank] = start + self.costs.compute(op)
        self.spans.append(Span(rank, op, start, self.clock[rank]))
        return (op,)
