"""The simulator: a table and costs to the timeline that a faultless machine would give.

A row runs in order. A send and the posting of a receive take no time of the rank; a compute op
waits for its inputs. One link leads from each rank to each other. Values leave by it in the order
of their sends, one behind the other: a transfer starts once it is sent, its receive is posted, and
the bytes of the one before it are through; its own bytes hold the link, the latency does not. All
else overlaps, also the two ways between two ranks. R waits for all its ranks. In a table without
transfers every value is sent when it is made, to each rank that reads it, and posted at once.
"""

from collections import deque
from collections.abc import Iterable

from fxpipe.costs import Amount, Costs, at
from fxpipe.cut import Kind
from fxpipe.errors import TableError
from fxpipe.table import Op, Table
from fxpipe.timeline import Span, Timeline


def simulate(table: Table, costs: Costs | None = None) -> Timeline:
    """The timeline of a table. Raises TableError, naming every stuck rank, if it cannot end.

    Each rank runs until it lacks something and is woken when that is there; every op is looked at
    once, and once more for each time that its rank had to wait.
    """
    costs = costs or Costs.uniform(table.cut)
    run = _Run(table, costs)
    ready = deque(range(len(table.rows)))
    while ready:
        ready.extend(run.advance(ready.popleft()))
    stuck = [rank for rank, row in enumerate(table.rows) if run.at[rank] < len(row)]
    if stuck:
        raise TableError("\n".join(["the table cannot end:", *map(run.explain, stuck)]))
    return Timeline(table.cut, tuple(run.spans), costs=costs)


class _Run:
    """One simulation: where each rank is in its row, its time, and what is made, sent, received.

    Values go by their numbers (`table.Numbered`). `number * ranks + rank` is a value on a rank,
    `source * ranks + target` a link.
    """

    def __init__(self, table: Table, costs: Costs) -> None:
        self.table, self.ranks = table, len(table.rows)
        try:
            self.numbered = table.numbered
        except KeyError as error:
            raise TableError(f"the cut has no {error}; verify says where it stands") from None
        names = self.numbered.names
        self.seconds: list[Amount] = [costs.seconds.get(name, 0.0) for name in names]
        self.bytes: list[Amount] = [costs.bytes.get(name, 0.0) for name in names]
        self.latency, self.bandwidth = costs.latency, costs.bandwidth
        self.holders = {name: len(table.cut.ranks_of(x)) for name, x in table.cut.groups.items()}
        self.at = [0] * self.ranks
        self.clock = [0.0] * self.ranks
        self.spans: list[Span] = []
        self.home: dict[int, int] = {}
        self.queues: dict[int, deque[tuple[int, Op, float]]] = {}
        self.free: dict[int, float] = {}
        self.posted: dict[int, float] = {}
        self.arrived: dict[int, float] = {}
        self.gathered: dict[int, dict[int, float]] = {}
        self.waiting: dict[int, list[int]] = {}
        self.woken: list[int] = []
        explicit = any(op.way for row in table.rows for op in row)
        self.readers: dict[int, dict[int, None]] = {} if explicit else self._readers()

    def _readers(self) -> dict[int, dict[int, None]]:
        """For each value the ranks that read it and do not make it."""
        rows, reads = self.numbered.rows, self.numbered.reads
        place = {number: rank for rank, row in enumerate(rows) for number in row}
        found: dict[int, dict[int, None]] = {}
        for rank, row in enumerate(rows):
            for number in row:
                for step in reads[number % len(reads)]:
                    if place.get(number + step, rank) != rank:
                        found.setdefault(number + step, {})[rank] = None
        return found

    def advance(self, rank: int) -> Iterable[int]:
        """Run a rank until it lacks something; the ranks that it wakes."""
        row, numbers = self.table.rows[rank], self.numbered.rows[rank]
        self.woken = []
        for spot in range(self.at[rank], len(row)):
            op = row[spot]
            if op.way:
                done = self._transfer(op, numbers[spot], rank)
            elif op.kind is Kind.R:
                done = self._reduce(op, numbers[spot], rank)
            else:
                done = self._compute(op, numbers[spot], rank)
            if not done:
                self.at[rank] = spot
                return self.woken
        self.at[rank] = len(row)
        return self.woken

    def _compute(self, op: Op, number: int, rank: int) -> bool:
        start, ranks, code = self.clock[rank], self.ranks, number % len(self.seconds)
        for step in self.numbered.reads[code]:
            if self.home.get(number + step) == rank:
                continue
            key = (number + step) * ranks + rank
            there = self.arrived.get(key)
            if there is None:
                self.waiting.setdefault(key, []).append(rank)
                return False
            if there > start:
                start = there
        end = start + at(self.seconds[code], op.mb)
        self.home[number], self.clock[rank] = rank, end
        self.spans.append(Span(rank, op, start, end))
        for reader in self.readers.get(number, ()):
            self._move(op, number, rank * ranks + reader, end)
        return True

    def _transfer(self, op: Op, number: int, rank: int) -> bool:
        """Start one end of a transfer, and complete what that lets through."""
        peer = -1 if op.peer is None else op.peer
        if op.way == "<":
            self.posted[number * self.ranks + rank] = self.clock[rank]
            self._drain(peer * self.ranks + rank)
        elif self.home.get(number) != rank:
            return False
        else:
            link = rank * self.ranks + peer
            self.queues.setdefault(link, deque()).append((number, op, self.clock[rank]))
            self._drain(link)
        return True

    def _drain(self, link: int) -> None:
        """Move the values that wait at a link, first in, first out, as far as they are posted."""
        queue, target = self.queues.get(link), link % self.ranks
        while queue:
            number, op, sent = queue[0]
            posted = self.posted.pop(number * self.ranks + target, None)
            if posted is None:
                return
            queue.popleft()
            end = self._move(op, number, link, max(sent, posted))
            self.spans.append(Span(link // self.ranks, op, sent, end))

    def _move(self, op: Op, number: int, link: int, ready: float) -> float:
        """Take a value over a link; when it is received."""
        size = at(self.bytes[number % len(self.bytes)], op.mb)
        free = self.free[link] = max(ready, self.free.get(link, 0.0)) + size / self.bandwidth
        key = number * self.ranks + link % self.ranks
        self.arrived[key] = end = free + self.latency
        if key in self.waiting:
            self.woken.extend(self.waiting.pop(key))
        return end

    def _reduce(self, op: Op, number: int, rank: int) -> bool:
        """The last rank to come sets the end for all."""
        there = self.gathered.setdefault(number, {})
        there.setdefault(rank, self.clock[rank])
        key = -1 - number  # no value on a rank has a negative number
        if len(there) < self.holders[op.stage]:
            self.waiting.setdefault(key, []).append(rank)
            return False
        start = max(there.values())
        self.clock[rank] = start + at(self.seconds[number % len(self.seconds)], None)
        self.spans.append(Span(rank, op, start, self.clock[rank]))
        self.woken.extend(self.waiting.pop(key, ()))
        return True

    def explain(self, rank: int) -> str:
        """Where a stuck rank stands and what it waits for."""
        spot = self.at[rank]
        op, number = self.table.rows[rank][spot], self.numbered.rows[rank][spot]
        if op.kind is Kind.R and not op.way:
            there = ", ".join(map(str, self.gathered[number]))
            return f"rank {rank} stands at {op}, which only ranks {there} have reached"
        wants = [number] if op.way else self.numbered.inputs(number)
        lacks = ", ".join(str(self.numbered.op(x)) for x in wants if not self._has(rank, x))
        return f"rank {rank} stands at {op}, which waits for {lacks}"

    def _has(self, rank: int, number: int) -> bool:
        return self.home.get(number) == rank or number * self.ranks + rank in self.arrived
