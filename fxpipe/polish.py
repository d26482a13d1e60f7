"""Polishing: small changes of rows, kept when the schedule ends sooner, and at times when not.

Only what lies on a critical path can shorten a schedule (as in job shops): an op moves within a
run of ops that follow one another without a gap, or a unit moves to another rank. Annealing decides
which changes stay. All chance comes from one seed, and effort is counted in ops.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

from fxpipe.problem import ANY, Problem

_TINY = 1e-9
_HEAT = 0.15  # in mean ops: how much later a schedule may end and still be taken, at first
_SPREAD = 0.02  # what the mean end of the ranks counts beside the last one


class _Block(NamedTuple):
    """Places first..last in the row of a rank, of ops that start when the one before ends."""

    rank: int
    first: int
    last: int


class Polished(NamedTuple):
    """Rows of ops, and when the last one ends."""

    rows: list[list[int]]
    end: float


class _Times(NamedTuple):
    starts: list[float]
    ends: list[float]
    free: list[float]

    @property
    def cost(self) -> float:
        return max(self.free) + _SPREAD * sum(self.free) / len(self.free)


def polish(
    problem: Problem, rows: Sequence[Sequence[int]], *, effort: int, seed: int = 0
) -> Polished:
    """Rows of ops that end no later than the ones given. Queues need not keep their order.

    effort: how many ops are looked at. Ends early where `problem.bound` is reached.
    """
    state = _State(problem, rows, Random(seed))
    best, end = [*map(list, state.rows)], max(state.times.free)
    unit = sum(problem.seconds) / max(1, len(problem.ops))
    while state.spent < effort and end > problem.bound * (1 + _TINY):
        heat = _HEAT * unit * (1 - state.spent / effort) ** 2
        if state.step(heat) and max(state.times.free) < end - _TINY:
            best, end = [*map(list, state.rows)], max(state.times.free)
    return Polished(best, end)


class _State:
    """Rows, when their ops run, and where each op is."""

    def __init__(self, problem: Problem, rows: Sequence[Sequence[int]], chance: Random) -> None:
        self.problem = problem
        self.chance = chance
        self.rows = [list(row) for row in rows]
        self.spent = 0
        count = len(problem.ops)
        self.times = _Times([0.0] * count, [-1.0] * count, [0.0] * len(rows))
        times = self.time(self.rows, [0] * len(rows), math.inf)
        assert times is not None, "the rows to polish cannot end"
        self.times = times
        self.place = _places(self.rows)
        self.moving = [unit for unit in problem.units if problem.home[unit[0]] == ANY]

    def step(self, heat: float) -> bool:
        """Try one change; whether it stays."""
        self.spent += len(self.problem.ops) // 8
        changed = self.shift() if self.chance.random() < 0.85 or not self.moving else self.move()
        if not changed or not all(map(self.fits, changed, changed.values())):
            return False
        rows = [changed.get(rank, row) for rank, row in enumerate(self.rows)]
        limit = self.times.cost - heat * math.log(self.chance.random() + 1e-12)
        times = self.time(rows, self.heads(changed), limit)
        if times is None or times.cost > limit:
            return False
        self.rows, self.times = rows, times
        for rank, row in changed.items():
            self.place.update((op, (rank, at)) for at, op in enumerate(row))
        return True

    def heads(self, changed: Mapping[int, Sequence[int]]) -> list[int]:
        """For each rank, the first op that may run at another time once these rows have changed."""
        starts, free = self.times.starts, self.times.free
        heads = {rank: self.first_change(rank, row) for rank, row in changed.items()}
        since = min(
            starts[self.rows[rank][head]] if head < len(self.rows[rank]) else free[rank]
            for rank, head in heads.items()
        )
        return [
            bisect_left(row, since, hi=heads.get(rank), key=starts.__getitem__)
            for rank, row in enumerate(self.rows)
        ]

    def first_change(self, rank: int, row: Sequence[int]) -> int:
        """The first place at which a row differs from the one before."""
        pairs = enumerate(zip(self.rows[rank], row, strict=False))
        length = min(len(self.rows[rank]), len(row))
        return next((at for at, (old, new) in pairs if old != new), length)

    def time(self, rows: Sequence[Sequence[int]], heads: list[int], limit: float) -> _Times | None:
        """When the ops of rows run; those before `heads` as before. None if beyond the limit."""
        timing = _Timing(self.problem, rows, self.times, heads, limit)
        ready = list(range(len(rows)))
        while ready and not timing.late:
            ready += timing.advance(ready.pop())
        self.spent += timing.seen
        if timing.late or timing.waiting:
            return None
        return _Times(timing.starts, timing.ends, timing.free)

    def fits(self, rank: int, row: Sequence[int]) -> bool:
        """Whether a rank has room for its row."""
        problem = self.problem
        room = [of[rank] for of in problem.room] + [math.inf]
        space, begun = problem.memory, set[int]()
        for op in row:
            kind, group = problem.opens[op], problem.group[op]
            if kind != ANY and group not in begun:
                room[kind] -= problem.weight[op]
                begun.add(group)
                begun.discard(ANY)
            if room[kind] < 0 or problem.needs[op] > space:
                return False
            space -= problem.takes[op]
            room[problem.closes[op]] += 1
        return True

    def shift(self) -> dict[int, list[int]]:
        """The row in which an op of a critical block has moved, by rank."""
        blocks = self.critical()
        if not blocks:
            return {}
        chance = self.chance
        rank, first, last = chance.choice(blocks)
        row = list(self.rows[rank])
        match chance.random():
            case x if x < 0.4:
                old = first if chance.random() < 0.5 else last - 1
                new = old + 1
            case x if x < 0.8:
                old = chance.randint(first, last)
                new = chance.randint(max(0, first - 1), min(len(row) - 1, last + 1))
            case _:
                old = chance.randint(first, last - 1)
                new = old + 1
        if old == new:
            return {}
        row.insert(new, row.pop(old))
        return {rank: row}

    def move(self) -> dict[int, list[int]]:
        """The rows in which a unit has moved to another rank, or changed places with one there."""
        chance, starts, unit_of = self.chance, self.times.starts, self.problem.unit
        unit = chance.choice(self.moving)
        source = self.place[unit[0]][0]
        target = chance.randrange(len(self.rows))
        if source == target:
            return {}
        units, kind = self.problem.units, self.problem.ops[unit[0]][:2]
        others = [
            units[unit_of[op]] for op in self.rows[target] if self.problem.ops[op][:2] == kind
        ]
        if others and chance.random() < 0.7:
            near = min(others, key=lambda other: abs(starts[other[0]] - starts[unit[0]]))
            swap = dict(zip((*unit, *near), (*near, *unit), strict=True))
            rows = {rank: self.rows[rank] for rank in (source, target)}
            return {rank: [swap.get(op, op) for op in row] for rank, row in rows.items()}
        row = list(self.rows[target])
        for op in unit:
            row.insert(bisect_left(row, starts[op], key=starts.__getitem__), op)
        return {source: [op for op in self.rows[source] if op not in unit], target: row}

    def critical(self) -> list[_Block]:
        """The blocks of several ops of a critical path, from its end."""
        starts, ends, free = self.times
        place, reads = self.place, self.problem.reads
        latest = [rank for rank, end in enumerate(free) if end >= max(free) - _TINY]
        rank = latest[self.below(len(latest))]
        row = self.rows[rank]
        at = last = len(row) - 1
        blocks = []
        while True:
            since = starts[row[at]] - _TINY
            tight = [value for value in reads[row[at]] if ends[value] >= since]
            if at and ends[row[at - 1]] >= since:
                tight.append(row[at - 1])
            source, before = place[tight[self.below(len(tight))]] if tight else (ANY, ANY)
            if source != rank or before != at - 1:
                if at < last:
                    blocks.append(_Block(rank, at, last))
                if not tight:
                    return blocks
                rank, last, row = source, before, self.rows[source]
            at = before

    def below(self, count: int) -> int:
        """A number below another one, by the chance that `Random.choice` would take."""
        bits, draw = count.bit_length(), self.chance.getrandbits
        while (number := draw(bits)) >= count:
            pass
        return number


def _places(rows: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
    """The rank and the place in its row of each op."""
    return {op: (rank, at) for rank, row in enumerate(rows) for at, op in enumerate(row)}


class _Timing:
    """Running rows again from some time on."""

    def __init__(
        self,
        problem: Problem,
        rows: Sequence[Sequence[int]],
        old: _Times,
        heads: list[int],
        limit: float,
    ) -> None:
        self.problem, self.rows, self.limit = problem, rows, limit
        self.starts, self.ends = old.starts[:], old.ends[:]
        self.heads = heads
        pairs = list(zip(rows, self.heads, strict=True))
        self.free = [self.ends[row[head - 1]] if head else 0.0 for row, head in pairs]
        for row, head in pairs:
            for op in row[head:]:
                self.ends[op] = -1.0
        self.waiting: dict[int, list[int]] = {}
        self.seen = 0
        self.late = False

    def advance(self, rank: int) -> list[int]:
        """Run a rank until it lacks a value, or is beyond the limit; the ranks that it wakes."""
        starts, ends, limit = self.starts, self.ends, self.limit
        seconds, reads, tail = self.problem.seconds, self.problem.reads, self.problem.tail
        row, at, now = self.rows[rank], self.heads[rank], self.free[rank]
        first = at
        woken: list[int] = []
        while at < len(row):
            op = row[at]
            start = now
            for value in reads[op]:
                there = ends[value]
                if there < 0:
                    self.waiting.setdefault(value, []).append(rank)
                    break
                if there > start:
                    start = there
            else:
                starts[op] = start
                ends[op] = now = start + seconds[op]
                if now + tail[op] > limit:
                    self.late = True
                    break
                at += 1
                if op in self.waiting:
                    woken += self.waiting.pop(op)
                continue
            break
        self.seen += at - first
        self.heads[rank], self.free[rank] = at, now
        return woken
