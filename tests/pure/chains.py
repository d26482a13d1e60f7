"""Tables of one chain of stages, made by a base schedule alone."""

from itertools import pairwise

from fxpipe.cut import Cut, Kind, Layout, Region, Role, Seam, Stage
from fxpipe.skeletons import Base, Pattern, homes, pattern_rows
from fxpipe.table import Op, Table

SPLIT = (Kind.F, Kind.B, Kind.W)
WHOLE = (Kind.F, Kind.B)
FIRST = (Kind.F, Kind.W)


def chain(places: tuple[int, ...], *kinds: tuple[Kind, ...]) -> Cut:
    """Stages llm0, llm1, ... on the ranks of `places`; the last of `kinds` is that of the rest."""
    stages = tuple(
        Stage(f"llm{i}", "llm", kinds[min(i, len(kinds) - 1)], rank)
        for i, rank in enumerate(places)
    )
    seams = tuple(Seam(a.name, b.name, ("h",), ("h",)) for a, b in pairwise(stages))
    region = Region("llm", Role.BACKBONE, Layout.SHARDED)
    return Cut(max(places) + 1, (region,), stages, seams)


def rows_of(pattern: tuple[Pattern, ...], cut: Cut) -> tuple[tuple[Op, ...], ...]:
    """The steps that the stages of the cut have, as ops."""
    return tuple(
        tuple(
            Op(cut.stages[stage].name, kind, mb)
            for kind, stage, mb in row
            if kind in cut.stages[stage].kinds
        )
        for row in pattern
    )


def chained(base: Base, ranks: int, chunks: int, mbs: int, *kinds: tuple[Kind, ...]) -> Table:
    """The table of a base; by default the first stage of the chain has no input gradient."""
    places = homes(base, ranks, chunks)
    cut = chain(places, *(kinds or (FIRST, SPLIT)))
    return Table(cut, rows_of(pattern_rows(base, places, mbs), cut))
