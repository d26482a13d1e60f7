"""A scheduling problem: the compute ops of a cut as numbers, and what each must wait for.

Ops of sharded stages have a home; those of a replicated stage run wherever their unit (the F, B and
W of one stage and microbatch) was begun. An op that opens a unit takes room of its class on its
rank, the one that closes it gives it back: that is what bounds activations.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fxpipe.costs import Costs
from fxpipe.cut import Cut, Kind, Stage
from fxpipe.table import Op, Table, inputs

ANY = -1  # an op without a home, a unit or a class
Rows = tuple[tuple[Op, ...], ...]
Owners = Mapping[str, Sequence[int]]  # of a replicated region: the rank of each microbatch


@dataclass(frozen=True)
class Problem:
    """Ops by number. Lists have one entry for each op.

    home: rank, or ANY. unit: its number, or ANY; units: the ops of each. reads, read_by: numbers of
    ops. seconds: of the op; delay: of a transfer of its value. queues: lists of ops that run in
    this order, those of a queue on one rank. pools: lists of the first ops of units without a home.
    opens, closes: the class of which the op takes or returns room; room: of each class on each
    rank. size: bytes taken with it; memory: bytes of each rank.
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
            pools=_pools([unit[::-1] for unit in self.units[::-1]], self.ops, self.home),
            opens=self.closes,
            closes=self.opens,
        )

    def rows(self, ranks: Sequence[int], starts: Sequence[float]) -> Rows:
        """Rows of ops in the order in which they start."""
        rows: list[list[Op]] = [[] for _ in range(self.ranks)]
        for op in sorted(range(len(self.ops)), key=starts.__getitem__):
            rows[ranks[op]].append(self.ops[op])
        return tuple(map(tuple, rows))


@dataclass(frozen=True)
class Limits:
    """How many units a rank may hold, and how many bytes.

    modality: of each replicated region; sharded: of all sharded stages of one region together, or,
    where a mapping, of single stages; memory: bytes of everything that is kept.
    """

    modality: float = math.inf
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
                room.append([self._of(stage)] * cut.ranks)
            of[stage.name] = number[name]
        return of, room

    def _of(self, stage: Stage) -> float:
        if stage.rank is None:
            return self.modality
        if isinstance(self.sharded, Mapping):
            return self.sharded.get(stage.name, math.inf)
        return self.sharded


def build(
    cut: Cut,
    microbatches: int,
    costs: Costs,
    *,
    base: Rows | None = None,
    owners: Owners | None = None,
    limits: Limits | None = None,
    stages: Callable[[Stage], bool] = lambda _: True,
) -> Problem:
    """The problem of scheduling a cut.

    base: rows of the sharded stages, in an order that is kept. owners: of regions whose owners are
    given. stages: which stages take part.
    """
    numbers = _Numbers(cut, microbatches, [stage for stage in cut.stages if stages(stage)])
    home = [numbers.home(op, owners or {}) for op in numbers.ops]
    unit, units = numbers.units()
    reads = numbers.reads()
    read_by: list[list[int]] = [[] for _ in reads]
    for op, values in enumerate(reads):
        for value in values:
            read_by[value].append(op)
    classes, room = (limits or Limits()).classes(cut)
    first, last = _ends(cut)
    return Problem(
        ranks=cut.ranks,
        ops=numbers.ops,
        home=home,
        unit=unit,
        units=units,
        reads=reads,
        read_by=read_by,
        seconds=[costs.compute(op) for op in numbers.ops],
        delay=[costs.transfer(op) for op in numbers.ops],
        queues=numbers.queues(home, base),
        pools=_pools(units, numbers.ops, home),
        opens=[classes[op.stage] if first.get(op[:2]) else ANY for op in numbers.ops],
        closes=[classes[op.stage] if last.get(op[:2]) else ANY for op in numbers.ops],
        room=room,
        size=numbers.sizes(costs),
        memory=(limits or Limits()).memory,
    )


def _ends(cut: Cut) -> tuple[dict[tuple[str, Kind], bool], dict[tuple[str, Kind], bool]]:
    """The kinds of op that open and close a unit: where nothing is kept, none."""
    first, last = {}, {}
    for stage in cut.stages:
        if len(stage.kinds) > 1 and cut.keeps(stage.name):
            first[stage.name, Kind.F] = True
            last[stage.name, stage.kinds[-1]] = True
    return first, last


def _numbers_of(lists: Sequence[Sequence[int]], count: int) -> list[int]:
    found = [ANY] * count
    for number, members in enumerate(lists):
        for op in members:
            found[op] = number
    return found


def _pools(
    units: Sequence[Sequence[int]], ops: Sequence[Op], home: Sequence[int]
) -> list[list[int]]:
    """The first ops of units without a home, by stage and kind, in the order of the units."""
    pools: dict[tuple[str, Kind], list[int]] = {}
    for unit in units:
        if home[unit[0]] == ANY:
            op = ops[unit[0]]
            pools.setdefault((op.stage, op.kind), []).append(unit[0])
    return list(pools.values())


class _Numbers:
    """The ops of some stages, numbered microbatch by microbatch within each stage and kind."""

    def __init__(self, cut: Cut, microbatches: int, stages: Sequence[Stage]) -> None:
        self.cut, self.count, self.stages = cut, microbatches, stages
        self.first: dict[tuple[str, Kind], int] = {}
        self.ops: list[Op] = []
        for stage in stages:
            for kind in stage.kinds:
                self.first[stage.name, kind] = len(self.ops)
                self.ops += [Op(stage.name, kind, mb) for mb in range(microbatches)]

    def home(self, op: Op, owners: Owners) -> int:
        stage = self.cut.stage[op.stage]
        if stage.rank is not None:
            return stage.rank
        return owners[stage.region][op.mb or 0] if stage.region in owners else ANY

    def units(self) -> tuple[list[int], list[list[int]]]:
        """For each op its unit, and for each unit its ops; only replicated stages have units."""
        unit = [ANY] * len(self.ops)
        units: list[list[int]] = []
        for stage in self.stages:
            if stage.rank is not None:
                continue
            for mb in range(self.count):
                members = [self.first[stage.name, kind] + mb for kind in stage.kinds]
                for op in members:
                    unit[op] = len(units)
                units.append(members)
        return unit, units

    def reads(self) -> list[list[int]]:
        reads: list[list[int]] = []
        for name, kind in self.first:
            values = (value[:2] for value in inputs(Op(name, kind, 0), self.cut))
            firsts = [self.first[value] for value in values if value in self.first]
            reads += [[first + mb for first in firsts] for mb in range(self.count)]
        return reads

    def queues(self, home: Sequence[int], base: Rows | None) -> list[list[int]]:
        """Base rows, or each stage's kinds by themselves; those of owned units apart by rank."""
        if base is not None:
            queues = [[self.first[op.stage, op.kind] + (op.mb or 0) for op in row] for row in base]
        else:
            queues = list(self._by_kind(sharded=True))
        for queue in self._by_kind(sharded=False):
            for rank in range(self.cut.ranks):
                queues.append([op for op in queue if home[op] == rank])
        return [queue for queue in queues if queue]

    def _by_kind(self, sharded: bool) -> Iterator[list[int]]:
        for stage in self.stages:
            if (stage.rank is not None) is sharded:
                for kind in stage.kinds:
                    first = self.first[stage.name, kind]
                    yield list(range(first, first + self.count))

    def sizes(self, costs: Costs) -> list[float]:
        """Bytes that each unit keeps, on the op that opens it and on the one that closes it."""
        sizes = [0.0] * len(self.ops)
        if not costs.kept:
            return sizes
        for stage in self.stages:
            for mb in range(self.count):
                kept = max(costs.keeps(Op(stage.name, kind, mb)) for kind in stage.kinds)
                for kind in (stage.kinds[0], stage.kinds[-1]):
                    sizes[self.first[stage.name, kind] + mb] = kept
        return sizes


def numbered(problem: Problem, table: Table) -> list[list[int]]:
    """The rows of a table's compute ops, as numbers of a problem's ops."""
    number = {op: index for index, op in enumerate(problem.ops)}
    return [[number[op] for op in row] for row in table.compute]
