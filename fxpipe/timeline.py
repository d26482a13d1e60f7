"""The timeline: what ran when on which rank. One record for a simulated and for a measured step.

Compute spans bear the op (`llm0.F3`); a transfer's span bears the send (`llm0.F3>1`), stands at the
sending rank, and runs from the start of the send until the receive is complete. Times are seconds
of one clock for all ranks; only differences mean anything.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from fxpipe.cut import Cut, Kind
from fxpipe.table import Op

_BACKWARD = (Kind.B, Kind.W)


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


@dataclass(frozen=True)
class Timeline:
    """Spans, and the counted peaks where the step was a real one."""

    cut: Cut
    spans: tuple[Span, ...]
    peaks: tuple[Peak, ...] = ()

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
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max((span.end for span in self.spans), default=0.0) - self.start

    @cached_property
    def _busy(self) -> dict[int, float]:
        busy: dict[int, float] = defaultdict(float)
        for span in self.compute:
            busy[span.rank] += span.seconds
        return busy

    def busy(self, rank: int) -> float:
        """Seconds that a rank spends in compute ops."""
        return self._busy.get(rank, 0.0)

    def bubble(self, rank: int) -> float:
        """The fraction of the makespan in which a rank computes nothing."""
        return 1 - self.busy(rank) / self.makespan if self.makespan else 0.0

    @cached_property
    def lifetimes(self) -> tuple[Span, ...]:
        """One span per stage and microbatch, named by its F: from its start to the end of the last
        backward op, while activations are kept. A stage without backward keeps none."""
        starts = {span.op: span for span in self.compute if span.op.kind is Kind.F}
        ends: dict[Op, float] = {}
        for span in self.compute:
            if span.op.kind in _BACKWARD:
                forward = span.op._replace(kind=Kind.F)
                ends[forward] = max(span.end, ends.get(forward, span.end))
        return tuple(starts[op]._replace(end=end) for op, end in ends.items() if op in starts)

    def live(self, names: Iterable[str], rank: int | None = None) -> tuple[tuple[float, int], ...]:
        """(seconds, units) at each change of how many units of these stages or regions are live,
        on one rank or on all together."""
        changes: dict[float, int] = defaultdict(int)
        for span in self._lifetimes_of(names):
            if rank is None or rank == span.rank:
                changes[span.start] += 1
                changes[span.end] -= 1
        times = sorted(changes)
        return tuple(zip(times, accumulate(changes[time] for time in times), strict=True))

    def peak(self, names: Iterable[str], rank: int | None = None) -> int:
        """The most units of these stages or regions that are live at once."""
        return max((units for _, units in self.live(names, rank)), default=0)

    def _lifetimes_of(self, names: Iterable[str]) -> Iterator[Span]:
        wanted = set(names)
        for span in self.lifetimes:
            if span.op.stage in wanted or self.cut.stage[span.op.stage].region in wanted:
                yield span
