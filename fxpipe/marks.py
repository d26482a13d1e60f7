"""How the time grid marks an op: a letter without colours, a ramp of one hue with them.

The forward of a region is light, its backward dark. The backbone has the letters of the field, F, B
and W; f, b and w are those of every second stage of a rank. Other regions have letters of their
names, small for the forward and large for the backward.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from fxpipe.cut import Cut, Kind, Role, Stage

Ramp = tuple[str, str, str]  # the light, the middle and the dark shade of a hue

_DARK, _LIGHT = "#111827", "#ffffff"
_RAMPS = {
    Role.BACKBONE: (("#93c5fd", "#2563eb", "#1e3a8a"), ("#a5f3fc", "#0e7490", "#164e63")),
    Role.ENCODER: (
        ("#fcd34d", "#b45309", "#78350f"),
        ("#bef264", "#4d7c0f", "#365314"),
        ("#fda4af", "#be123c", "#881337"),
    ),
    Role.GENERATOR: (("#d8b4fe", "#7e22ce", "#581c87"), ("#f9a8d4", "#be185d", "#831843")),
}
_COMPUTE = (Kind.F, Kind.B, Kind.W)


class Mark(NamedTuple):
    """A letter, and a style of rich; the legend names what it is a kind of."""

    letter: str
    style: str
    what: str
    kind: Kind


REDUCTION = Mark("R", "#ffffff on #4b5563", "gradients", Kind.R)


def marks(cut: Cut) -> dict[tuple[str, Kind], Mark]:
    """The mark of each kind of each stage; stages that look alike share it."""
    letters = _letters(cut)
    turns = _turns(cut)
    ramps = dict(_ramps(cut))
    split = {stage.region for stage in cut.stages if Kind.B in stage.kinds}
    made = {}
    for stage in cut.stages:
        letter, ramp = letters[stage.region], ramps[stage.region]
        if stage.region not in split:  # a backward that is W alone is never the darkest
            ramp = (ramp[0], ramp[1], ramp[1])
        for kind in stage.kinds:
            draw = _odd if turns[stage.name] else _mark
            made[stage.name, kind] = draw(stage, kind, letter, ramp)
    return made


def _mark(stage: Stage, kind: Kind, letters: str, ramp: Ramp) -> Mark:
    at = _COMPUTE.index(kind)
    ink = _DARK if kind is Kind.F else _LIGHT
    return Mark(letters[at], f"{ink} on {ramp[at]}", stage.region, kind)


def _odd(stage: Stage, kind: Kind, letters: str, _: Ramp) -> Mark:
    """The mark of every second stage of the backbone."""
    mark = _mark(stage, kind, letters.lower(), _RAMPS[Role.BACKBONE][1])
    return mark._replace(what=f"{stage.region} (second stages)")


def _turns(cut: Cut) -> dict[str, bool]:
    """Whether a backbone stage is the second, fourth, ... of its rank."""
    seen: Counter[int | None] = Counter()
    turns = {}
    for stage in cut.stages:
        backbone = cut.role(stage.name) is Role.BACKBONE
        turns[stage.name] = backbone and seen[stage.rank] % 2 == 1
        seen[stage.rank] += backbone
    return turns


def _ramps(cut: Cut) -> Iterator[tuple[str, Ramp]]:
    for role in Role:
        regions = [region.name for region in cut.regions if region.role is role]
        for at, name in enumerate(regions):
            yield name, _RAMPS[role][0 if role is Role.BACKBONE else at % len(_RAMPS[role])]


def _letters(cut: Cut) -> dict[str, str]:
    """Three letters for F, B and W of each region, none used by another region."""
    used = set("fbwr")
    letters = {}
    for region in cut.regions:
        if region.role is Role.BACKBONE:
            letters[region.name] = "FBW"
            continue
        split = any({Kind.B, Kind.W} <= set(s.kinds) for s in cut.stages if s.region == region.name)
        first, *rest = _free(region.name, used, 2 if split else 1)
        last = rest[0] if rest else first
        letters[region.name] = f"{first}{first.upper()}{last.upper()}"
        used |= {first, last}
    return letters


def _free(name: str, used: set[str], count: int) -> list[str]:
    """Letters of a name, else of the alphabet, that nobody uses yet; `?` where all are gone."""
    wanted = [letter for letter in name.lower() if "a" <= letter <= "z"]
    candidates = dict.fromkeys([*wanted, *"abcdefghijklmnopqrstuvwxyz"])
    return [*(letter for letter in candidates if letter not in used), "?", "?"][:count]
