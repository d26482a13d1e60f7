"""The cut: regions, stages and seams of a model. The only record that both halves read.

A model is layers in order; a cut tiles them into regions, and sharded regions into stages
(Mpipe, arXiv 2607.03229, section 3). This module holds names, never tensors: it imports no torch.

    Cut.parse(str(cut)) == cut
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from fxpipe.errors import TableError


class Role(StrEnum):
    """What a region is to the backbone: before it, it, or after it."""

    ENCODER = "encoder"
    BACKBONE = "backbone"
    GENERATOR = "generator"


class Layout(StrEnum):
    """Sharded: one stage, one rank. Replicated: every rank holds it, a microbatch has an owner."""

    SHARDED = "sharded"
    REPLICATED = "replicated"


class Kind(StrEnum):
    """Forward, gradients of inputs, gradients of weights, reduction of gradients over ranks."""

    F = "F"
    B = "B"
    W = "W"
    R = "R"


@dataclass(frozen=True)
class Region:
    """`region vision encoder replicated recompute`

    recompute: whether its stages keep only what they received, and compute the rest again in the
    first op of the backward.
    """

    name: str
    role: Role
    layout: Layout
    recompute: bool = False

    def __str__(self) -> str:
        return f"region {self.name} {self.role} {self.layout}{' recompute' * self.recompute}"


@dataclass(frozen=True)
class Stage:
    """`stage llm0 of llm: FBW, rank 0, cost 1.5`

    kinds: the ops that exist for each microbatch. B is missing where no value that enters the
    stage needs a gradient, W where the stage trains no parameter (the backward-footprint lemma).
    rank: where it lives; None in a replicated region, where the owner of the microbatch runs it.
    cost: forward work in floating-point operations of the example microbatch.
    """

    name: str
    region: str
    kinds: tuple[Kind, ...]
    rank: int | None
    cost: float = 1.0

    def __str__(self) -> str:
        where = "owner" if self.rank is None else f"rank {self.rank}"
        kinds = "".join(self.kinds)
        cost = repr(self.cost).removesuffix(".0")  # every digit: what is printed parses back
        return f"stage {self.name} of {self.region}: {kinds}, {where}, cost {cost}"


@dataclass(frozen=True)
class Seam:
    """`seam vision -> llm0: features* mask`; a star marks a value whose gradient comes back."""

    source: str
    target: str
    values: tuple[str, ...]
    grads: tuple[str, ...]

    def __str__(self) -> str:
        marks = (f"{value}{'*' * (value in self.grads)}" for value in self.values)
        return f"seam {self.source} -> {self.target}: {' '.join(marks)}"


@dataclass(frozen=True)
class Cut:
    """Regions, stages in topological order, seams, and which stages share trained parameters.

    shared: each entry is the stages that hold the same trained parameters: one stage for a
    replicated region, several for tied weights. Its gradients are summed over `ranks_of(entry)`.
    """

    ranks: int
    regions: tuple[Region, ...]
    stages: tuple[Stage, ...]
    seams: tuple[Seam, ...]
    shared: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def stage(self) -> dict[str, Stage]:
        """Stages by name."""
        return {stage.name: stage for stage in self.stages}

    @cached_property
    def region(self) -> dict[str, Region]:
        """Regions by name."""
        return {region.name: region for region in self.regions}

    @cached_property
    def seams_into(self) -> dict[str, tuple[Seam, ...]]:
        """Seams by target stage."""
        return {s.name: tuple(x for x in self.seams if x.target == s.name) for s in self.stages}

    @cached_property
    def seams_from(self) -> dict[str, tuple[Seam, ...]]:
        """Seams by source stage."""
        return {s.name: tuple(x for x in self.seams if x.source == s.name) for s in self.stages}

    @cached_property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Entries of `shared` that need a reduction, by the name of their R op: `llm0+llm3`."""
        return {"+".join(x): x for x in self.shared if len(self.ranks_of(x)) > 1}

    def role(self, stage: str) -> Role:
        """The role of a stage's region."""
        return self.region[self.stage[stage].region].role

    def of(self, role: Role) -> tuple[Stage, ...]:
        """The stages of every region with this role, in topological order."""
        return tuple(stage for stage in self.stages if self.role(stage.name) is role)

    def ranks_of(self, stages: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that hold any of these stages, sorted; all of them if one is replicated."""
        homes = {self.stage[name].rank for name in stages}
        if None in homes:
            return tuple(range(self.ranks))
        return tuple(sorted(home for home in homes if home is not None))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"ranks {self.ranks}"
        yield from map(str, self.regions)
        yield from map(str, self.stages)
        yield from map(str, self.seams)
        yield from (f"shared {' '.join(entry)}" for entry in self.shared)

    @staticmethod
    def parse(text: str) -> "Cut":
        """The cut that prints as `text`. Raises TableError on a line that is not of a cut."""
        ranks, regions, stages, seams, shared = 0, [], [], [], []
        for line in filter(None, map(str.strip, text.splitlines())):
            match line.split():
                case ["ranks", count]:
                    ranks = int(count)
                case ["region", name, role, layout, *recompute] if recompute in ([], ["recompute"]):
                    regions.append(Region(name, Role(role), Layout(layout), bool(recompute)))
                case ["stage", *_]:
                    stages.append(_parse_stage(line))
                case ["seam", source, "->", target, *marks]:
                    seams.append(_parse_seam(source, target.removesuffix(":"), marks))
                case ["shared", *entry]:
                    shared.append(tuple(entry))
                case _:
                    raise TableError(f"not a line of a cut: {line!r}")
        return Cut(ranks, tuple(regions), tuple(stages), tuple(seams), tuple(shared))


def _parse_stage(line: str) -> Stage:
    found = re.fullmatch(r"stage (\S+) of (\S+): ([FBW]+), (owner|rank \d+), cost (\S+)", line)
    if found is None:
        raise TableError(
            f"not a stage: {line!r}; expected `stage llm0 of llm: FBW, rank 0, cost 1`"
        )
    name, region, kinds, where, cost = found.groups()
    rank = None if where == "owner" else int(where.split()[1])
    return Stage(name, region, tuple(map(Kind, kinds)), rank, float(cost))


def _parse_seam(source: str, target: str, marks: list[str]) -> Seam:
    values = tuple(mark.removesuffix("*") for mark in marks)
    return Seam(
        source, target, values, tuple(m.removesuffix("*") for m in marks if m.endswith("*"))
    )
