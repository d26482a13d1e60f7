"""The systems that are compared: what each lays out and orders, on one workload, simulated.

Those of the papers run the backward of a backbone stage as one op, as they were published; ours
split it into B and W.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.workloads import Workload
from fxpipe.forecast import Ask, Forecast, forecast

BASELINES = ("stage", "inside", "upfront")
PAPERS = ("transpose, round robin", "nested, as published", "nested/interleaved, as published")


@dataclass(frozen=True)
class System:
    """split: whether the backbone's backward is B and W. about: what it stands for."""

    name: str
    schedule: str
    about: str
    split: bool = False
    owners: str | tuple[int, ...] | None = None
    recompute: tuple[str, ...] = ()
    units: int | None = None  # of the encoder, and of the generator, on a rank


SYSTEMS = (
    System("stage", "stage/1f1b", "encoder and generator on ranks of their own (Megatron)"),
    System("inside", "ends/1f1b", "the same inside the first and the last stage (Megatron)"),
    System("upfront", "upfront/1f1b", "all encoder forwards first (Optimus-like)"),
    System("transpose, round robin", "transpose/1f1b", "Mpipe", owners="round_robin"),
    System("transpose, slack", "transpose/1f1b", "Mpipe, owners by slack"),
    System(PAPERS[1], "nested/1f1b", "BigMac", owners="round_robin", units=3),
    System(PAPERS[2], "nested/interleaved", "BigMac, interleaved", owners="round_robin", units=3),
    System("nested/1f1b", "nested/1f1b", "BigMac, owners and units searched for"),
    System("nested/interleaved", "nested/interleaved", "the same, interleaved"),
    System("nested/1f1b, split", "nested/1f1b", "BigMac with B and W apart", split=True),
    System("nested/zb-h1", "nested/zb-h1", "ours", split=True),
    System("nested/zb-v", "nested/zb-v", "ours", split=True),
    System("auto", "auto", "ours", split=True),
)
BY_NAME = {system.name: system for system in SYSTEMS}


@dataclass(frozen=True)
class Row:
    """A system on a workload. seconds: of the step; memory: by region, the most bytes that its
    activations take on a rank; mfu: the fraction of the chips' flops that are the model's."""

    system: System
    workload: Workload
    found: Forecast

    @property
    def seconds(self) -> float:
        """Of a simulated step."""
        return self.found.timeline.makespan

    @property
    def bound(self) -> float:
        """Seconds that no schedule can beat: all work, evenly over the ranks, or a longest chain.
        Of the cut of nested tables, whatever this one's is."""
        return self.found.figures.lower_bound

    @property
    def bubble(self) -> float:
        """The mean over the ranks."""
        bubbles = self.found.figures.bubble
        return sum(bubbles) / len(bubbles)

    @property
    def memory(self) -> Mapping[str, float]:
        """The most bytes of each region on any rank."""
        timeline = self.found.timeline
        return {
            region: max(timeline.peak_bytes(rank, (region,)) for rank in range(timeline.cut.ranks))
            for region in timeline.cut.region
        }

    def mfu(self, seconds: float) -> float:
        """Of a step that takes so many seconds."""
        work = self.workload
        return work.flops * work.microbatches / (seconds * work.ranks * work.chip.flops)


def simulated(
    workload: Workload, system: System, *, effort: float, factors: Sequence[float] = ()
) -> Row:
    """A system's step. factors: of the encoder's seconds, by microbatch; then the microbatches run
    as they are, or the cheap ones first, whichever is quicker."""
    orders = [tuple(factors), tuple(sorted(factors))] if factors else [()]
    rows = (_simulated(workload, system, order, effort) for order in orders)
    return min(rows, key=lambda row: row.seconds)


def _simulated(
    workload: Workload, system: System, factors: tuple[float, ...], effort: float
) -> Row:
    ask = Ask(
        workload.sketches(split=system.split),
        workload.ranks,
        workload.microbatches,
        system.schedule,
        rates=workload.rates(factors),
        owners=system.owners,
        live={} if system.units is None else {"modality": system.units},
        recompute=system.recompute,
        effort=effort,
    )
    found = forecast(ask)
    count = sum(len(stage.kinds) for stage in found.table.cut.stages)
    if len(found.table.place) != workload.microbatches * count:
        raise AssertionError(f"{system.name} on {workload.name} does not run every op")
    return Row(system, workload, found)


def with_microbatches(workload: Workload, microbatches: int) -> Workload:
    """The same with more or fewer microbatches."""
    return replace(workload, microbatches=microbatches)
