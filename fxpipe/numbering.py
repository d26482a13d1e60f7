"""From a cut to a scheduling problem: its compute ops are numbered, and their rules written out."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypedDict

from fxpipe.costs import Costs
from fxpipe.cut import Cut, Kind, Stage
from fxpipe.problem import ANY, Limits, Owners, Problem, pools
from fxpipe.table import Op, Rows, inputs


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
        pools=pools(units, numbers.ops, home),
        size=numbers.sizes(costs),
        **_room(cut, numbers.ops, limits or Limits()),
    )


class _Room(TypedDict):
    opens: list[int]
    closes: list[int]
    group: list[int]
    weight: list[int]
    room: list[list[float]]
    memory: float


def _room(cut: Cut, ops: Sequence[Op], limits: Limits) -> _Room:
    """What bounds activations (see `Problem`)."""
    classes, room = limits.classes(cut)
    first, last = _ends(cut)
    group, weight = [ANY] * len(ops), [1] * len(ops)
    if not isinstance(limits.sharded, Mapping):
        group, weight = _groups(cut, ops)
    return _Room(
        opens=[classes[op.stage] if op[:2] in first else ANY for op in ops],
        closes=[classes[op.stage] if op[:2] in last else ANY for op in ops],
        group=group,
        weight=weight,
        room=room,
        memory=limits.memory,
    )


def _ends(cut: Cut) -> tuple[set[tuple[str, Kind]], set[tuple[str, Kind]]]:
    """The kinds of op that open and close a unit: where nothing is kept, none."""
    held = [stage for stage in cut.stages if len(stage.kinds) > 1 and cut.keeps(stage.name)]
    return {(s.name, Kind.F) for s in held}, {(s.name, s.kinds[-1]) for s in held}


def _groups(cut: Cut, ops: Sequence[Op]) -> tuple[list[int], list[int]]:
    """For each op the number of its group, the ops of one region and microbatch on one rank, and
    the stages of it; ANY where there is only one."""
    places = Counter((stage.region, stage.rank) for stage in cut.stages if stage.rank is not None)
    found: dict[tuple[str, int | None, int | None], int] = {}
    groups, weights = [], []
    for op in ops:
        stage = cut.stage[op.stage]
        count = 0 if stage.rank is None else places[stage.region, stage.rank]
        key = (stage.region, stage.rank, op.mb)
        groups.append(found.setdefault(key, len(found)) if count > 1 else ANY)
        weights.append(max(1, count))
    return groups, weights


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
