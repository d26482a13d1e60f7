"""A sketch: the cut and the costs of a model of which only each region's seconds are known.

    vision=encoder:1,2     F and the whole backward of one microbatch, in seconds
    llm=backbone:1,1,1     F, B and W of one rank's share of the backbone
    image=generator:1      F alone: a frozen region

Seconds of an encoder or a generator are of the whole region. A 0 at the end is an op that does not
exist. Which ops a stage has follows from the seams, as in a traced model: a trained encoder, and
the first stage behind nothing trained, have no B, so that their W is the whole backward.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from fxpipe.cut import Cut, Kind, Layout, Region, Role, Seam, Stage
from fxpipe.errors import OptionError

_FORM = "NAME=ROLE:F[,B[,W]], as in llm=backbone:1,1,1"
_NAME = re.compile(r"[A-Za-z_][\w-]*")


@dataclass(frozen=True)
class Sketch:
    """What `--region vision=encoder:1,2` says.

    forward: seconds of F; backward: of B and W, of both together, or of neither if frozen.
    """

    name: str
    role: Role
    forward: float
    backward: tuple[float, ...] = ()

    @property
    def trained(self) -> bool:
        """Whether it has a backward."""
        return bool(self.backward)

    @staticmethod
    def parse(text: str) -> "Sketch":
        """The region of one option. Raises OptionError."""
        found = re.fullmatch(r"([^=\s]+)=([^:\s]+):(\S*)", text.strip())
        if found is None:
            raise OptionError(f"--region {text!r} cannot be read; write {_FORM}")
        name, role, seconds = found.groups()
        if not _NAME.fullmatch(name):
            raise OptionError(f"--region {text!r}: {name!r} is no name; use letters, digits, _, -")
        if role not in list(Role):
            roles = ", ".join(Role)
            raise OptionError(f"--region {text!r}: role {role!r} is unknown; there are {roles}")
        forward, *backward = numbers("--region", text, seconds)
        while backward and not backward[-1]:
            backward.pop()
        if len(backward) > 2:
            raise OptionError(f"--region {text!r} has over three numbers; write {_FORM}")
        return Sketch(name, Role(role), forward, tuple(backward))


@dataclass(frozen=True)
class Homes:
    """The rank of each stage of each region that is sharded; the others are replicated."""

    ranks: int
    of: Mapping[str, tuple[int, ...]]


def numbers(option: str, text: str, listed: str) -> list[float]:
    """Comma-separated seconds or bytes. Raises OptionError."""
    try:
        found = [float(word) for word in listed.split(",")]
    except ValueError:
        raise OptionError(
            f"{option} {text!r}: {listed!r} are no numbers; write them with commas, as in 1,0.5"
        ) from None
    if not all(math.isfinite(number) and number >= 0 for number in found):
        raise OptionError(f"{option} {text!r}: numbers must be finite and not negative")
    return found


def regions(options: Iterable[str]) -> tuple[Sketch, ...]:
    """The regions of all `--region` options, encoders first. Raises OptionError."""
    found = [Sketch.parse(option) for option in options]
    names = [sketch.name for sketch in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise OptionError(f"--region {twice[0]} is given twice; give each region once")
    backbones = [sketch.name for sketch in found if sketch.role is Role.BACKBONE]
    if len(backbones) > 1:
        raise OptionError(f"{' and '.join(backbones)} are both backbones; a model has one")
    return tuple(sketch for role in Role for sketch in found if sketch.role is role)


def named(
    option: str, options: Iterable[str], sketches: Sequence[Sketch]
) -> dict[str, tuple[float, ...]]:
    """Numbers by region from options such as `--scale vision=1,0,40`. Raises OptionError."""
    found: dict[str, tuple[float, ...]] = {}
    known = [sketch.name for sketch in sketches]
    for text in options:
        name, _, listed = text.partition("=")
        if name not in known:
            raise OptionError(f"{option} {text!r} names no region; there are {', '.join(known)}")
        if name in found:
            raise OptionError(f"{option} {name} is given twice; give it once")
        found[name] = tuple(numbers(option, text, listed))
    return found


def one_each(option: str, options: Iterable[str], sketches: Sequence[Sketch]) -> dict[str, float]:
    """One number by region from options such as `--bytes vision=4e6`. Raises OptionError."""
    found = named(option, options, sketches)
    many = [name for name, values in found.items() if len(values) != 1]
    if many:
        raise OptionError(f"{option} {many[0]} takes one number")
    return {name: values[0] for name, values in found.items()}


def sketch(sketches: Sequence[Sketch], homes: Homes) -> Cut:
    """The cut of some regions: encoders before the backbone, generators behind it.

    A seam has a star where something before it is trained and its target has a backward.
    Raises OptionError.
    """
    of = {x.name: _stage_names(x, homes) for x in sketches}
    _distinct(list(chain.from_iterable(of.values())))
    owner = {stage: x for x in sketches for stage in of[x.name]}
    needs = {stage: x.trained for stage, x in owner.items()}
    seams = []
    for source, target in _pairs(sketches, of):
        back = needs[source] and owner[target].trained
        value = "features" if owner[source].role is Role.ENCODER else "hidden"
        seams.append(Seam(source, target, (value,), (value,) if back else ()))
        needs[target] = needs[target] or back
    _gradients_arrive(owner, seams)
    starred = {seam.target for seam in seams if seam.grads}
    stages = tuple(
        Stage(
            name,
            x.name,
            kinds(x, returns=name in starred),
            homes.of[x.name][at] if x.name in homes.of else None,
            x.forward * share(x, homes.ranks, len(of[x.name])),
        )
        for x in sketches
        for at, name in enumerate(of[x.name])
    )
    return Cut(
        homes.ranks,
        tuple(Region(x.name, x.role, _layout(x, homes)) for x in sketches),
        stages,
        tuple(seams),
        tuple((x.name,) for x in sketches if x.trained and x.name not in homes.of),
    )


def kinds(region: Sketch, *, returns: bool) -> tuple[Kind, ...]:
    """The ops of a stage (the backward-footprint lemma). returns: its input needs a gradient."""
    match len(region.backward), returns:
        case 0, _:
            return (Kind.F,)
        case _, False:
            return (Kind.F, Kind.W)
        case 1, True:
            return (Kind.F, Kind.B)
        case _:
            return (Kind.F, Kind.B, Kind.W)


def share(region: Sketch, ranks: int, stages: int) -> float:
    """The part of a region's numbers that one of its stages has: those of the backbone are of one
    of `ranks` shares, also where it lives on fewer ranks."""
    return (ranks if region.role is Role.BACKBONE else 1) / stages


def _stage_names(region: Sketch, homes: Homes) -> tuple[str, ...]:
    """`vision` for one stage, `llm0 llm1` for the stages of a chain."""
    count = len(homes.of.get(region.name, (0,)))
    if count == 1 and region.role is not Role.BACKBONE:
        return (region.name,)
    return tuple(f"{region.name}{at}" for at in range(count))


def _layout(region: Sketch, homes: Homes) -> Layout:
    return Layout.SHARDED if region.name in homes.of else Layout.REPLICATED


def _pairs(sketches: Sequence[Sketch], of: Mapping[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    """The ends of every seam, each source before its targets."""
    encoders, backbone, generators = (
        [of[x.name] for x in sketches if x.role is role] for role in Role
    )
    pairs = [pair for encoder in encoders for pair in pairwise(encoder)]
    into = backbone or generators
    pairs += [(source[-1], target[0]) for source in encoders for target in into]
    pairs += [pair for stages in backbone for pair in pairwise(stages)]
    pairs += [(source[-1], target[0]) for source in backbone for target in generators]
    return pairs + [pair for generator in generators for pair in pairwise(generator)]


def _gradients_arrive(owner: Mapping[str, Sketch], seams: Sequence[Seam]) -> None:
    """A trained region that others read, but that none returns a gradient to, cannot learn."""
    for region in {x.name: x for x in owner.values() if x.role is Role.ENCODER}.values():
        out = [s for s in seams if owner[s.source] is region and owner[s.target] is not region]
        if region.trained and out and not any(seam.grads for seam in out):
            frozen = owner[out[0].target].name
            raise OptionError(
                f"region {region.name} is trained, but {frozen} has no backward that returns its "
                f"gradient; give {frozen} seconds of B, or {region.name} those of F alone"
            )


def _distinct(stages: Sequence[str]) -> None:
    twice = [name for name in stages if stages.count(name) > 1]
    if twice:
        raise OptionError(f"two stages would be called {twice[0]}; rename a region")
