"""The global operator table: one row of ops per rank (BigMac, arXiv 2605.25451, section 1).

A token is an op and the name of the value that it makes; both ends of a transfer bear that name.

    vision.F1      run the forward of stage vision for microbatch 1
    vision.F1>0    start sending what it made to rank 0
    vision.F1<2    post the receive of what rank 2 made; the op that reads it waits for it
    llm0.B1        gradients of the stage's inputs        llm0.W1   gradients of its weights
    llm0+llm3.R    sum the gradients of the parameters that these stages share, over their ranks
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fxpipe.cut import Cut, Kind
from fxpipe.errors import TableError

_TOKEN = re.compile(r"([^\s.<>]+)\.(?:([FBW])(\d+)|R)(?:([<>])(\d+))?")


class Op(NamedTuple):
    """One entry of a row. mb is None for R; way is `>` (send), `<` (post a receive) or empty."""

    stage: str
    kind: Kind
    mb: int | None = None
    way: str = ""
    peer: int | None = None

    @property
    def value(self) -> "Op":
        """The op that makes what this one moves; itself when it moves nothing."""
        return Op(self.stage, self.kind, self.mb)

    def to(self, rank: int) -> "Op":
        """The send of this op's value to `rank`."""
        return self._replace(way=">", peer=rank)

    def source(self, rank: int) -> "Op":
        """The receive of this op's value from `rank`."""
        return self._replace(way="<", peer=rank)

    def __str__(self) -> str:
        mb = "" if self.mb is None else self.mb
        return f"{self.stage}.{self.kind}{mb}{self.way}{'' if self.peer is None else self.peer}"

    @staticmethod
    def parse(token: str) -> "Op":
        """The op that prints as `token`. Raises TableError."""
        found = _TOKEN.fullmatch(token)
        if found is None:
            raise TableError(
                f"not an op: {token!r}; expected one like llm0.F3, llm0.F3>1, llm0.B3<1"
            )
        stage, kind, mb, way, peer = found.groups()
        number = None if mb is None else int(mb)
        return Op(stage, Kind(kind or "R"), number, way or "", int(peer) if peer else None)


def inputs(op: Op, cut: Cut) -> Iterator[Op]:
    """The compute ops whose values `op` reads: the one dependency rule.

    F reads the forwards at the other ends of its stage's seams; B reads its own F and the B of
    every stage that returns it a gradient; W reads its B, or what B would have read if there is
    none. R reads no value of another rank: it waits for its own row (see `verify.reduced_once`).
    """
    stage = cut.stage.get(op.stage)
    match op.kind:
        case Kind.F:
            yield from (Op(seam.source, Kind.F, op.mb) for seam in cut.seams_into[op.stage])
        case Kind.W if stage is not None and Kind.B in stage.kinds:
            yield Op(op.stage, Kind.B, op.mb)
        case Kind.B | Kind.W:
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


@dataclass(frozen=True)
class Table:
    """The cut and one row of ops per rank. `Table.parse(str(table)) == table`.

    schedule: by what the rows were made, `nested/1f1b`; live: what the table says that it holds.
    Both are claims, which `verify` checks; a table that claims nothing is as good.
    """

    cut: Cut
    rows: tuple[tuple[Op, ...], ...]
    schedule: str = ""
    live: tuple[Live, ...] = ()

    @cached_property
    def place(self) -> dict[Op, int]:
        """Rank of every compute op of a microbatch (F, B, W)."""
        return {
            op: rank
            for rank, row in enumerate(self.rows)
            for op in row
            if not op.way and op.kind is not Kind.R
        }

    @cached_property
    def microbatches(self) -> int:
        """How many microbatches the table runs."""
        return 1 + max((op.mb for op in self.place if op.mb is not None), default=-1)

    def only(self, regions: Iterable[str]) -> tuple[tuple[Op, ...], ...]:
        """The rows with nothing left but the F, B and W of these regions."""
        wanted = {stage.name for stage in self.cut.stages if stage.region in set(regions)}
        return tuple(
            tuple(op for op in row if op.stage in wanted and not op.way and op.kind is not Kind.R)
            for row in self.rows
        )

    def __str__(self) -> str:
        rows = (f"rank {r}: {' '.join(map(str, row))}".rstrip() for r, row in enumerate(self.rows))
        schedule = [f"schedule {self.schedule}"] if self.schedule else []
        return "\n".join([str(self.cut), *schedule, *map(str, self.live), *rows])

    @staticmethod
    def parse(text: str) -> "Table":
        """The table that prints as `text`. Raises TableError."""
        cut: list[str] = []
        rows: list[tuple[Op, ...]] = []
        schedule, live = "", []
        for line in text.splitlines():
            if found := re.match(r"\s*rank (\d+):", line):
                if int(found[1]) != len(rows):
                    raise TableError(f"rank {found[1]} stands where rank {len(rows)} is expected")
                rows.append(tuple(map(Op.parse, line[found.end() :].split())))
            elif found := re.fullmatch(r"\s*schedule (\S+)\s*", line):
                schedule = found[1]
            elif found := re.fullmatch(r"\s*live (\S+):((?:\s+\d+)+)\s*", line):
                live.append(Live(found[1], tuple(map(int, found[2].split()))))
            else:
                cut.append(line)
        return Table(Cut.parse("\n".join(cut)), tuple(rows), schedule, tuple(live))
