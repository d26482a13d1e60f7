"""List scheduling: put op after op on the rank that can start it first, dearest first.

A rank weighs when an op can start against how urgent it is: an urgent op that is about to be ready
is worth waiting for. What is found is an execution, so its rows cannot deadlock.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxpipe.problem import ANY, Problem


@dataclass(frozen=True)
class Listed:
    """Start of each op in seconds, the rank that runs it, and when the last op ends.

    placed: how many ops could be; complete: whether that is all of them
    """

    starts: list[float]
    ranks: list[int]
    end: float
    placed: int

    @property
    def complete(self) -> bool:
        """Whether every op was placed."""
        return self.placed == len(self.starts)


def listing(problem: Problem, urgency: Sequence[float], limit: float = math.inf) -> Listed:
    """Schedule every op; stops where no op can ever start, or the end would lie beyond `limit`.

    urgency: seconds for each op: it may start so much later than an op of urgency 0 and still go
    before it, if negative, or must otherwise. limit: seconds.
    """
    state = _State(problem, urgency)
    placed = state.run(limit)
    return Listed(state.starts, state.ranks, max(state.free), placed)


class _State:
    """What has been placed, and for each rank the best op that it could run next.

    open: for each rank, the ops that only it could run now: ready heads of its queues, and ready
    ops of units begun there. front: ops that any rank could run: the next ready unit of each pool.
    """

    def __init__(self, problem: Problem, urgency: Sequence[float]) -> None:
        count, ranks = len(problem.ops), problem.ranks
        self.problem = problem
        self.urgency = urgency
        self.starts = [0.0] * count
        self.ranks = [ANY] * count
        self.lacking = list(map(len, problem.reads))
        self.ready = [0.0] * count
        self.free = [0.0] * ranks
        self.owner = [ANY] * len(problem.units)
        # One more class, without end, for the ops that take no room: its number is ANY, the last.
        self.room = [list(room) for room in problem.room] + [[math.inf] * ranks]
        self.space = [problem.memory] * ranks
        self.begun: set[int] = set()  # groups that have taken room
        self.open: list[list[int]] = [[] for _ in range(ranks)]
        self.heads = [0] * len(problem.queues)
        for queue in problem.queues:
            if not self.lacking[queue[0]]:
                self.open[problem.home[queue[0]]].append(queue[0])
        self.pools = [[op for op in pool if not self.lacking[op]] for pool in problem.pools]
        self.front = self.next_units()
        self.keys = [math.inf] * ranks
        self.choice = [(0, 0.0)] * ranks

    def run(self, limit: float) -> int:
        """Place op after op; how many could be, in time."""
        tail, seconds, keys = self.problem.tail, self.problem.seconds, self.keys
        dirty: Iterable[int] = range(len(keys))
        for placed in range(len(self.starts)):
            for rank in dirty:
                self.choose(rank)
            key = min(keys)
            if key == math.inf:
                return placed
            rank = keys.index(key)
            op, start = self.choice[rank]
            if start + seconds[op] + tail[op] > limit:
                return placed
            dirty = self.place(op, rank, start)
        return len(self.starts)

    def choose(self, rank: int) -> None:
        """Find the op that a rank would run next, and its key: start plus urgency."""
        problem, begun = self.problem, self.begun
        opens, group, weight, needs = problem.opens, problem.group, problem.weight, problem.needs
        ready, urgency, room = self.ready, self.urgency, self.room
        free, space = self.free[rank], self.space[rank]
        best, chosen = math.inf, (0, 0.0)
        for op in self.open[rank] + self.front:
            takes = 0 if group[op] in begun else weight[op]
            if room[opens[op]][rank] < takes or needs[op] > space:
                continue
            start = ready[op]
            if start < free:
                start = free
            key = start + urgency[op]
            if key < best:
                best, chosen = key, (op, start)
        self.keys[rank], self.choice[rank] = best, chosen

    def place(self, op: int, rank: int, start: float) -> Iterable[int]:
        """Run an op on a rank; the ranks whose choice may change by it."""
        problem = self.problem
        end = start + problem.seconds[op]
        self.starts[op], self.ranks[op], self.free[rank] = start, rank, end
        if problem.opens[op] != ANY and problem.group[op] not in self.begun:
            self.room[problem.opens[op]][rank] -= problem.weight[op]
            if problem.group[op] != ANY:
                self.begun.add(problem.group[op])
        self.room[problem.closes[op]][rank] += 1
        self.space[rank] -= problem.takes[op]
        queue, unit = problem.queue[op], problem.unit[op]
        everyone = queue == ANY and self.owner[unit] == ANY
        if everyone:
            self.owner[unit] = rank
            self.pools[problem.pool[op]].remove(op)
        else:
            self.open[rank].remove(op)
            if queue != ANY:
                self.advance(queue, rank)
        dirty = {rank}
        for reader in problem.read_by[op]:
            everyone |= self.arrive(reader, rank, end, problem.delay[op], dirty)
        if everyone:
            self.front = self.next_units()
            return range(problem.ranks)
        return dirty

    def advance(self, queue: int, rank: int) -> None:
        """Go on to the next op of a queue."""
        self.heads[queue] += 1
        ops, head = self.problem.queues[queue], self.heads[queue]
        if head < len(ops) and not self.lacking[ops[head]]:
            self.open[rank].append(ops[head])

    def arrive(self, reader: int, rank: int, end: float, delay: float, dirty: set[int]) -> bool:
        """Note when a reader can have a value of a rank; whether any rank may run it from now."""
        problem = self.problem
        home, queue = problem.home[reader], problem.queue[reader]
        if home == ANY:
            home = self.owner[problem.unit[reader]]
        there = end if home == rank else end + delay
        if there > self.ready[reader]:
            self.ready[reader] = there
        self.lacking[reader] -= 1
        if self.lacking[reader]:
            return False
        if home == ANY:
            self.pools[problem.pool[reader]].append(reader)
            return True
        if queue == ANY or problem.queues[queue][self.heads[queue]] == reader:
            self.open[home].append(reader)
            dirty.add(home)
        return False

    def next_units(self) -> list[int]:
        """The next ready unit of every pool: they become ready in nearly the order to run in."""
        return [pool[0] for pool in self.pools if pool]
