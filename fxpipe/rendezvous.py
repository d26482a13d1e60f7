"""Does a table end under the strictest transport? One walk, linear in the number of ops.

A send completes when its receive is posted; one first-in-first-out channel per ordered pair of
ranks; posting never blocks; but a compute op may not start while its rank has a transfer, sent or
posted earlier, whose other end has not been reached. Every real library allows more than this, so
a table that ends here ends everywhere. What a compute op reads must be made, on whichever rank,
which is all that is asked of a table without transfers. R waits for all its ranks.
"""

from collections import defaultdict, deque
from collections.abc import Iterator

from fxpipe.cut import Kind
from fxpipe.table import Op, Table, inputs

_Channel = tuple[int, int]


def stuck(table: Table) -> Iterator[tuple[int, int, str]]:
    """(rank, index in its row, reason) of each rank that cannot reach the end of its row."""
    walk = _Walk(table)
    ready = deque(range(len(table.rows)))
    while ready:
        ready.extend(walk.advance(ready.popleft()))
    for rank, row in enumerate(table.rows):
        if walk.at[rank] < len(row):
            yield rank, walk.at[rank], walk.reason(rank, row[walk.at[rank]])


class _Walk:
    """Where each rank is, what is made, and the transfers of which one end has been reached."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.at = [0] * len(table.rows)
        self.made: set[Op] = set()
        self.there: dict[Op, set[int]] = defaultdict(set)
        self.lone: dict[tuple[_Channel, str], deque[tuple[Op, int]]] = defaultdict(deque)
        self.unmatched: list[dict[Op, None]] = [{} for _ in table.rows]
        self.waiting: dict[Op, list[int]] = defaultdict(list)

    def advance(self, rank: int) -> Iterator[int]:
        """Run a rank until it is blocked; yields the ranks that it unblocks."""
        row = self.table.rows[rank]
        while self.at[rank] < len(row):
            op = row[self.at[rank]]
            if op.way:
                yield from self._transfer(op, rank)
            elif self._blocked(op, rank):
                return
            else:
                self.made.add(op)
                yield from self.waiting.pop(op, ())
            self.at[rank] += 1

    def reason(self, rank: int, op: Op) -> str:
        """Why a rank cannot run an op."""
        if self.unmatched[rank]:
            return f"{' '.join(map(str, self.unmatched[rank]))} has not met its other end"
        if op.kind is Kind.R:
            return f"only ranks {sorted(self.there[op])} have reached {op}"
        lacks = [str(x) for x in inputs(op, self.table.cut) if x not in self.made]
        return f"{op} reads {', '.join(lacks)}, which is not made"

    def _transfer(self, op: Op, rank: int) -> Iterator[int]:
        """Match with the longest waiting other end of the channel, or wait for it."""
        peer = -1 if op.peer is None else op.peer
        channel = (rank, peer) if op.way == ">" else (peer, rank)
        other = self.lone[channel, "<" if op.way == ">" else ">"]
        if not other:
            self.lone[channel, op.way].append((op, rank))
            self.unmatched[rank][op] = None
            return
        match, _ = other.popleft()
        self.unmatched[peer].pop(match, None)
        if not self.unmatched[peer]:
            yield peer

    def _blocked(self, op: Op, rank: int) -> bool:
        """Whether a compute op or R must wait; whoever ends the wait finds the rank."""
        if self.unmatched[rank]:
            return True
        if op.kind is Kind.R:
            return self._gathering(op, rank)
        lacks = next((x for x in inputs(op, self.table.cut) if x not in self.made), None)
        if lacks is not None:
            self.waiting[lacks].append(rank)
        return lacks is not None

    def _gathering(self, op: Op, rank: int) -> bool:
        self.there[op].add(rank)
        group = self.table.cut.groups.get(op.stage, ())
        if len(self.there[op]) < len(self.table.cut.ranks_of(group)):
            self.waiting[op].append(rank)
            return True
        return False
