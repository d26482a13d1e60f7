"""What a sketch's ops take: from seconds and bytes of regions to those of a cut's stages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fxpipe.costs import Amount, Costs
from fxpipe.cut import Cut, Kind, Stage
from fxpipe.errors import OptionError
from fxpipe.sketch import Sketch, share


@dataclass(frozen=True)
class Rates:
    """What is known of regions beside their seconds.

    scale: factors of a region's seconds, one per microbatch, used again from the start where there
    are fewer. sent: bytes that a forward of the region sends, and that come back as its gradient.
    kept: bytes between F and the backward of one microbatch, shared by the region's stages as its
    seconds are. latency: seconds; bandwidth: bytes per second.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    scale: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sent: Mapping[str, float] = field(default_factory=dict)
    kept: Mapping[str, float] = field(default_factory=dict)


def rate(cut: Cut, sketches: Sequence[Sketch], rates: Rates, microbatches: int) -> Costs:
    """The costs of a cut's stages, which may also come from elsewhere. Raises OptionError."""
    of = {x.name: x for x in sketches}
    lacking = [region for region in cut.region if region not in of]
    if lacking:
        raise OptionError(f"the cut has a region {lacking[0]}; say what it takes with --region")
    seconds: dict[tuple[str, Kind], Amount] = {}
    for stage in cut.stages:
        for kind in stage.kinds:
            once = _seconds(of[stage.region], stage, kind) * _share(cut, of, stage)
            factors = rates.scale.get(stage.region)
            seconds[stage.name, kind] = (
                once if factors is None else _each(stage.region, once, factors, microbatches)
            )
    return Costs(
        seconds,
        latency=rates.latency,
        bandwidth=rates.bandwidth,
        bytes=_sent(cut, rates),
        kept=_kept(cut, of, rates),
    )


def _seconds(region: Sketch, stage: Stage, kind: Kind) -> float:
    """Seconds of the whole region; a backward that is one op has those of B and W."""
    if kind is Kind.F:
        return region.forward
    if Kind.B not in stage.kinds or Kind.W not in stage.kinds:
        return sum(region.backward)
    if len(region.backward) < 2:
        raise OptionError(f"stage {stage.name} has B and W; give --region {region.name} both")
    return region.backward[kind is Kind.W]


def _share(cut: Cut, of: Mapping[str, Sketch], stage: Stage) -> float:
    stages = sum(other.region == stage.region for other in cut.stages)
    return share(of[stage.region], cut.ranks, stages)


def _each(
    region: str, once: float, factors: tuple[float, ...], microbatches: int
) -> tuple[float, ...]:
    if len(factors) > microbatches:
        raise OptionError(
            f"--scale {region} has {len(factors)} factors for {microbatches} microbatches; "
            "give one for each at most"
        )
    return tuple(once * factor for factor in factors)


def _sent(cut: Cut, rates: Rates) -> dict[tuple[str, Kind], float]:
    """A forward sends its region's bytes; a B returns those of the starred seams into it."""
    sent = {
        (stage.name, Kind.F): rates.sent[stage.region]
        for stage in cut.stages
        if stage.region in rates.sent and cut.seams_from[stage.name]
    }
    for stage in cut.stages:
        back = [cut.stage[s.source].region for s in cut.seams_into[stage.name] if s.grads]
        if returned := sum(rates.sent.get(region, 0.0) for region in back):
            sent[stage.name, Kind.B] = returned
    return sent


def _kept(cut: Cut, of: Mapping[str, Sketch], rates: Rates) -> dict[tuple[str, Kind], float]:
    """What F keeps stays until the end of the backward: W reads what B has read."""
    kept = {}
    for stage in cut.stages:
        if stage.region in rates.kept and len(stage.kinds) > 1:
            held = rates.kept[stage.region] * _share(cut, of, stage)
            for kind in stage.kinds[:-1]:
                kept[stage.name, kind] = held
    return kept
