"""What a planner may choose: placement, base, chunks, owners, window and recompute, usual first.

A window is how many units of each encoder and generator a rank may hold. Where there are too many
choices to look at all of them, those that differ least from the usual ones are looked at.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxpipe.cut import Cut, Role
from fxpipe.owners import Given
from fxpipe.schedule import AUTO
from fxpipe.skeletons import PATTERNS

# How far a choice is from the usual one: the sum over its parts.
_PLACEMENTS = {"nested": 0, "transpose": 1, "upfront": 1, "stage": 1, "ends": 2}
_USUAL = ("1f1b", "zb-h1", AUTO, "interleaved", "interleaved-zb", "zb-v")
_OTHER_BASE = 2
_WINDOWS = {2: 0, 3: 1, 4: 2, 1: 2}
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
    recompute: tuple[str, ...]

    @property
    def schedule(self) -> str:
        """Its name."""
        return f"{self.placement}/{self.base}"


@dataclass(frozen=True)
class Space:
    """What there is to choose from. owners, window: None where they are not given."""

    chunks: Sequence[int]
    owners: Given
    window: int | None
    recompute: Sequence[tuple[str, ...]]


def choices(cut: Cut, space: Space) -> list[Choice]:
    """All choices for the regions of a cut, the usual ones first."""
    around = any(region.role is not Role.BACKBONE for region in cut.regions)
    found = [
        (sum(far), Choice(placement, base, chunks, owners, window, recompute))
        for more, recompute in enumerate(space.recompute)
        for placement in (_PLACEMENTS if around else ("nested",))
        for window, narrow in _windows(placement, space, around=around)
        for owners, other in _owners(placement, space)
        for base, chunks, rare in _bases(placement, space)
        for far in ((_PLACEMENTS[placement], more, narrow, other, rare),)
    ]
    return [choice for _, choice in sorted(found, key=lambda pair: pair[0])]


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


def _bases(placement: str, space: Space) -> Iterator[tuple[str, int, int]]:
    """Bases that stages can be laid out for, with the number of them on a rank."""
    for at, chunks in enumerate(space.chunks):
        names = [
            name
            for name, base in PATTERNS.items()
            if base.chunks == chunks or (base.chunks is None and chunks > 1)
        ]
        for name in (*names, AUTO) if placement == "nested" else names:
            yield name, chunks, _NEXT * at + _OTHER_BASE * (name not in _USUAL)
