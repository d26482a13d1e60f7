"""List scheduling: put op after op on the rank that can start it first, dearest first.

A rank weighs when an op can start against how urgent it is: an urgent op that is about to be ready
is worth waiting for. What is found is an execution, so its rows cannot deadlock.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add

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

    def least(self, problem: Problem) -> float:
        """The least limit under which it comes out the same: its end, but for rounding."""
        ends = map(add, self.starts, problem.seconds)
        return max(map(add, ends, problem.tail), default=0.0)


def listing(problem: Problem, urgency: Sequence[float], limit: float = math.inf) -> Listed:
    """Schedule every op; stops where no op can ever start, or the end would lie beyond `limit`.

    urgency: seconds for each op: it may start so much later than an op of urgency 0 and still go
    before it, if negative, or must otherwise. limit: seconds.
    """
    state = _State(problem, urgency)
    placed = state.run(limit)
    return Listed(state.starts, state.ranks, max(state.free), placed)


class _State:
    """What has been placed, and for each rank the op that it would run next.

    open: for each rank, the ops that only it could run now: ready heads of its queues, and ready
    ops of units begun there. own: the best of them. front: ops that any rank could run: the next
    ready unit of each pool. choice: the best of both, by its key: start plus urgency. What a rank
    has of its own is weighed again only after it has run an op.
    """

    def __init__(self, problem: Problem, urgency: Sequence[float]) -> None:
        count, ranks = len(problem.ops), problem.ranks
        self.problem, self.urgency = problem, urgency
        self.steps, self.readers = problem.steps, problem.readers
        self.opens, self.needs = problem.opens, problem.needs
        self.starts, self.ready = [0.0] * count, [0.0] * count
        self.ranks = [ANY] * count
        self.lacking = list(map(len, problem.reads))
        self.free = [0.0] * ranks
        self.owner = [ANY] * len(problem.units)
        # One more class, without end, for the ops that take no room: its number is ANY, the last.
        self.room = [[*(of[rank] for of in problem.room), math.inf] for rank in range(ranks)]
        self.space = [problem.memory] * ranks
        self.share = problem.weight[:]  # room that each op would take
        self.heads = [queue[0] for queue in problem.queues]
        self.open: list[list[int]] = [[] for _ in range(ranks)]
        for head in self.heads:
            if not self.lacking[head]:
                self.open[problem.home[head]].append(head)
        self.pools = [[op for op in pool if not self.lacking[op]] for pool in problem.pools]
        self.own, self.own_key = [ANY] * ranks, [math.inf] * ranks
        self.choice, self.key = [ANY] * ranks, [math.inf] * ranks
        for rank in range(ranks):
            self.choose(rank)
        self.advance_front()

    def run(self, limit: float) -> int:
        """Place op after op; how many could be, in time."""
        tail, seconds, ready = self.problem.tail, self.problem.seconds, self.ready
        free, key, choice = self.free, self.key, self.choice
        for placed in range(len(self.starts)):
            best = min(key)
            if best == math.inf:
                return placed
            rank = key.index(best)
            op, start = choice[rank], free[rank]
            if ready[op] > start:
                start = ready[op]
            end = start + seconds[op]
            if end + tail[op] > limit:
                return placed
            self.starts[op], self.ranks[op], free[rank] = start, rank, end
            self.place(op, rank, end)
        return len(self.starts)

    def place(self, op: int, rank: int, end: float) -> None:
        """Account for an op that runs on a rank, and choose again where that changes a choice."""
        after, queue, unit, opens, closes, takes, mates = self.steps[op]
        room, mine = self.room[rank], self.open[rank]
        room[opens] -= self.share[op]
        room[closes] += 1
        self.space[rank] -= takes
        for mate in mates:
            self.share[mate] = 0
        everyone = queue == ANY and self.owner[unit] == ANY
        if everyone:
            self.owner[unit] = rank
            self.pools[self.problem.pool[op]].remove(op)
        else:
            mine.remove(op)
            if queue != ANY:
                self.heads[queue] = after
                if after != ANY and not self.lacking[after]:
                    mine.append(after)
        everyone |= self.tell(op, rank, end)
        self.choose(rank)
        if everyone:
            self.advance_front()
        elif self.front:
            self.offer((rank,))

    def tell(self, op: int, rank: int, end: float) -> bool:
        """Note when the readers of an op can have its value; whether the front grows by one."""
        lacking, ready = self.lacking, self.ready
        delay, readers = self.readers[op]
        after = end + delay
        grows = False
        for reader, home, unit, queue in readers:
            if home == ANY:
                home = self.owner[unit]
            there = end if home == rank else after
            if there > ready[reader]:
                ready[reader] = there
            lacking[reader] -= 1
            if lacking[reader]:
                continue
            if home == ANY:
                pool = self.pools[self.problem.pool[reader]]
                grows |= not pool
                pool.append(reader)
            elif queue == ANY or self.heads[queue] == reader:
                self.open[home].append(reader)
                if home != rank:
                    self.weigh(reader, home)
        return grows

    def choose(self, rank: int) -> None:
        """Find the best of a rank's own ops."""
        ready, urgency, free = self.ready, self.urgency, self.free[rank]
        best, chosen = math.inf, ANY
        for op in self.open[rank]:
            start = ready[op]
            if start < free:
                start = free
            key = start + urgency[op]
            if key < best and self.fits(op, rank):
                best, chosen = key, op
        self.own_key[rank] = self.key[rank] = best
        self.own[rank] = self.choice[rank] = chosen

    def fits(self, op: int, rank: int) -> bool:
        """Whether a rank has room for an op."""
        enough = self.room[rank][self.opens[op]] >= self.share[op]
        return enough and self.needs[op] <= self.space[rank]

    def weigh(self, op: int, rank: int) -> None:
        """Weigh an op that another rank has made ready against the choice of its own rank."""
        key = max(self.ready[op], self.free[rank]) + self.urgency[op]
        if key < self.own_key[rank] and self.fits(op, rank):
            self.own_key[rank], self.own[rank] = key, op
            if key <= self.key[rank]:  # of equals a rank's own op goes before the front
                self.key[rank], self.choice[rank] = key, op

    def advance_front(self) -> None:
        """The next ready unit of every pool: they become ready in nearly the order to run in."""
        self.front = [pool[0] for pool in self.pools if pool]
        self.key[:], self.choice[:] = self.own_key, self.own
        self.offer(range(len(self.free)))

    def offer(self, ranks: Iterable[int]) -> None:
        """Weigh the front against the choices of ranks."""
        free, keys = self.free, self.key
        for op in self.front:
            ready, urgency = self.ready[op], self.urgency[op]
            for rank in ranks:
                start = free[rank]
                if start < ready:
                    start = ready
                key = start + urgency
                if key < keys[rank] and self.fits(op, rank):
                    keys[rank], self.choice[rank] = key, op
