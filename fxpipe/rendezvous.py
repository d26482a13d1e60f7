"""Does a table end under the strictest transport? One walk, linear in the number of ops.

A send completes when its receive is posted; one first-in-first-out channel per ordered pair of
ranks; posting never blocks; but a compute op may not start while its rank has a transfer, sent or
posted earlier, whose other end has not been reached. Every real library allows more than this, so
a table that ends here ends everywhere. What a compute op reads must be made, on whichever rank,
which is all that is asked of a table without transfers. R waits for all its ranks.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping

from fxpipe.cut import Kind
from fxpipe.table import Op, Table

_Channel = tuple[int, int]


def stuck(table: Table) -> Iterator[tuple[int, int, str]]:
    """(rank, index in its row, reason) of each rank that cannot reach the end of its row."""
    walk = _walked(table)
    for rank, row in enumerate(table.rows):
        if walk.at[rank] < len(row):
            yield rank, walk.at[rank], walk.reason(rank, row[walk.at[rank]])


def execution(table: Table) -> Mapping[int, int]:
    """The number of each value that can be made (`table.numbered`), and its turn: one order in
    which the ops of all ranks can run, one after the other."""
    return {number: turn for turn, number in enumerate(_walked(table).made)}


def _walked(table: Table) -> "_Walk":
    walk = _Walk(table)
    ready = deque(range(len(table.rows)))
    while ready:
        ready.extend(walk.advance(ready.popleft()))
    return walk


class _Walk:
    """Where each rank is, what is made, and the transfers of which one end has been reached."""

    def __init__(self, table: Table) -> None:
        self.table, self.numbered = table, table.numbered
        self.reads = table.numbered.reads
        self.at = [0] * len(table.rows)
        self.made: dict[int, None] = {}  # in the order of the walk
        self.there: dict[int, set[int]] = defaultdict(set)
        self.lone: dict[tuple[_Channel, str], deque[int]] = defaultdict(deque)
        self.unmatched: list[dict[int, None]] = [{} for _ in table.rows]  # places in the row
        self.waiting: dict[int, list[int]] = defaultdict(list)

    def advance(self, rank: int) -> Iterator[int]:
        """Run a rank until it is blocked; yields the ranks that it unblocks."""
        row, numbers = self.table.rows[rank], self.numbered.rows[rank]
        while (at := self.at[rank]) < len(row):
            op, number = row[at], numbers[at]
            if op.way:
                yield from self._transfer(op, rank, at)
            elif self.unmatched[rank] or self._lacks(op, number, rank):
                return
            else:
                self.made[number] = None
                if number in self.waiting:
                    yield from self.waiting.pop(number)
            self.at[rank] += 1

    def reason(self, rank: int, op: Op) -> str:
        """Why a rank cannot run an op."""
        row, number = self.table.rows[rank], self.numbered.rows[rank][self.at[rank]]
        if self.unmatched[rank]:
            lone = " ".join(str(row[at]) for at in self.unmatched[rank])
            return f"{lone} has not met its other end"
        if op.kind is Kind.R:
            return f"only ranks {sorted(self.there[number])} have reached {op}"
        lacks = [
            str(self.numbered.op(x)) for x in self.numbered.inputs(number) if x not in self.made
        ]
        return f"{op} reads {', '.join(lacks)}, which is not made"

    def _transfer(self, op: Op, rank: int, at: int) -> Iterator[int]:
        """Match with the longest waiting other end of the channel, or wait for it."""
        peer = -1 if op.peer is None else op.peer
        channel = (rank, peer) if op.way == ">" else (peer, rank)
        other = self.lone[channel, "<" if op.way == ">" else ">"]
        if not other:
            self.lone[channel, op.way].append(at)
            self.unmatched[rank][at] = None
            return
        self.unmatched[peer].pop(other.popleft())
        if not self.unmatched[peer]:
            yield peer

    def _lacks(self, op: Op, number: int, rank: int) -> bool:
        """Whether a compute op or R must wait for others; who ends the wait finds the rank."""
        if op.kind is Kind.R:
            return self._gathering(op, number, rank)
        for step in self.reads[number % len(self.reads)]:
            if number + step not in self.made:
                self.waiting[number + step].append(rank)
                return True
        return False

    def _gathering(self, op: Op, number: int, rank: int) -> bool:
        self.there[number].add(rank)
        group = self.table.cut.groups.get(op.stage, ())
        if len(self.there[number]) < len(self.table.cut.ranks_of(group)):
            self.waiting[number].append(rank)
            return True
        return False
