"""What a planner may choose: placement, base, chunks, owners and window, usual first; recompute.

A window is how many units of each encoder and generator a rank may hold. Where there are too many
choices to look at all of them, those that differ least from the usual ones are looked at.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fxpipe.costs import Costs
from fxpipe.cut import Cut, Kind, Region, Role
from fxpipe.owners import Given, of_region, owners_of
from fxpipe.schedule import AUTO
from fxpipe.skeletons import PATTERNS

# How far a choice is from the usual one: the sum over its parts.
_PLACEMENTS = {"nested": 0, "transpose": 1, "upfront": 1, "stage": 1, "ends": 1}
_USUAL = (AUTO, "zb-h1", "1f1b", "interleaved-zb", "interleaved", "zb-v")
_RARE = 2  # what another base counts, and one that would split what the cut does not
_WINDOWS = {4: 0, 3: 1, 2: 1, 1: 2}  # a wider one is faster, more so on more ranks
_OWNERS = {"transpose": ("slack", "balanced"), "upfront": ("round_robin",)}  # else they are equal
_NEXT = 2  # what each further owner map counts, and each further number of chunks


class Choice(NamedTuple):
    """owners: a map or ranks, None where there are none or the search finds them; window: units of
    a nested placement; recompute: regions, beside those that do so in any case."""

    placement: str
    base: str
    chunks: int
    owners: Given
    window: int | None
    recompute: tuple[str, ...] = ()

    @property
    def schedule(self) -> str:
        """Its name."""
        return f"{self.placement}/{self.base}"

    @property
    def plainness(self) -> tuple[int, ...]:
        """Less is plainer: what decides between choices that are equal in all else."""
        bases = (*PATTERNS, AUTO)
        return (
            len(self.recompute),
            self.chunks,
            list(_PLACEMENTS).index(self.placement),
            bases.index(self.base),
            self.window or 0,
        )


@dataclass(frozen=True)
class Space:
    """What there is to choose from. owners, window: None where they are not given."""

    chunks: Sequence[int]
    owners: Given
    window: int | None


@dataclass(frozen=True)
class Option:
    """A cut, as a schedule wants it laid out, and what its ops cost."""

    cut: Cut
    costs: Costs

    def recomputing(self, names: Sequence[str]) -> "Option":
        """With more regions that recompute; for costs of a model that keeps everything."""
        if not names:
            return self

        def cut(recompute: Callable[[Region], bool]) -> Cut:
            regions = [replace(region, recompute=recompute(region)) for region in self.cut.regions]
            return replace(self.cut, regions=tuple(regions))

        costs = self.costs.recomputed(cut(lambda region: region.name in names))
        return Option(cut(lambda region: region.recompute or region.name in names), costs)

    def room(self, memory: float) -> float:
        """Bytes that are left on the fullest rank for what ops keep; 0 if one op finds no room."""
        resident = [0.0] * self.cut.ranks
        for stage in self.cut.stages:
            for rank in self.cut.ranks_of((stage.name,)):
                resident[rank] += self.costs.resident.get(stage.name, 0.0)
        kept = self.costs.kept.values()
        sizes = (size if isinstance(size, Sequence) else (size,) for size in kept)
        room = memory - max(resident)
        return room if room >= max(map(max, sizes), default=0.0) else 0.0


def choices(cut: Cut, space: Space) -> list[Choice]:
    """All choices for the regions of a cut, the usual ones first."""
    around = any(region.role is not Role.BACKBONE for region in cut.regions)
    splits = any({Kind.B, Kind.W} <= {*stage.kinds} for stage in cut.of(Role.BACKBONE))
    found = [
        (sum(far), Choice(placement, base, chunks, owners, window))
        for placement in (_PLACEMENTS if around else ("nested",))
        for window, narrow in _windows(placement, space, around=around)
        for owners, other in _owners(placement, space)
        for base, chunks, rare in _bases(placement, space, splits=splits)
        for far in ((_PLACEMENTS[placement], narrow, other, rare),)
    ]
    return [choice for _, choice in sorted(found, key=lambda pair: pair[0])]


def check_owners(given: Given, cut: Cut, microbatches: int) -> None:
    """Raises ScheduleError where owners are given that cannot be."""
    for stage in cut.stages:
        rule = of_region(given, stage.region)
        if stage.rank is None and rule is not None:
            owners_of(rule, [0.0] * microbatches, [0.0] * cut.ranks)


def again(cut: Cut) -> tuple[tuple[str, ...], ...]:
    """The regions that could recompute: none, those around the backbone, it, and all of them."""
    able = {stage.region for stage in cut.stages if len(stage.kinds) > 1}
    names = [region for region in cut.regions if region.name in able and not region.recompute]
    around = tuple(region.name for region in names if region.role is not Role.BACKBONE)
    backbone = tuple(region.name for region in names if region.role is Role.BACKBONE)
    return tuple(dict.fromkeys([(), around, backbone, (*around, *backbone)]))


def _windows(placement: str, space: Space, *, around: bool) -> list[tuple[int | None, int]]:
    if placement != "nested":
        return [(None, 0)]
    if space.window is not None:
        return [(space.window, 0)]
    return list(_WINDOWS.items()) if around else [(1, 0)]


def _owners(placement: str, space: Space) -> list[tuple[Given, int]]:
    if placement in ("stage", "ends"):
        return [(None, 0)]
    if space.owners is not None or placement == "nested":
        return [(space.owners, 0)]
    return [(rule, _NEXT * at) for at, rule in enumerate(_OWNERS[placement])]


def _bases(placement: str, space: Space, *, splits: bool) -> Iterator[tuple[str, int, int]]:
    """Bases that stages can be laid out for, with the number of them on a rank."""
    names = list(dict.fromkeys((*_USUAL, *PATTERNS)))
    names = names if placement == "nested" else names[1:]
    for at, chunks in enumerate(space.chunks):
        for name in names:
            known = PATTERNS.get(name)
            if known is None or known.chunks == chunks or (known.chunks is None and chunks > 1):
                rare = name not in _USUAL or (known is not None and known.splits and not splits)
                yield name, chunks, _NEXT * at + _RARE * rare
