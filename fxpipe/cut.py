"""The cut: regions, stages and seams of a model. The only record that both halves read.

A model is layers in order; a cut tiles them into regions, and sharded regions into stages
(Mpipe, arXiv 2607.03229, section 3). This module holds names, never tensors: it imports no torch.

    Cut.parse(str(cut)) == cut
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from fxpipe.errors import TableError


class Role(StrEnum):
    """What a region is to the backbone, in topological order: before it, it, or after it."""

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

    __hash__ = str.__hash__  # an op is hashed often, and the one of Enum is a Python function


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

    shared: each entry is the stages that hold the same trained parameters, or only read them: one
    stage for a replicated region, several for tied weights. Gradients are summed over its ranks.
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

    def keeps(self, stage: str) -> bool:
        """Whether a unit of a stage holds anything: one that recomputes and receives nothing does
        not, since every rank has the microbatch; so its backward may run on any rank."""
        return not self.region[self.stage[stage].region].recompute or bool(self.seams_into[stage])

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
        """The cut that prints as `text`. Raises TableError, which names the line."""
        lines = [(i, line.strip()) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        records = [(number, line, _parse_line(number, line)) for number, line in lines]
        cut = _gathered([record for _, _, record in records])
        seen: set[object] = set()
        for number, line, record in records:
            for problem in _problems(record, cut, seen):
                raise TableError(f"line {number}: {_quoted(line)}: {problem}")
        if ("ranks",) not in seen:
            raise TableError(f"no line says how many ranks there are; expected `{_EXPECTED[0]}`")
        return cut


@dataclass(frozen=True)
class _Ranks:
    count: int


_Record = _Ranks | Region | Stage | Seam | tuple[str, ...]
_EXPECTED = (
    "ranks 2",
    "region llm encoder|backbone|generator sharded|replicated",
    "stage llm0 of llm: FBW, rank 0, cost 1",
    "seam llm0 -> llm1: hidden* mask",
    "shared llm0 llm1",
)
_KINDS = ("F", "FB", "FW", "FBW")


def _parse_line(number: int, line: str) -> _Record:
    expected = next((e for e in _EXPECTED if line.split()[0] == e.split()[0]), "")
    try:
        match line.split():
            case ["ranks", count] if re.fullmatch("[0-9]{1,9}", count):
                return _Ranks(int(count))
            case ["region", name, role, layout, *recompute] if recompute in ([], ["recompute"]):
                return Region(name, Role(role), Layout(layout), bool(recompute))
            case ["stage", *_]:
                return _parse_stage(line)
            case ["seam", source, "->", target, *marks]:
                return _parse_seam(source, target.removesuffix(":"), marks)
            case ["shared", *entry] if entry:
                return tuple(entry)
    except ValueError as error:
        raise TableError(
            f"line {number}: {_quoted(line)}: {error}; expected `{expected}`"
        ) from error
    words = ", ".join(e.split()[0] for e in _EXPECTED)
    what = expected.split()[0] if expected else "line of a cut"
    wanted = f"`{expected}`" if expected else f"{words}, or schedule, live, rank"
    raise TableError(f"line {number}: not a {what}: {_quoted(line)}; expected {wanted}")


def _quoted(line: str) -> str:
    return repr(line if len(line) <= 100 else f"{line[:97]}...")


def _parse_stage(line: str) -> Stage:
    found = re.fullmatch(
        r"stage\s+([^\s.<>]+) of (\S+): (\w+), (?:owner|rank ([0-9]{1,9})), cost (\S+)", line
    )
    if found is None:
        raise ValueError("not a stage")
    name, region, kinds, rank, cost = found.groups()
    if kinds not in _KINDS:
        raise ValueError(f"kinds {kinds}; there are {', '.join(_KINDS)}")
    if not 0 <= float(cost) < math.inf:
        raise ValueError(f"cost {cost} is no finite number of at least 0")
    home = None if rank is None else int(rank)
    return Stage(name, region, tuple(map(Kind, kinds)), home, float(cost))


def _parse_seam(source: str, target: str, marks: list[str]) -> Seam:
    values = tuple(mark.removesuffix("*") for mark in marks)
    if len(set(values)) < len(values):
        raise ValueError("a value stands twice")
    return Seam(
        source, target, values, tuple(m.removesuffix("*") for m in marks if m.endswith("*"))
    )


def _gathered(records: list[_Record]) -> Cut:
    return Cut(
        next((x.count for x in records if isinstance(x, _Ranks)), 0),
        tuple(x for x in records if isinstance(x, Region)),
        tuple(x for x in records if isinstance(x, Stage)),
        tuple(x for x in records if isinstance(x, Seam)),
        tuple(x for x in records if isinstance(x, tuple)),
    )


def _problems(record: _Record, cut: Cut, seen: set[object]) -> Iterator[str]:
    """Why a line does not fit the rest of its cut; `seen` is what the lines before it named."""
    match record:
        case _Ranks(count):
            key: object = ("ranks",)
            if not count:
                yield "a pipeline has at least one rank"
        case Region(name):
            key = ("region", name)
        case Stage(name):
            key = ("stage", name)
            yield from _misplaced(record, cut)
        case Seam(source, target):
            key = ("seam", source, target)
            if source == target:
                yield "a stage has no seam to itself"
            yield from _unknown((source, target), cut)
        case _:
            key = ("shared", record)
            yield from _unknown(record, cut)
    if key in seen:
        yield "an earlier line has it already; leave one"
    seen.add(key)


def _misplaced(stage: Stage, cut: Cut) -> Iterator[str]:
    region = cut.region.get(stage.region)
    if region is None:
        yield f"no region {stage.region}; the cut has {', '.join(cut.region) or 'none'}"
    elif (stage.rank is None) != (region.layout is Layout.REPLICATED):
        where = "`owner`" if region.layout is Layout.REPLICATED else "`rank N`"
        yield f"region {region.name} is {region.layout}; expected {where}"
    if stage.rank is not None and stage.rank >= cut.ranks:
        yield f"rank {stage.rank} is none of the {cut.ranks} ranks"


def _unknown(names: tuple[str, ...], cut: Cut) -> Iterator[str]:
    for name in names:
        if name not in cut.stage:
            yield f"no stage {name}; the cut has {', '.join(cut.stage) or 'none'}"
