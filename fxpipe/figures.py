"""The figures of a schedule: what a person asks of a table and its timeline."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fxpipe.costs import Costs
from fxpipe.cut import Cut, Kind, Role
from fxpipe.simulate import simulate
from fxpipe.table import Op, Table, inputs
from fxpipe.timeline import Timeline


@dataclass(frozen=True)
class Figures:
    """Seconds, fractions and counts; lists have one entry per rank, owners one per microbatch.

    bubble: the fraction of the step in which a rank computes nothing. peak_live: the most units of
    a region that are live at once. owners: of replicated regions. encoder: forward seconds of the
    encoders' microbatches that the rank owns (E); slack: its idle seconds before the first backbone
    forward where the base runs alone (w); spill = max(0, E - w) (Mpipe, section 4.3).
    """

    makespan: float
    lower_bound: float
    bubble: tuple[float, ...]
    peak_live: Mapping[str, tuple[int, ...]]
    owners: Mapping[str, tuple[int, ...]]
    encoder: tuple[float, ...]
    slack: tuple[float, ...]

    @property
    def spill(self) -> tuple[float, ...]:
        """Encoder seconds of each rank that its slack at the head cannot hide."""
        return tuple(max(0.0, e - w) for e, w in zip(self.encoder, self.slack, strict=True))


def figures(table: Table, costs: Costs, timeline: Timeline) -> Figures:
    """The figures of a table that took `timeline`."""
    cut = table.cut
    return Figures(
        makespan=timeline.makespan,
        lower_bound=lower_bound(cut, costs, table.microbatches),
        bubble=tuple(map(timeline.bubble, range(cut.ranks))),
        peak_live=_peaks(timeline),
        owners=owners(table),
        encoder=_encoder_seconds(table, costs),
        slack=_slack(table, costs),
    )


def owners(table: Table) -> dict[str, tuple[int, ...]]:
    """The rank of each microbatch, for each replicated region."""
    first = {stage.region: stage.name for stage in reversed(table.cut.stages) if stage.rank is None}
    return {
        region: tuple(
            table.place[Op(first[region], Kind.F, mb)] for mb in range(table.microbatches)
        )
        for region in table.cut.region
        if region in first
    }


def _peaks(timeline: Timeline) -> dict[str, tuple[int, ...]]:
    """The most live units by region and rank."""
    ranks, region = range(timeline.cut.ranks), {s.name: s.region for s in timeline.cut.stages}
    changes: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for span in timeline.lifetimes:
        changes[region[span.op.stage], span.rank] += [(span.start, 1), (span.end, -1)]
    peaks = {}
    for key, steps in changes.items():
        live = peaks[key] = 0
        for _, step in sorted(steps):
            live += step
            peaks[key] = max(peaks[key], live)
    return {
        name: tuple(peaks.get((name, rank), 0) for rank in ranks) for name in timeline.cut.region
    }


def lower_bound(cut: Cut, costs: Costs, microbatches: int) -> float:
    """What no schedule can beat: the work of one rank if all had the same, and the longest chain of
    one microbatch."""
    names = [(stage.name, kind) for stage in cut.stages for kind in stage.kinds]
    work, longest = 0.0, 0.0
    for mb in range(microbatches):
        ends: dict[Op, float] = {}
        for name, kind in names:
            work += costs.compute(Op(name, kind, mb))
            longest = max(longest, _end(Op(name, kind, mb), cut, costs, ends))
    return max(work / cut.ranks, longest)


def _end(op: Op, cut: Cut, costs: Costs, ends: dict[Op, float]) -> float:
    if op not in ends:
        start = max((_end(value, cut, costs, ends) for value in inputs(op, cut)), default=0.0)
        ends[op] = start + costs.compute(op)
    return ends[op]


def _encoder_seconds(table: Table, costs: Costs) -> tuple[float, ...]:
    encoders = {s.name for s in table.cut.of(Role.ENCODER) if s.rank is None}
    seconds = [0.0] * table.cut.ranks
    for op, rank in table.place.items():
        if op.kind is Kind.F and op.stage in encoders:
            seconds[rank] += costs.compute(op)
    return tuple(seconds)


def _slack(table: Table, costs: Costs) -> tuple[float, ...]:
    """Idle seconds before each rank's first backbone forward, where the base runs alone."""
    base = _base(table)
    backbone = {stage.name for stage in base.cut.of(Role.BACKBONE)}
    first: dict[int, float] = {}
    busy: dict[int, float] = defaultdict(float)
    for span in sorted(simulate(base, costs).compute, key=lambda span: span.start):
        if span.op.stage in backbone:
            first.setdefault(span.rank, span.start)
        elif span.rank not in first:
            busy[span.rank] += span.seconds
    return tuple(first.get(rank, 0.0) - busy[rank] for rank in range(base.cut.ranks))


def _base(table: Table) -> Table:
    """The rows of the sharded stages alone, as a table of a cut that has no others."""
    cut = table.cut
    stages = tuple(stage for stage in cut.stages if stage.rank is not None)
    names = {stage.name for stage in stages}
    seams = tuple(s for s in cut.seams if {s.source, s.target} <= names)
    regions = tuple(r for r in cut.regions if r.name in {stage.region for stage in stages})
    alone = replace(cut, regions=regions, stages=stages, seams=seams, shared=())
    return Table(alone, table.only(region.name for region in regions))
