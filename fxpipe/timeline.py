"""The timeline: what ran when on which rank. One record for a simulated and for a measured step.

Compute spans bear the op (`llm0.F3`); a transfer's span bears the send (`llm0.F3>1`), stands at the
sending rank, and runs from the start of the send until the receive is complete. Times are seconds
of one clock for all ranks; only differences mean anything.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from fxpipe.costs import Costs, at, first_backward
from fxpipe.cut import Cut, Kind
from fxpipe.errors import FxpipeError
from fxpipe.table import Op

_BACKWARD = (Kind.B, Kind.W)
Memory = tuple[tuple[float, dict[str, float]], ...]


class Span(NamedTuple):
    """One op of one rank, from start to end in seconds."""

    rank: int
    op: Op
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class Peak(NamedTuple):
    """The most that a rank held of one stage, as counted by the runtime.

    units: microbatches between F and last backward op; bytes: of their distinct storages;
    forward_bytes: what one forward keeps for its backward.
    """

    rank: int
    stage: str
    units: int
    bytes: int
    forward_bytes: int = 0


@dataclass(frozen=True, repr=False)
class Timeline:
    """Spans, the counted peaks where the step was a real one, and the costs where they are known.

    A measured timeline has none; `dataclasses.replace(timeline, costs=costs)` gives it some.
    """

    cut: Cut
    spans: tuple[Span, ...]
    peaks: tuple[Peak, ...] = ()
    costs: Costs | None = None

    def __repr__(self) -> str:
        ranks = sorted({span.rank for span in self.spans})
        rows = [f"rank {r}: busy {self.busy(r):.6g} s, bubble {self.bubble(r):.1%}" for r in ranks]
        head = f"timeline of {len(self.compute)} ops in {self.makespan:.6g} s"
        return "\n".join([head, *rows])

    @cached_property
    def compute(self) -> tuple[Span, ...]:
        """Spans of F, B, W and R."""
        return tuple(span for span in self.spans if not span.op.way)

    @cached_property
    def transfers(self) -> tuple[Span, ...]:
        """Spans of sends, each until its receive is complete."""
        return tuple(span for span in self.spans if span.op.way == ">")

    @cached_property
    def start(self) -> float:
        """When the first span starts, in seconds."""
        return min((span.start for span in self.spans), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last span ends, in seconds."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return self.end - self.start

    @cached_property
    def _of_rank(self) -> dict[int, list[Span]]:
        """Compute spans by rank, in the order in which they start."""
        found: dict[int, list[Span]] = defaultdict(list)
        for span in self.compute:
            found[span.rank].append(span)
        for spans in found.values():
            spans.sort(key=lambda span: (span.start, span.end))
        return dict(found)

    def busy(self, rank: int) -> float:
        """Seconds that a rank spends in compute ops."""
        return sum(span.seconds for span in self._of_rank.get(rank, ()))

    def bubble(self, rank: int) -> float:
        """The fraction of the makespan in which a rank computes nothing."""
        return 1 - self.busy(rank) / self.makespan if self.makespan else 0.0

    def idle(self, rank: int) -> tuple[tuple[float, float], ...]:
        """From when to when a rank computes nothing, between the first start and the last end."""
        gaps, free = [], self.start
        for span in self._of_rank.get(rank, ()):
            if span.start > free:
                gaps.append((free, span.start))
            free = max(free, span.end)
        return (*gaps, *[(free, self.end)] * (free < self.end))

    @cached_property
    def lifetimes(self) -> tuple[Span, ...]:
        """One span per stage and microbatch, named by its F: from its start to the end of the last
        backward op, while activations are kept. A stage without backward keeps none, nor does one
        that computes all of them again (`Cut.keeps`)."""
        return tuple(
            unit[0]._replace(end=max(span.end for span in unit[1:]))
            for (stage, _), unit in self._units.items()
            if unit[0].op.kind is Kind.F and len(unit) > 1 and self.cut.keeps(stage)
        )

    @cached_property
    def _units(self) -> dict[tuple[str, int | None], list[Span]]:
        """The spans of each stage and microbatch, in the order in which they start."""
        units: dict[tuple[str, int | None], list[Span]] = defaultdict(list)
        for spans in self._of_rank.values():
            for span in spans:
                if span.op.kind is not Kind.R:
                    units[span.op.stage, span.op.mb].append(span)
        return dict(units)

    @cached_property
    def _lifetimes_by(self) -> dict[tuple[str, int], list[Span]]:
        """Lifetimes by stage and rank."""
        found: dict[tuple[str, int], list[Span]] = defaultdict(list)
        for span in self.lifetimes:
            found[span.op.stage, span.rank].append(span)
        return dict(found)

    def live(self, names: Iterable[str], rank: int | None = None) -> tuple[tuple[float, int], ...]:
        """(seconds, units) at each change of how many units of these stages or regions are live,
        on one rank or on all together."""
        wanted, changes = set(names), defaultdict[float, int](int)
        for (stage, home), spans in self._lifetimes_by.items():
            if rank in (None, home) and wanted & {stage, self.cut.stage[stage].region}:
                for span in spans:
                    changes[span.start] += 1
                    changes[span.end] -= 1
        times = sorted(changes)
        return tuple(zip(times, accumulate(changes[time] for time in times), strict=True))

    def peak(self, names: Iterable[str], rank: int | None = None) -> int:
        """The most units of these stages or regions that are live at once."""
        return max((units for _, units in self.live(names, rank)), default=0)

    def memory(self, rank: int) -> Memory:
        """(seconds, bytes by region) at the start and at each change of what a rank holds.

        What F keeps is held from its start to the end of the first backward op, what B keeps from
        there to the end of W; what is resident always. Raises FxpipeError without costs.
        """
        held = dict.fromkeys(self.cut.region, 0.0)
        for stage in self.cut.stages:
            if stage.rank in (None, rank):
                held[stage.region] += self._known.resident.get(stage.name, 0.0)
        curve = {self.start: dict(held)}
        for time, region, change in sorted(self._changes.get(rank, ())):
            held[region] += change
            curve[time] = dict(held)
        return tuple(curve.items())

    def peak_bytes(self, rank: int, regions: Sequence[str] | None = None) -> float:
        """The most bytes that a rank holds at once, of these regions or of all."""
        wanted = list(self.cut.region) if regions is None else regions
        return max(sum(held[region] for region in wanted) for _, held in self.memory(rank))

    @property
    def _known(self) -> Costs:
        if self.costs is None:
            raise FxpipeError(
                "this timeline knows no bytes; give it costs: dataclasses.replace(timeline, "
                "costs=costs)"
            )
        return self.costs

    @cached_property
    def _changes(self) -> dict[int, list[tuple[float, str, float]]]:
        """By rank: when the bytes of which region change by how much."""
        kept = self._known.kept
        first = {stage.name: first_backward(stage) for stage in self.cut.stages}
        found: dict[int, list[tuple[float, str, float]]] = defaultdict(list)
        for (name, mb), unit in self._units.items():
            if first[name] is None:
                continue
            by_f, by_b = (at(kept.get((name, kind), 0.0), mb) for kind in (Kind.F, Kind.B))
            by_b *= Kind.W in self.cut.stage[name].kinds
            changes = {Kind.F: by_f, Kind.W: -by_b, first[name]: by_b - by_f}
            if first[name] is Kind.W:
                changes[Kind.W] = -by_f
            region = self.cut.stage[name].region
            for span in unit:
                time = span.start if span.op.kind is Kind.F else span.end
                if changes[span.op.kind]:
                    found[span.rank].append((time, region, changes[span.op.kind]))
        return dict(found)
