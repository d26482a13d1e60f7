"""What a table will cost, from costs alone: hidden encoder work, and what no schedule can beat.

A replicated encoder costs the step only what idle time does not hide (Mpipe, arXiv 2607.03229,
section 4.3): of the forward seconds E_r that rank r owns, w_r fit in before its first backbone
forward, and the rest is spill. `fxpipe.formulas` has the same in closed form.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fxpipe.costs import Amount, Costs
from fxpipe.cut import Cut, Kind, Role
from fxpipe.simulate import simulate
from fxpipe.table import Op, Table, inputs
from fxpipe.timeline import Timeline


@dataclass(frozen=True)
class Hiding:
    """E_r (work), w_r (slack) and the bubble of each rank, in seconds and as a fraction."""

    work: tuple[float, ...]
    slack: tuple[float, ...]
    bubble: tuple[float, ...]

    @property
    def spill(self) -> tuple[float, ...]:
        """Seconds of each rank's encoder forwards that its slack does not hide."""
        return spill(self.work, self.slack)

    @property
    def hidden_share(self) -> float:
        """The fraction of all encoder forward seconds that is hidden; 1 if there are none."""
        return hidden_share(self.work, self.slack)

    @property
    def pays(self) -> float:
        """Seconds that the step is longer for, where all encoder forwards come first."""
        return max(self.spill, default=0.0)

    def beside(self, measured: "Hiding") -> str:
        """Predicted (self) beside measured, a line for each rank."""
        names = ("E", "w", "spill", "bubble")
        pairs = [
            (getattr(self, name), getattr(measured, name))
            for name in ("work", "slack", "spill", "bubble")
        ]
        head = "".join(f"{name:>10} {'measured':>10}" for name in names)
        rows = (
            "".join(f"{one[rank]:10.4g} {other[rank]:10.4g}" for one, other in pairs)
            for rank in range(len(self.work))
        )
        return "\n".join([f"rank{head}", *(f"{rank:4}{row}" for rank, row in enumerate(rows))])


def predicted(table: Table, costs: Costs) -> Hiding:
    """What a table will hide, by costs."""
    timeline = simulate(table, costs)
    bubble = tuple(map(timeline.bubble, range(table.cut.ranks)))
    return Hiding(encoder_work(table, costs), warmup_slack(table, costs), bubble)


def measured(table: Table, timeline: Timeline, costs: Costs | None = None) -> Hiding:
    """What a real step of the table has hidden: `predicted` by its own times, its own bubble."""
    found = observed(timeline, costs)
    bubble = tuple(map(timeline.bubble, range(table.cut.ranks)))
    return Hiding(encoder_work(table, found), warmup_slack(table, found), bubble)


def observed(timeline: Timeline, costs: Costs | None = None) -> Costs:
    """Costs with the seconds that each op has taken in a step; the rest is that of `costs`."""
    found: dict[tuple[str, Kind], dict[int, float]] = defaultdict(dict)
    for span in timeline.compute:
        found[span.op.stage, span.op.kind][span.op.mb or 0] = span.seconds
    seconds: dict[tuple[str, Kind], Amount] = {
        key: tuple(times.get(mb, 0.0) for mb in range(1 + max(times)))
        for key, times in found.items()
    }
    return replace(costs or Costs({}), seconds=seconds)


def encoder_work(table: Table, costs: Costs, *, head: bool = False) -> tuple[float, ...]:
    """E_r: forward seconds of the replicated encoders' microbatches that each rank owns.

    head: only of those that stand in its row before its first backbone forward.
    """
    encoders = {stage.name for stage in table.cut.of(Role.ENCODER) if stage.rank is None}
    backbone = {stage.name for stage in table.cut.of(Role.BACKBONE)}
    work = []
    for row in table.rows:
        forwards = [op for op in row if op.is_forward]
        if head:
            first = next((at for at, op in enumerate(forwards) if op.stage in backbone), None)
            forwards = forwards[:first]
        work.append(math.fsum(costs.compute(op) for op in forwards if op.stage in encoders))
    return tuple(work)


def warmup_slack(table: Table, costs: Costs) -> tuple[float, ...]:
    """w_r: idle seconds of each rank before its first backbone forward, in the base rows alone.

    The r-th rank of a linear pipeline waits for r stage forwards and as many transfers. A rank
    without a backbone stage has no such forward, and no slack.
    """
    alone = simulate(base_alone(table), costs)
    backbone = {stage.name for stage in table.cut.of(Role.BACKBONE)}
    first: dict[int, float] = {}
    busy: dict[int, float] = defaultdict(float)
    for span in sorted(alone.compute, key=lambda span: (span.start, span.end)):
        if span.op.stage in backbone:
            first.setdefault(span.rank, span.start)
        elif span.rank not in first:
            busy[span.rank] += span.seconds
    return tuple(max(0.0, first.get(r, 0.0) - busy[r]) for r in range(table.cut.ranks))


def tail_slack(table: Table, costs: Costs) -> tuple[float, ...]:
    """Idle seconds of each rank after its last op, in the base rows alone."""
    alone = simulate(base_alone(table), costs)
    last = [alone.start] * table.cut.ranks
    for span in alone.compute:
        last[span.rank] = max(last[span.rank], span.end)
    return tuple(max(last) - end for end in last)


def base_alone(table: Table) -> Table:
    """The rows of the sharded stages, as a table of a cut that has no other stages."""
    cut = table.cut
    stages = tuple(stage for stage in cut.stages if stage.rank is not None)
    names = {stage.name for stage in stages}
    regions = tuple(r for r in cut.regions if r.name in {stage.region for stage in stages})
    seams = tuple(seam for seam in cut.seams if {seam.source, seam.target} <= names)
    alone = replace(cut, regions=regions, stages=stages, seams=seams, shared=())
    return Table(alone, table.only(region.name for region in regions))


def spill(work: Sequence[float], slack: Sequence[float]) -> tuple[float, ...]:
    """max(0, E_r - w_r) of each rank."""
    return tuple(max(0.0, e - w) for e, w in zip(work, slack, strict=True))


def hidden_share(work: Sequence[float], slack: Sequence[float]) -> float:
    """The sum of min(E_r, w_r) as a fraction of that of E_r; 1 where there is no work."""
    total = sum(work)
    return sum(map(min, work, slack)) / total if total else 1.0


def lower_bound(cut: Cut, costs: Costs, microbatches: int) -> float:
    """Seconds that no schedule of a cut can beat, whatever memory it has.

    The greater of all work, evenly over the ranks, and the longest chain of ops of one microbatch,
    with the transfers that no choice of owners avoids.
    """
    lengths = [
        len(amount)
        for amounts in (costs.seconds, costs.bytes)
        for amount in amounts.values()
        if isinstance(amount, Sequence)
    ]
    period = min(microbatches, math.lcm(*lengths))
    reductions = {name: costs.compute(Op(name, Kind.R)) for name in cut.groups}
    work = sum(len(cut.ranks_of(cut.groups[name])) * x for name, x in reductions.items())
    longest = 0.0
    for mb in range(period):
        ends, seconds = _chain(cut, costs, mb)
        work += seconds * len(range(mb, microbatches, period))
        longest = max([longest, *ends.values()])
        for name, stages in cut.groups.items():
            last = max(ends.get(Op(stage, Kind.W, mb), 0.0) for stage in stages)
            longest = max(longest, last + reductions[name])
    return max(work / cut.ranks, longest)


def _chain(cut: Cut, costs: Costs, mb: int) -> tuple[dict[Op, float], float]:
    """When each op of one microbatch could end if nothing else ran, and the seconds of all."""
    ends: dict[Op, float] = {}
    work = []
    for op in _in_order(cut, mb):
        reads = [value for value in inputs(op, cut) if value in ends]
        there = [ends[value] + _transfer(cut, costs, value, op) for value in reads]
        work.append(costs.compute(op))
        ends[op] = max(there, default=0.0) + work[-1]
    return ends, math.fsum(work)


def _in_order(cut: Cut, mb: int) -> Iterator[Op]:
    """The ops of one microbatch, each after all that it reads."""
    yield from (Op(stage.name, Kind.F, mb) for stage in cut.stages)
    for stage in reversed(cut.stages):
        yield from (Op(stage.name, kind, mb) for kind in (Kind.B, Kind.W) if kind in stage.kinds)


def _transfer(cut: Cut, costs: Costs, value: Op, reader: Op) -> float:
    """Seconds from rank to rank; none where an owner may be the rank at the other end."""
    homes = {cut.stage[value.stage].rank, cut.stage[reader.stage].rank}
    return costs.transfer(value) if len(homes - {None}) > 1 else 0.0
