"""A scheduling problem: the compute ops of a cut as numbers, and what each must wait for.

Ops of sharded stages have a home; those of a replicated stage run wherever their unit (the F, B and
W of one stage and microbatch) was begun. An op that opens a unit takes room of its class on its
rank, the one that closes it gives it back: that is what bounds activations.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from fxpipe.cut import Cut, Kind, Role, Stage
from fxpipe.table import Op, Rows

ANY = -1  # an op without a home, a unit or a class
Owners = Mapping[str, Sequence[int]]  # of a replicated region: the rank of each microbatch


@dataclass(frozen=True)
class Problem:
    """Ops by number. Lists have one entry for each op.

    home: rank, or ANY. unit: its number, or ANY; units: the ops of each. reads, read_by: numbers of
    ops. seconds: of the op; delay: of a transfer of its value. queues: lists of ops that run in
    this order, those of a queue on one rank. pools: lists of the first ops of units without a home.
    opens, closes: the class of which the op takes or returns room; room: of each class on each
    rank. An op that closes returns one unit. Where a rank has several stages of a region, the first
    op of a microbatch there takes room for all of them, or none might be left for the others: the
    first of a `group` takes `weight`. size: bytes taken with it; memory: bytes of each rank.
    """

    ranks: int
    ops: list[Op]
    home: list[int]
    unit: list[int]
    units: list[list[int]]
    reads: list[list[int]]
    read_by: list[list[int]]
    seconds: list[float]
    delay: list[float]
    queues: list[list[int]]
    pools: list[list[int]]
    opens: list[int]
    closes: list[int]
    group: list[int]
    weight: list[int]
    room: list[list[float]]
    size: list[float]
    memory: float = math.inf

    @cached_property
    def queue(self) -> list[int]:
        """The number of each op's queue, or ANY."""
        return _numbers_of(self.queues, len(self.ops))

    @cached_property
    def pool(self) -> list[int]:
        """The number of each op's pool, or ANY."""
        return _numbers_of(self.pools, len(self.ops))

    @cached_property
    def after(self) -> list[int]:
        """The next op of each op's queue, or ANY."""
        found = [ANY] * len(self.ops)
        for queue in self.queues:
            for op, following in pairwise(queue):
                found[op] = following
        return found

    @cached_property
    def mates(self) -> list[list[int]]:
        """The ops of each op's group, where it takes room for all of them."""
        of: dict[int, list[int]] = {ANY: []}
        for op, group in enumerate(self.group):
            if group != ANY:
                of.setdefault(group, []).append(op)
        pairs = zip(self.opens, self.group, strict=True)
        return [of[ANY if kind == ANY else group] for kind, group in pairs]

    @cached_property
    def steps(self) -> list[tuple[int, int, int, int, int, float, list[int]]]:
        """For each op `after`, `queue`, `unit`, `opens`, `closes`, `takes` and `mates`."""
        return list(
            zip(
                self.after,
                self.queue,
                self.unit,
                self.opens,
                self.closes,
                self.takes,
                self.mates,
                strict=True,
            )
        )

    @cached_property
    def readers(self) -> list[tuple[float, list[tuple[int, int, int, int]]]]:
        """For each op the delay of its value, and its readers: each with home, unit and queue."""
        each = list(zip(range(len(self.ops)), self.home, self.unit, self.queue, strict=True))
        return [
            (delay, [each[reader] for reader in readers])
            for delay, readers in zip(self.delay, self.read_by, strict=True)
        ]

    @cached_property
    def needs(self) -> list[float]:
        """Bytes that must be free before each op."""
        pairs = zip(self.opens, self.size, strict=True)
        return [0.0 if kind == ANY else size for kind, size in pairs]

    @cached_property
    def takes(self) -> list[float]:
        """Bytes that each op takes, less those that it returns."""
        pairs = zip(self.needs, self.closes, self.size, strict=True)
        return [need - (0.0 if kind == ANY else size) for need, kind, size in pairs]

    @cached_property
    def tail(self) -> list[float]:
        """Seconds from the end of each op until all that depends on it can have run."""
        tail = [0.0] * len(self.ops)
        lacking = list(map(len, self.read_by))
        ready = [op for op, count in enumerate(lacking) if not count]
        while ready:
            op = ready.pop()
            for value in self.reads[op]:
                tail[value] = max(tail[value], tail[op] + self.seconds[op])
                lacking[value] -= 1
                if not lacking[value]:
                    ready.append(value)
        return tail

    @cached_property
    def bound(self) -> float:
        """Seconds that no order can beat: work over ranks, or the longest chain of ops."""
        chain = max((t + s for t, s in zip(self.tail, self.seconds, strict=True)), default=0.0)
        return max(sum(self.seconds) / self.ranks, chain)

    @cached_property
    def reversed(self) -> "Problem":
        """The same problem with time turned around: what read is read, what opened closes."""
        return replace(
            self,
            reads=self.read_by,
            read_by=self.reads,
            queues=[queue[::-1] for queue in self.queues],
            pools=pools([unit[::-1] for unit in self.units[::-1]], self.ops, self.home),
            opens=self.closes,
            closes=self.opens,
        )

    def rows(self, ranks: Sequence[int], starts: Sequence[float]) -> Rows:
        """Rows of ops in the order in which they start."""
        return self.named(self.in_order(ranks, starts))

    def in_order(self, ranks: Sequence[int], starts: Sequence[float]) -> list[list[int]]:
        """For each rank the numbers of its ops, in the order in which they start."""
        rows: list[list[int]] = [[] for _ in range(self.ranks)]
        for op in sorted(range(len(self.ops)), key=starts.__getitem__):
            rows[ranks[op]].append(op)
        return rows

    def named(self, rows: Sequence[Sequence[int]]) -> Rows:
        """Rows of numbers as rows of ops."""
        return tuple(tuple(self.ops[op] for op in row) for row in rows)


@dataclass(frozen=True)
class Limits:
    """How many units a rank may hold, and how many bytes.

    modality: of each replicated region; generator: of those that are generators; sharded: of all
    sharded stages of one region together, or, where a mapping, of single stages; memory: bytes of
    everything that is kept.
    """

    modality: float = math.inf
    generator: float = math.inf
    sharded: float | Mapping[str, float] = math.inf
    memory: float = math.inf

    def classes(self, cut: Cut) -> tuple[dict[str, int], list[list[float]]]:
        """The class of each stage, and the room of each class on each rank."""
        of: dict[str, int] = {}
        room: list[list[float]] = []
        number: dict[str, int] = {}
        for stage in cut.stages:
            single = stage.rank is not None and not isinstance(self.sharded, float | int)
            name = f"stage {stage.name}" if single else f"region {stage.region}"
            if name not in number:
                number[name] = len(room)
                room.append([self._of(stage, cut.role(stage.name))] * cut.ranks)
            of[stage.name] = number[name]
        return of, room

    def _of(self, stage: Stage, role: Role) -> float:
        if stage.rank is None:
            bound = self.generator if role is Role.GENERATOR else math.inf
            return min(self.modality, bound)
        if isinstance(self.sharded, Mapping):
            return self.sharded.get(stage.name, math.inf)
        return self.sharded


def _numbers_of(lists: Sequence[Sequence[int]], count: int) -> list[int]:
    found = [ANY] * count
    for number, members in enumerate(lists):
        for op in members:
            found[op] = number
    return found


def pools(
    units: Sequence[Sequence[int]], ops: Sequence[Op], home: Sequence[int]
) -> list[list[int]]:
    """The first ops of units without a home, by stage and kind, in the order of the units."""
    pools: dict[tuple[str, Kind], list[int]] = {}
    for unit in units:
        if home[unit[0]] == ANY:
            op = ops[unit[0]]
            pools.setdefault((op.stage, op.kind), []).append(unit[0])
    return list(pools.values())
