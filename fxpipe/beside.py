"""A measured step of a table beside the one that its costs predict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fxpipe.costmodel import Hiding, measured, predicted
from fxpipe.costs import Costs
from fxpipe.simulate import simulate
from fxpipe.summary import columns
from fxpipe.table import Table
from fxpipe.timeline import Timeline


@dataclass(frozen=True)
class Seen:
    """What is compared of a timeline: seconds of the step; E, w, spill and bubble of each rank; by
    region the most bytes, or where they are unknown units, on each rank."""

    seconds: float
    hiding: Hiding
    peak: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Beside:
    """Steps of one table: simulated, and the measured one in the middle; seconds of all."""

    simulated: Seen
    measured: Seen
    seconds: tuple[float, ...]
    bytes: bool

    @property
    def excess(self) -> float:
        """By which fraction the measured step is longer than the simulated one."""
        simulated = self.simulated.seconds
        return self.measured.seconds / simulated - 1 if simulated else 0.0

    def text(self) -> str:
        """What a person reads."""
        one, other = self.simulated, self.measured
        steps = ", ".join(f"{seconds:.6g}" for seconds in self.seconds)
        regions = [name for name, peaks in one.peak.items() if any(peaks)]
        what = "bytes" if self.bytes else "units"
        heads = ["", *(f"{name} {what}{x}" for name in regions for x in ("", " measured"))]
        rows = [
            [
                f"rank {rank}",
                *(f"{seen.peak[r][rank]:.4g}" for r in regions for seen in (one, other)),
            ]
            for rank in range(len(one.hiding.work))
        ]
        head = (
            f"step: simulated {one.seconds:.6g} s, measured {other.seconds:.6g} s "
            f"({self.excess:+.1%}); every step: {steps}"
        )
        return "\n".join(
            [head, "", one.hiding.beside(other.hiding), "", *columns(heads, rows, left=1)]
        )

    def record(self) -> dict[str, object]:
        """The same as numbers, for JSON."""
        found: dict[str, object] = {"steps": list(self.seconds), "excess": self.excess}
        for name, seen in (("simulated", self.simulated), ("measured", self.measured)):
            hiding = seen.hiding
            found[name] = {
                "seconds": seen.seconds,
                "bubble": hiding.bubble,
                "E": hiding.work,
                "w": hiding.slack,
                "spill": hiding.spill,
                "peak_bytes" if self.bytes else "peak_units": dict(seen.peak),
            }
        return found


def beside(table: Table, costs: Costs, timelines: Sequence[Timeline]) -> Beside:
    """Measured steps of a table beside its simulation."""
    middle = sorted(timelines, key=lambda timeline: timeline.makespan)[len(timelines) // 2]
    known = bool(costs.kept or costs.resident)
    return Beside(
        _seen(predicted(table, costs), simulate(table, costs), known),
        _seen(measured(table, middle, costs), replace(middle, costs=costs), known),
        tuple(timeline.makespan for timeline in timelines),
        known,
    )


def _seen(hiding: Hiding, timeline: Timeline, known: bool) -> Seen:
    ranks = range(timeline.cut.ranks)
    peak = {
        name: tuple(
            timeline.peak_bytes(rank, (name,)) if known else float(timeline.peak((name,), rank))
            for rank in ranks
        )
        for name in timeline.cut.region
    }
    return Seen(timeline.makespan, hiding, peak)
