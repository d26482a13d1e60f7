"""The global operator table: one row of ops per rank (BigMac, arXiv 2605.25451, section 1).

A token is an op and the name of the value that it makes; both ends of a transfer bear that name.

    vision.F1      run the forward of stage vision for microbatch 1
    vision.F1>0    start sending what it made to rank 0
    vision.F1<2    post the receive of what rank 2 made; the op that reads it waits for it
    llm0.B1        gradients of the stage's inputs        llm0.W1   gradients of its weights
    llm0+llm3.R    sum the gradients of the parameters that these stages share, over their ranks
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from fxpipe.cut import Cut, Kind
from fxpipe.errors import TableError

_TOKEN = re.compile(r"([^\s.<>]+)\.(?:([FBW])([0-9]{1,9})|R)(?:([<>])([0-9]{1,9}))?")
_ROW = re.compile(r"\s*rank ([0-9]{1,9}):")
_SCHEDULE = re.compile(r"\s*schedule (\S+)\s*")
_LIVE = re.compile(r"\s*live (\S+):((?:\s+[0-9]{1,9})+)\s*")


class Op(NamedTuple):
    """One entry of a row. mb is None for R; way is `>` (send), `<` (post a receive) or empty."""

    stage: str
    kind: Kind
    mb: int | None = None
    way: str = ""
    peer: int | None = None

    @property
    def is_forward(self) -> bool:
        """Whether it computes a forward, and does not move one."""
        return self.kind is Kind.F and not self.way

    @property
    def value(self) -> "Op":
        """The op that makes what this one moves; itself when it moves nothing."""
        return Op(self.stage, self.kind, self.mb) if self.way else self

    def to(self, rank: int) -> "Op":
        """The send of this op's value to `rank`."""
        return Op(self.stage, self.kind, self.mb, ">", rank)

    def source(self, rank: int) -> "Op":
        """The receive of this op's value from `rank`."""
        return Op(self.stage, self.kind, self.mb, "<", rank)

    def __str__(self) -> str:
        mb = "" if self.mb is None else self.mb
        return f"{self.stage}.{self.kind}{mb}{self.way}{'' if self.peer is None else self.peer}"

    @staticmethod
    def parse(token: str) -> "Op":
        """The op that prints as `token`. Raises TableError."""
        found = _TOKEN.fullmatch(token)
        if found is None:
            raise TableError(
                f"not an op: {token[:100]!r}; expected one like llm0.F3, llm0.F3>1, llm0.B3<1"
            )
        stage, kind, mb, way, peer = found.groups()
        number = None if mb is None else int(mb)
        return Op(stage, Kind(kind or "R"), number, way or "", int(peer) if peer else None)


def inputs(op: Op, cut: Cut) -> Iterator[Op]:
    """The compute ops whose values `op` reads: the one dependency rule.

    F reads the forwards at the other ends of its stage's seams; B reads its own F and the B of
    every stage that returns it a gradient; W reads its B, or what B would have read if there is
    none. A stage that keeps nothing (`Cut.keeps`) reads nothing of its own F. R reads
    no value of another rank: it waits for its own row (see `verify.reduced_once`).
    """
    stage = cut.stage.get(op.stage)
    match op.kind:
        case Kind.F:
            yield from (Op(seam.source, Kind.F, op.mb) for seam in cut.seams_into[op.stage])
        case Kind.W if stage is not None and Kind.B in stage.kinds:
            yield Op(op.stage, Kind.B, op.mb)
        case Kind.B | Kind.W:
            if cut.keeps(op.stage):
                yield Op(op.stage, Kind.F, op.mb)
            seams = cut.seams_from[op.stage]
            yield from (Op(seam.target, Kind.B, op.mb) for seam in seams if seam.grads)
        case Kind.R:
            return


class Live(NamedTuple):
    """`live vision: 2 2 3 3`: at most so many units of a region are live on each rank.

    A unit is one stage of one microbatch, from its F to the last op of its backward.
    """

    region: str
    units: tuple[int, ...]

    def __str__(self) -> str:
        return f"live {self.region}: {' '.join(map(str, self.units))}"


Rows = tuple[tuple[Op, ...], ...]


@dataclass(frozen=True)
class Table:
    """The cut and one row of ops per rank. `Table.parse(str(table)) == table`.

    schedule: by what the rows were made, `nested/1f1b`; live: what the table says that it holds.
    Both are claims, which `verify` checks; a table that claims nothing is as good.
    """

    cut: Cut
    rows: Rows
    schedule: str = ""
    live: tuple[Live, ...] = ()

    @cached_property
    def compute(self) -> Rows:
        """The rows with nothing left but F, B and W."""
        reduction = Kind.R
        return tuple(
            tuple(op for op in row if not op.way and op.kind is not reduction) for row in self.rows
        )

    @cached_property
    def place(self) -> dict[Op, int]:
        """Rank of every compute op of a microbatch (F, B, W)."""
        return {op: rank for rank, row in enumerate(self.compute) for op in row}

    @cached_property
    def microbatches(self) -> int:
        """How many microbatches the table runs."""
        return 1 + max(
            (op.mb for row in self.compute for op in row if op.mb is not None), default=-1
        )

    @cached_property
    def numbered(self) -> "Numbered":
        """The value of each op as a number; every op must be of the cut."""
        return Numbered.of(self)

    def only(self, regions: Iterable[str]) -> Rows:
        """The rows with nothing left but the F, B and W of these regions."""
        kept = set(regions)
        wanted = {stage.name for stage in self.cut.stages if stage.region in kept}
        return tuple(tuple(op for op in row if op.stage in wanted) for row in self.compute)

    def __str__(self) -> str:
        rows = (f"rank {r}: {' '.join(map(str, row))}".rstrip() for r, row in enumerate(self.rows))
        schedule = [f"schedule {self.schedule}"] if self.schedule else []
        return "\n".join([str(self.cut), *schedule, *map(str, self.live), *rows])

    @staticmethod
    def parse(text: str) -> "Table":
        """The table that prints as `text`. Raises TableError, which names the line."""
        lines = text.splitlines()
        rows: list[tuple[Op, ...]] = []
        claims: dict[str, str | Live] = {}
        for number, line in enumerate(lines):
            if found := _ROW.match(line):
                rows.append(_parse_row(line, found, number + 1, len(rows)))
            elif claim := _parse_claim(line):
                name, value = claim
                if name in claims:
                    raise TableError(f"line {number + 1}: {name} is stated twice; leave one")
                claims[name] = value
            else:
                continue
            lines[number] = ""  # the lines of the cut keep their numbers
        cut = Cut.parse("\n".join(lines))
        live = tuple(claim for claim in claims.values() if isinstance(claim, Live))
        return Table(cut, tuple(rows), str(claims.get("the schedule", "")), live)


def _parse_row(line: str, head: re.Match[str], number: int, expected: int) -> tuple[Op, ...]:
    if int(head[1]) != expected:
        raise TableError(f"line {number}: rank {head[1]} stands where rank {expected} is expected")
    try:
        return tuple(map(Op.parse, line[head.end() :].split()))
    except TableError as error:
        raise TableError(f"line {number}: {error}") from error


def _parse_claim(line: str) -> tuple[str, str | Live] | None:
    """What a line claims and its value, or None for a line of the cut."""
    if found := _SCHEDULE.fullmatch(line):
        return "the schedule", found[1]
    if found := _LIVE.fullmatch(line):
        units = tuple(map(int, found[2].split()))
        return f"live of {found[1]}", Live(found[1], units)
    return None


def live_units(table: Table, region: str, rank: int) -> list[int]:
    """How many units of a region are live (see `Live`) after each op of `table.compute[rank]`.

    A stage that keeps nothing (`Cut.keeps`) has none.
    """
    steps = dict.fromkeys(((stage.name, kind) for stage in table.cut.stages for kind in Kind), 0)
    for stage in table.cut.stages:
        last = Kind.W if Kind.W in stage.kinds else Kind.B
        if stage.region == region and last in stage.kinds and table.cut.keeps(stage.name):
            steps[stage.name, Kind.F], steps[stage.name, last] = 1, -1
    return list(accumulate(steps[op.stage, op.kind] for op in table.compute[rank]))


@dataclass(frozen=True)
class Numbered:
    """The values of a table as numbers, which are quicker to make, hash and compare than ops.

    A value's number is mb * len(names) + code; `names[code]` is its stage (or group) and kind. What
    an op reads has the op's mb, so `reads[code]` holds what to add to its number: no op is made.
    home: the rank of each value that the table makes.
    """

    names: tuple[tuple[str, Kind], ...]
    reads: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[int, ...], ...]
    home: Mapping[int, int]

    @staticmethod
    def of(table: Table) -> "Numbered":
        """The numbers of a table's ops. Raises KeyError where an op is not of the cut."""
        cut = table.cut
        names = [(stage.name, kind) for stage in cut.stages for kind in (Kind.F, Kind.B, Kind.W)]
        names += [(group, Kind.R) for group in cut.groups]
        code = {name: at for at, name in enumerate(names)}
        reads = (
            tuple(code[value.stage, value.kind] - at for value in inputs(Op(*name, 0), cut))
            for at, name in enumerate(names)
        )
        count, reductions = len(names), len(names) - len(cut.groups)
        rows: list[tuple[int, ...]] = []
        home: dict[int, int] = {}
        for rank, row in enumerate(table.rows):
            numbers = [(op.mb or 0) * count + code[op.stage, op.kind] for op in row]
            rows.append(tuple(numbers))
            made = (n for n, op in zip(numbers, row, strict=True) if not op.way)
            home.update((n, rank) for n in made if n % count < reductions)
        return Numbered(tuple(names), tuple(reads), tuple(rows), home)

    def inputs(self, number: int) -> list[int]:
        """The numbers of the values that the op with this number reads: `inputs` of a table."""
        return [number + step for step in self.reads[number % len(self.reads)]]

    def op(self, number: int) -> Op:
        """The op that makes the value with this number."""
        mb, code = divmod(number, len(self.names))
        stage, kind = self.names[code]
        return Op(stage, kind, None if kind is Kind.R else mb)
