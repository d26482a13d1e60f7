"""The time-memory front: what schedules take and hold, as predicted, and which are best at it."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fxpipe.costs import Costs
from fxpipe.cut import Cut, Role
from fxpipe.simulate import simulate
from fxpipe.table import Table

_SAME = 1 + 1e-9  # so far apart, seconds are those of sums in another order


class Point(NamedTuple):
    """What one schedule takes.

    owners: the map that it uses, `free` where units go where there is room; window: the units that
    a nested placement may hold. seconds; bytes: the most on a rank, 0 if unknown; units: the most
    of each region on a rank, those of a pipeline in microbatches of the rank's whole share.
    fits: it keeps to what was asked; best: no other point is better in one of these and as good in
    the rest (units count where bytes are unknown); chosen: it is the planner's choice.
    """

    schedule: str
    owners: str
    window: int | None
    recompute: tuple[str, ...]
    chunks: int
    seconds: float
    bytes: float
    units: dict[str, int]
    fits: bool = True
    best: bool = False
    chosen: bool = False

    @property
    def name(self) -> str:
        """The schedule with what else it needs: `nested/1f1b (window 2, recompute vision)`."""
        more = [f"window {self.window}"] if self.window else []
        more += [f"owners {self.owners}"] if self.owners not in ("", "free") else []
        more += [f"recompute {', '.join(self.recompute)}"] if self.recompute else []
        more += [f"{self.chunks} chunks"] if self.chunks > 1 else []
        return f"{self.schedule} ({'; '.join(more)})" if more else self.schedule

    @property
    def rank(self) -> tuple[float, float, int]:
        """Less is better: seconds, to nine digits, then bytes, then units."""
        return float(f"{self.seconds:.9g}"), self.bytes, sum(self.units.values())


def takes(table: Table, costs: Costs) -> tuple[float, float, dict[str, int]]:
    """Seconds, bytes and units of a table: see `Point`."""
    timeline = simulate(table, costs)
    known = costs.kept or costs.resident
    held = max(map(timeline.peak_bytes, range(table.cut.ranks))) if known else 0.0
    share = shares(table.cut)
    units = {live.region: math.ceil(max(live.units) / share[live.region]) for live in table.live}
    return timeline.makespan, held, units


def shares(cut: Cut) -> dict[str, int]:
    """The most stages of each region on one rank."""
    counts = Counter((stage.region, stage.rank) for stage in cut.stages)
    found: dict[str, int] = {}
    for (region, _), count in counts.items():
        found[region] = max(count, found.get(region, 0))
    return found


def keeps_to(
    units: Mapping[str, int], held: float, cut: Cut, live: Mapping[str, int], memory: float
) -> bool:
    """Whether units and bytes are within limits: "modality" of encoders and generators that are one
    stage, "llm" of all that is a pipeline."""
    stages = Counter(stage.region for stage in cut.stages)
    for region in cut.regions:
        single = region.role is not Role.BACKBONE and stages[region.name] == 1
        if units.get(region.name, 0) > live.get("modality" if single else "llm", math.inf):
            return False
    return held <= memory * _SAME


def with_best(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points, each with whether it is among the best, quickest first. Of points that differ in
    their window alone, the first one stands for all."""
    alike: dict[str, Point] = {}
    for point in sorted(points, key=lambda point: not point.chosen):
        alike.setdefault(repr(point._replace(window=0, chosen=False)), point)
    points = [point for point in points if point in alike.values()]
    pairs = zip(points, beaten(points), strict=True)
    return tuple(
        sorted((point._replace(best=not worse) for point, worse in pairs), key=lambda x: x.rank)
    )


def beaten(points: Sequence[Point]) -> list[bool]:
    """Whether another point is as good in all that counts, and better in some of it."""
    known = any(point.bytes for point in points)
    goods = [(x.seconds, x.bytes) if known else (x.seconds, *x.units.values()) for x in points]
    return [any(_beats(one, other) for one in goods) for other in goods]


def shown(points: Sequence[Point], most: int) -> list[Point]:
    """The points to show: the chosen one, the quickest of each placement, the best, and the
    quickest of the rest."""
    quickest = {point.schedule.partition("/")[0]: point for point in reversed(points)}
    wanted = [point for point in points if point.chosen]
    wanted += [*quickest.values(), *(point for point in points if point.best), *points]
    kept = list({id(point): point for point in wanted}.values())[:most]
    return sorted(kept, key=lambda point: point.rank)


def nothing_fits(points: Iterable[Point], live: Mapping[str, int], memory: float) -> str:
    """Why there is no choice, and what would have to be allowed."""
    return "; ".join(_reasons(list(points), live, memory))


def _reasons(points: list[Point], live: Mapping[str, int], memory: float) -> Iterator[str]:
    asked = [f"{units} units of {name}" for name, units in live.items()]
    asked += [f"{memory:.6g} bytes" for _ in range(memory < math.inf)]
    yield f"no schedule keeps to {' and '.join(asked)} on each rank"
    if not points:
        yield "allow more"
        return
    least = min(points, key=lambda point: (point.bytes, sum(point.units.values()), point.rank))
    held = [f"{units} of {region}" for region, units in least.units.items()]
    held += [f"{least.bytes:.6g} bytes" for _ in range(least.bytes > 0)]
    yield f"of all that were tried {least.name} holds least: {', '.join(held)}"
    yield "allow as much, or take more ranks, smaller microbatches, or recompute="


def _beats(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    no_worse = all(a <= b * _SAME for a, b in zip(ours, theirs, strict=True))
    return no_worse and any(a * _SAME < b for a, b in zip(ours, theirs, strict=True))
