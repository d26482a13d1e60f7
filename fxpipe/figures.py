"""The figures of a schedule: what a person asks of a table and its timeline."""

from collections.abc import Mapping
from dataclasses import dataclass

from fxpipe.costmodel import encoder_work, lower_bound, spill, warmup_slack
from fxpipe.costs import Costs
from fxpipe.cut import Kind
from fxpipe.table import Op, Table
from fxpipe.timeline import Timeline


@dataclass(frozen=True)
class Figures:
    """Seconds, fractions and counts; lists have one entry per rank, owners one per microbatch.

    bubble: the fraction of the step in which a rank computes nothing. peak_live: the most units of
    a region that are live at once. peak_bytes: the most that is kept at once, if that is known.
    owners: of replicated regions. encoder: forward seconds of the encoders' microbatches that the
    rank owns (E); slack: its idle seconds before its first backbone forward where the base runs
    alone (w); spill = max(0, E - w) (Mpipe, section 4.3).
    """

    makespan: float
    lower_bound: float
    bubble: tuple[float, ...]
    peak_live: Mapping[str, tuple[int, ...]]
    peak_bytes: tuple[float, ...]
    owners: Mapping[str, tuple[int, ...]]
    encoder: tuple[float, ...]
    slack: tuple[float, ...]

    @property
    def spill(self) -> tuple[float, ...]:
        """Encoder seconds of each rank that its slack at the head cannot hide."""
        return spill(self.encoder, self.slack)


def figures(table: Table, costs: Costs, timeline: Timeline) -> Figures:
    """The figures of a table that took `timeline`."""
    cut, ranks = table.cut, range(table.cut.ranks)
    regions = cut.region
    return Figures(
        makespan=timeline.makespan,
        lower_bound=lower_bound(cut, costs, table.microbatches),
        bubble=tuple(map(timeline.bubble, ranks)),
        peak_live={name: tuple(timeline.peak((name,), rank) for rank in ranks) for name in regions},
        peak_bytes=tuple(map(timeline.peak_bytes, ranks)) if costs.kept else (),
        owners=owners(table),
        encoder=encoder_work(table, costs),
        slack=warmup_slack(table, costs),
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
