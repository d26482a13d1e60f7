"""The order of a forward without a backward: microbatch after microbatch, in waves.

    rank 0: vision.F0 vision.F1<1 vision.F2 llm0.F0 llm0.F0>1 llm0.F1 llm0.F1>1 ...
    rank 1: vision.F1 vision.F1>0 llm0.F0<0 llm1.F0 llm0.F1<0 llm1.F1 ...

A stage at depth d runs microbatch m in wave m + d. A replicated encoder runs in groups of one
microbatch per rank, a group ahead of the stages that read it. So no more than a few microbatches
are under way, however many there are, and nothing has to be searched for.
"""

from bisect import bisect
from collections.abc import Iterator, Sequence

from fxpipe.cut import Cut, Kind, Stage
from fxpipe.table import Op, Table

_Turn = tuple[int, int, int, int]  # wave, depth, microbatch, number of the stage: never two alike
_Row = list[tuple[_Turn, Op]]


def waves(cut: Cut, microbatches: int) -> Table:
    """The table of every F of a cut, with transfers; owners of replicated stages in turn.

    Both ends of a transfer stand where the turn of the op that makes the value is over. All ops and
    transfers then follow one order, and no rank waits for ever under the strictest transport.
    """
    depth = _depths(cut)
    rows: list[_Row] = [[] for _ in range(cut.ranks)]
    for mb in range(microbatches):
        for number, stage in enumerate(cut.stages):
            turn = _wave(cut, stage, mb, depth), depth[stage.name], mb, number
            rows[_home(cut, stage.name, mb)].append((turn, Op(stage.name, Kind.F, mb)))
    for row in rows:
        row.sort()
    return Table(cut, tuple(tuple(row) for row in _transfers(cut, rows)))


def _transfers(cut: Cut, rows: Sequence[_Row]) -> Iterator[Iterator[Op]]:
    """Each row with its sends and posts."""
    turns = [[turn for turn, _ in row] for row in rows]
    sends: list[dict[int, list[Op]]] = [{} for _ in rows]
    posts: list[dict[int, list[Op]]] = [{} for _ in rows]
    made = sorted((turn, rank, at) for rank, row in enumerate(turns) for at, turn in enumerate(row))
    for turn, rank, at in made:
        op = rows[rank][at][1]
        targets = {_home(cut, seam.target, op.mb or 0) for seam in cut.seams_from[op.stage]}
        peers = sorted(targets - {rank})
        sends[rank][at] = [op.to(peer) for peer in peers]
        for peer in peers:
            posts[peer].setdefault(bisect(turns[peer], turn), []).append(op.source(rank))
    for row, mine, theirs in zip(rows, sends, posts, strict=True):
        ops = [[*theirs.get(at, ()), op, *mine[at]] for at, (_, op) in enumerate(row)]
        yield (op for group in ops for op in group)


def _home(cut: Cut, stage: str, mb: int) -> int:
    rank = cut.stage[stage].rank
    return mb % cut.ranks if rank is None else rank


def _wave(cut: Cut, stage: Stage, mb: int, depth: dict[str, int]) -> int:
    first = all(cut.stage[seam.source].rank is None for seam in cut.seams_into[stage.name])
    if stage.rank is None and first:
        return mb - mb % cut.ranks - cut.ranks
    return mb + depth[stage.name]


def _depths(cut: Cut) -> dict[str, int]:
    """For each stage the most stages that a value goes through before it."""
    found: dict[str, int] = {}
    for stage in cut.stages:
        before = (found[seam.source] + 1 for seam in cut.seams_into[stage.name])
        found[stage.name] = max(before, default=0)
    return found
