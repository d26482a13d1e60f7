"""Layouts and orders that no schedule of this project makes, but that are as good as any other."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from fxpipe import Pipe, passes
from fxpipe.backends import choose
from fxpipe.cut import Cut, Layout, Role
from fxpipe.device import Reckon
from fxpipe.schedule import Plan
from fxpipe.table import Op, Table, inputs

Home = int | tuple[int, ...] | None


def any_order(cut: Cut, microbatches: int, seed: int) -> Table:
    """Compute ops in a random order that can run, with random owners."""
    random = Random(seed)
    owner = [random.randrange(cut.ranks) for _ in range(microbatches)]
    left = {Op(s.name, k, mb) for s in cut.stages for k in s.kinds for mb in range(microbatches)}
    made: set[Op] = set()
    rows: list[list[Op]] = [[] for _ in range(cut.ranks)]
    while left:
        ready = sorted(op for op in left if all(value in made for value in inputs(op, cut)))
        random.shuffle(ready)
        turn: dict[int, Op] = {}
        for op in ready:
            home = cut.stage[op.stage].rank
            turn.setdefault(owner[op.mb or 0] if home is None else home, op)
        for rank, op in turn.items():
            rows[rank].append(op)
        made.update(turn.values())
        left -= set(turn.values())
    return Table(cut, tuple(map(tuple, rows)))


@dataclass(frozen=True)
class AnyOrder:
    """A scheduler: regions live where it says, and ops run in a random order."""

    home: Mapping[str, Home]
    backbone: tuple[int, ...]
    recompute: tuple[str, ...] = ()
    ranks: int | None = None
    microbatches: int | None = None
    in_order: bool = False
    seed: int = 0

    def plan(
        self, ranks: int, roles: Mapping[str, Role], others: Mapping[str, Role] | None = None
    ) -> Plan:
        """As given; a region that is not named is replicated."""
        others = [name for name, role in roles.items() if role is not Role.BACKBONE]
        home: dict[str, Home] = {name: self.home.get(name) for name in others}
        return Plan(Layout.SHARDED, home, self.backbone)

    def table(self, cut: Cut, microbatches: int, reckon: Reckon | None = None) -> Table:
        """A random order, with transfers and reductions."""
        return passes.run(any_order(cut, microbatches, self.seed))


def laid_out(pipe: Pipe, how: AnyOrder, backend: str = "local") -> Pipe:
    """The model of a pipe in a layout that has no name."""
    ranks = 1 + max(how.backbone)
    where = choose(backend, ranks)
    variants = pipe._variants.rescheduled(how, ranks)
    found = Pipe(pipe.model, variants, where, pipe._steps.microbatches, "aten", pipe._example)
    found.trace_example()
    return found
