"""A walk of base rows through time, in which waves of other ops join them when they are due."""

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxpipe.costs import Costs
from fxpipe.errors import ScheduleError
from fxpipe.table import Op, Table, inputs


@dataclass(frozen=True)
class Wave:
    """One unit of ops per rank. Once all of `waits` have run, each rank runs its unit before its
    next base op; once all of `allows` have, a rank may run its unit when it would idle. None means
    never. What a unit reads must be there by then."""

    units: tuple[tuple[Op, ...], ...]
    waits: frozenset[Op] | None
    allows: frozenset[Op] | None = None


Rows = tuple[tuple[Op, ...], ...]


def walk(base: Table, waves: Sequence[Wave], costs: Costs) -> tuple[float, Rows]:
    """When it all ends, and the rows with the waves in them, base order kept. Raises ScheduleError
    if the base is stuck.

    Takes O(ops × ranks): at each end of an op every free rank chooses what it runs next.
    """
    state = _State(base, waves)
    rows: list[list[Op]] = [[] for _ in base.rows]
    busy: set[int] = set()
    running: list[tuple[float, int, tuple[Op, ...], int]] = []  # end, order, ops, rank
    now, count = 0.0, 0
    while True:
        for rank in range(len(rows)):
            ops = () if rank in busy else state.choose(rank)
            if ops:
                busy.add(rank)
                rows[rank].extend(ops)
                count += 1
                end = now + sum(map(costs.compute, ops))
                heapq.heappush(running, (end, count, ops, rank))
        if not running:
            break
        now = running[0][0]
        while running and running[0][0] == now:
            _, _, ops, rank = heapq.heappop(running)
            busy.discard(rank)
            state.finish(ops)
    state.check()
    return now, tuple(map(tuple, rows))


class _State:
    """How far the base rows are, what has run, and which waves each rank must or may run."""

    def __init__(self, base: Table, waves: Sequence[Wave]) -> None:
        self.base, self.waves = base, waves
        self.at = [0] * len(base.rows)
        self.made: set[Op] = set()
        self.must: list[deque[int]] = [deque() for _ in base.rows]
        self.may: list[deque[int]] = [deque() for _ in base.rows]
        self.ran: list[set[int]] = [set() for _ in base.rows]
        self.lacking: dict[tuple[int, bool], set[Op]] = {}
        self.wakes: dict[Op, list[tuple[int, bool]]] = defaultdict(list)
        for number, wave in enumerate(waves):
            self._await(number, True, wave.waits)
            self._await(number, False, wave.allows)

    def choose(self, rank: int) -> tuple[Op, ...]:
        """What a free rank runs now: a due unit, else its next base op, else an allowed unit."""
        return self._unit(rank, self.must) or self._next(rank) or self._unit(rank, self.may)

    def finish(self, ops: Iterable[Op]) -> None:
        """Note that ops have run, and open the waves that waited for them."""
        for op in ops:
            self.made.add(op)
            for number, urgent in self.wakes.pop(op, ()):
                self.lacking[number, urgent].discard(op)
                self._open(number, urgent)

    def check(self) -> None:
        """Raise unless everything has run."""
        lacks = [
            f"rank {rank} stands at {row[at]}"
            for rank, (row, at) in enumerate(zip(self.base.rows, self.at, strict=True))
            if at < len(row)
        ]
        if lacks:
            raise ScheduleError(f"the base rows cannot end: {'; '.join(lacks)}")

    def _await(self, number: int, urgent: bool, ops: frozenset[Op] | None) -> None:
        if ops is None:
            return
        self.lacking[number, urgent] = set(ops)
        for op in ops:
            self.wakes[op].append((number, urgent))
        self._open(number, urgent)

    def _open(self, number: int, urgent: bool) -> None:
        if not self.lacking[number, urgent]:
            for queue in self.must if urgent else self.may:
                queue.append(number)

    def _unit(self, rank: int, queues: Sequence[deque[int]]) -> tuple[Op, ...]:
        queue = queues[rank]
        while queue:
            number = queue.popleft()
            if number not in self.ran[rank] and self.waves[number].units[rank]:
                self.ran[rank].add(number)
                return self.waves[number].units[rank]
        return ()

    def _next(self, rank: int) -> tuple[Op, ...]:
        """The next base op, if what it reads is made."""
        row, at = self.base.rows[rank], self.at[rank]
        if at == len(row) or not all(x in self.made for x in inputs(row[at], self.base.cut)):
            return ()
        self.at[rank] += 1
        return (row[at],)
