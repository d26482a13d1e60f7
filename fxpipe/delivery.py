"""What a transfer carries, and when its sender can know that it has arrived.

A sent tensor has to stay alive until it has left, and no transport says cheaply when that is. But
the table says it: rank 0 has received llm1.B0, which rank 1 made after it had received llm0.F0; so
the send of llm0.F0 is over, and its tensor can go. No store of pending sends, no polling.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from fxpipe.cut import Kind, Seam
from fxpipe.errors import ScheduleError
from fxpipe.table import Op, Table, inputs

if TYPE_CHECKING:
    from fxpipe.stageop import Variants


def carried(table: Table, transfer: Op, rank: int) -> tuple[Seam, ...]:
    """The seams whose bundles a transfer in the row of `rank` moves, in packing order.

    `vision.F1>0` carries vision's values for every stage whose F1 rank 0 runs; `llm0.B1>2` the
    gradients for every stage before llm0 whose backward op for microbatch 1 rank 2 runs.
    """
    place, mb = table.place, transfer.mb
    reader = transfer.peer if transfer.way == ">" else rank
    if transfer.kind is Kind.F:
        seams = table.cut.seams_from[transfer.stage]
        return tuple(s for s in seams if place[Op(s.target, Kind.F, mb)] == reader)
    seams = tuple(seam for seam in table.cut.seams_into[transfer.stage] if seam.grads)
    return tuple(s for s in seams if place[backward_of(table, s.source, mb)] == reader)


def backward_of(table: Table, stage: str, mb: int | None) -> Op:
    """The op that reads the gradients of what a stage made: its B, or W where it has no B."""
    kind = Kind.B if Kind.B in table.cut.stage[stage].kinds else Kind.W
    return Op(stage, kind, mb)


def check_apart(table: Table, variants: "Variants") -> None:
    """A backward may run on another rank than its forward only if nothing at all is kept for it.
    Raises ScheduleError."""
    for stage in table.cut.stages:
        if table.cut.keeps(stage.name) or len(stage.kinds) < 2:
            continue
        graphs = [variant[stage.name] for variant in variants if stage.name in variant]
        if not any(x.kept_b or x.kept_w for x in graphs):
            continue
        for mb in range(table.microbatches):
            forward, back = (Op(stage.name, kind, mb) for kind in stage.kinds[:2])
            if table.place[forward] != table.place[back]:
                raise ScheduleError(
                    f"{back} is on rank {table.place[back]}, but {forward}, on rank "
                    f"{table.place[forward]}, keeps what chance has made for it; give {stage.name} "
                    "owners that hold for both, such as owners='round_robin'"
                )


@lru_cache(maxsize=4)
def arrivals(table: Table) -> tuple[Mapping[int, tuple[int, ...]], ...]:
    """For each rank: index of an op of its row -> indices of the sends that are over by then.

    A walk of the rows in dependency order, in which each rank carries how many ops of every other
    rank it knows to be done (a vector clock); a transfer brings the sender's knowledge along. Where
    nothing ever comes back, as from a frozen encoder, a send waits for the oldest of a window: no
    deadlock, since the table holds under a transport whose sends block (`rendezvous`).
    """
    walk = _Walk(table)
    runnable = list(range(len(table.rows)))
    while runnable:
        runnable = [other for rank in runnable for other in walk.advance(rank)]
    return tuple(walk.over)


class _Walk:
    """The state of the walk: where each rank is, and what each knows of the others."""

    def __init__(self, table: Table) -> None:
        ranks = len(table.rows)
        self.over: list[dict[int, tuple[int, ...]]] = [{} for _ in range(ranks)]
        self._table = table
        self._window = 8 + 2 * ranks
        self._known = [[0] * ranks for _ in range(ranks)]
        self._posted: list[set[Op]] = [set() for _ in range(ranks)]
        self._sent: dict[tuple[Op, int], tuple[int, ...]] = {}
        self._read: dict[tuple[Op, int], int] = {}
        self._pending: list[dict[int, dict[int, Op]]] = [defaultdict(dict) for _ in range(ranks)]
        self._waiting: set[tuple[Op, int]] = set()

    def advance(self, rank: int) -> Iterator[int]:
        """Run the row of a rank as far as it goes; the ranks that this lets go on."""
        row, known = self._table.rows[rank], self._known[rank]
        while known[rank] < len(row):
            index = known[rank]
            op = row[index]
            if op.way == ">" and op.peer is not None:
                yield from self._send(rank, index, op.value, op.peer)
            elif op.way == "<":
                self._posted[rank].add(op.value)
            elif not self._run(rank, index, op):
                return
            known[rank] += 1

    def _send(self, rank: int, index: int, value: Op, peer: int) -> Iterator[int]:
        pending = self._pending[rank][peer]
        if len(pending) == self._window:
            oldest = next(iter(pending))
            del pending[oldest]
            self.over[rank][index] = (oldest,)
        pending[index] = value
        self._sent[value, peer] = tuple(self._known[rank])
        if (value, peer) in self._waiting:
            self._waiting.remove((value, peer))
            yield peer

    def _run(self, rank: int, index: int, op: Op) -> bool:
        posted, known = self._posted[rank], self._known[rank]
        awaited = [value for value in inputs(op, self._table.cut) if value in posted]
        for value in awaited:
            if (value, rank) not in self._sent:
                self._waiting.add((value, rank))
                return False
        for value in awaited:
            posted.discard(value)
            self._read[value, rank] = index
            known[:] = map(max, known, self._sent.pop((value, rank)))
        over = tuple(self._arrived(rank)) if awaited else ()
        if over:
            self.over[rank][index] = over
        return True

    def _arrived(self, rank: int) -> Iterator[int]:
        for peer, pending in self._pending[rank].items():
            done = self._known[rank][peer]
            for index, value in list(pending.items()):
                if self._read.get((value, peer), done) < done:
                    del pending[index]
                    yield index
