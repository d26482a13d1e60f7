"""What ops and transfers take, in seconds and bytes: the numbers that a simulation runs on."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fxpipe.cut import Cut, Kind
from fxpipe.table import Op


@dataclass(frozen=True)
class Costs:
    """Seconds per (stage, kind), and a transfer's latency (seconds), bandwidth (bytes per second)
    and size: `bytes` of (stage, kind) is what one F or B sends to one rank. What is not listed
    takes no time: R, unless it is named with its group, as in ("llm0+llm3", Kind.R)."""

    seconds: Mapping[tuple[str, Kind], float]
    latency: float = 0.0
    bandwidth: float = math.inf
    bytes: Mapping[tuple[str, Kind], float] = field(default_factory=dict)

    def compute(self, op: Op) -> float:
        """Seconds of a compute op."""
        return self.seconds.get((op.stage, op.kind), 0.0)

    def transfer(self, value: Op) -> float:
        """Seconds from the later of send and post until the value is received."""
        return self.latency + self.bytes.get((value.stage, value.kind), 0.0) / self.bandwidth

    @staticmethod
    def uniform(cut: Cut, forward: Mapping[str, float] | None = None) -> "Costs":
        """F = B = W = 1 second for every stage, or `forward[stage]` seconds; W = 2 F without B."""
        return Costs(_seconds(cut, dict.fromkeys(cut.stage, 1.0) | dict(forward or {})))

    @staticmethod
    def from_flops(cut: Cut, flops_per_second: float) -> "Costs":
        """F = B = W in proportion to each stage's cost; W = 2 F without B."""
        return Costs(_seconds(cut, {s.name: s.cost / flops_per_second for s in cut.stages}))


def _seconds(cut: Cut, forward: Mapping[str, float]) -> dict[tuple[str, Kind], float]:
    """Where nothing needs the input gradients, one W does the whole of the backward."""
    return {
        (stage.name, kind): forward[stage.name] * _share(kind, stage.kinds)
        for stage in cut.stages
        for kind in stage.kinds
    }


def _share(kind: Kind, kinds: tuple[Kind, ...]) -> int:
    return 2 if kind is Kind.W and Kind.B not in kinds else 1
