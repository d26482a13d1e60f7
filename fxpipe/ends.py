"""Replicated regions at the ends of base rows: `upfront` (Optimus) and `transpose` (Mpipe).

All encoder forwards stand before a rank's base row, all encoder backwards after it; a generator's
units after the row's forwards where they return gradients, else after the row.
"""

from collections.abc import Iterator, Sequence

from fxpipe.costmodel import tail_slack, warmup_slack
from fxpipe.costs import Costs
from fxpipe.cut import Cut, Kind, Role, Stage
from fxpipe.owners import Given, of_region, owners_of, slack
from fxpipe.table import Op, Rows, Table
from fxpipe.units import backward, forward, replicated


def at_ends(base: Table, microbatches: int, costs: Costs, owners: Given, *, turn: bool) -> Rows:
    """The base rows with the units of each owner around them.

    owners: of each replicated region; turn: whether generator units stand where the forwards of a
    row have ended, and not after the row.
    """
    cut = base.cut
    units = _Units(base, microbatches, costs, owners)
    encoders, generators = (replicated(cut, role) for role in (Role.ENCODER, Role.GENERATOR))
    rows = []
    for rank, row in enumerate(base.rows):
        at = _turn(row) if turn else len(row)
        rows.append(
            (
                *units.forwards(encoders, rank),
                *row[:at],
                *units.wholes(generators, rank),
                *row[at:],
                *units.backwards(encoders, rank),
            )
        )
    return tuple(rows)


def owned(
    base: Table, microbatches: int, costs: Costs, owners: Given
) -> dict[str, tuple[int, ...]]:
    """The rank of each microbatch of each replicated region whose owners are given."""
    idle = warmup_slack(base, costs)
    found = {}
    for stage in base.cut.stages:
        rule = of_region(owners, stage.region)
        if stage.rank is None and rule is not None:
            seconds = _seconds(costs, stage, (Kind.F,), microbatches)
            found[stage.region] = owners_of(rule, seconds, idle)
    return found


class _Units:
    """Which ops of replicated stages each rank runs."""

    def __init__(self, base: Table, microbatches: int, costs: Costs, owners: Given) -> None:
        self.count = microbatches
        found = owned(base, microbatches, costs, owners)
        stages = [stage for stage in base.cut.stages if stage.rank is None]
        self.ahead = {stage.name: found[stage.region] for stage in stages}
        self.back = dict(self.ahead)
        for stage in stages:
            if of_region(owners, stage.region) == "slack" and _apart(base.cut, stage):
                seconds = _seconds(costs, stage, stage.kinds[1:], microbatches)
                self.back[stage.name] = slack(seconds, tail_slack(base, costs), backward=True)

    def forwards(self, stages: Sequence[Stage], rank: int) -> Iterator[Op]:
        """Forwards by microbatch."""
        for mb in range(self.count):
            yield from forward([s for s in stages if self.ahead[s.name][mb] == rank], mb)

    def backwards(self, stages: Sequence[Stage], rank: int) -> Iterator[Op]:
        """Backwards by microbatch."""
        for mb in range(self.count):
            yield from backward([s for s in stages if self.back[s.name][mb] == rank], mb)

    def wholes(self, stages: Sequence[Stage], rank: int) -> Iterator[Op]:
        """Forward and backward of each microbatch at once."""
        for mb in range(self.count):
            own = [s for s in stages if self.ahead[s.name][mb] == rank]
            yield from forward(own, mb)
            yield from backward(own, mb)


def _apart(cut: Cut, stage: Stage) -> bool:
    """Whether a stage's backward may run on another rank than its forward: it keeps nothing."""
    return (
        len(stage.kinds) > 1 and not cut.keeps(stage.name) and cut.role(stage.name) is Role.ENCODER
    )


def _seconds(costs: Costs, stage: Stage, kinds: Sequence[Kind], microbatches: int) -> list[float]:
    return [
        sum(costs.compute(Op(stage.name, kind, mb)) for kind in kinds) for mb in range(microbatches)
    ]


def _turn(row: Sequence[Op]) -> int:
    """Where the forwards of a row have ended."""
    return max((at + 1 for at, op in enumerate(row) if op.kind is Kind.F), default=0)
