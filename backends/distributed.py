"""One rank per process, over torch.distributed: gloo, nccl or hccl.

All traffic is on groups of fxpipe's own. gloo keeps order per pair, so it has one group for all.
The accelerator libraries run the ops of a communicator one after the other: each ordered pair of
ranks that the table uses has its own there, so that no send waits behind a receive.

When a rank fails it writes why into the store and breaks its groups; the waits of its peers end
with an error, they break theirs, and everybody raises what the store says.
"""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from fxpipe.backends.base import DifferError, LostError, Transport
from fxpipe.backends.device import device_of
from fxpipe.backends.wire import Channel, Wire
from fxpipe.costs import Costs
from fxpipe.device import Device as Speed
from fxpipe.errors import RankError
from fxpipe.table import Table

T = TypeVar("T")
_FAILURE = "fxpipe/failure"
_SEEN = "fxpipe/seen"
_TABLE = "fxpipe/table"
_PATIENCE = 5.0  # seconds that a rank waits for news about a failure


class Distributed:
    """A backend of one rank of a group of processes."""

    costs: Costs | Speed | None = None

    def __init__(self, name: str, members: Sequence[int]) -> None:
        self.name = name
        self.ranks = len(members)
        self.device = device_of(name)
        self.ahead = 1 if name == "gloo" else 0
        self.failure: str | None = None
        self._rank = list(members).index(dist.get_rank())
        self._pipelines = _pipelines(members)
        self.mine: tuple[int, ...] = (self._rank,)
        whole = self._group(range(self.ranks))
        assert whole is not None
        self._whole = whole
        everyone = tuple(range(self.ranks))
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {everyone: whole}
        self._known = {everyone}
        self._tables: list[Table] = []
        self._edges: set[tuple[int, int]] = set()
        self._channels: dict[tuple[int, int], Channel] = {}
        self._wire = Wire(self._rank, self.device.device, self._groups, self._channels)

    def close(self) -> None:
        """Let go of all groups. Nothing can be run any more."""
        self._channels.clear()
        self._groups.clear()
        del self._whole

    def costing(self, costs: Costs | Speed | None) -> "Distributed":
        """Its ops compute, whatever costs say."""
        return self

    def connect(self, table: Table) -> None:
        """Open groups and channels in one sorted order, and use each once: libraries connect at
        the first use, and in the middle of a step that can time out or deadlock. Raises RankError
        if another rank has another table."""
        self._agree(table)
        groups = {table.cut.ranks_of(stages) for stages in table.cut.groups.values()}
        for ranks in sorted(groups - self._known):
            self._known.add(ranks)
            group = self._group(ranks)
            if group is not None:
                self._groups[ranks] = group
                self._wire.reduce(torch.zeros(1, device=self.device.device), ranks, "connect")
        edges = {(r, op.peer) for r, row in enumerate(table.rows) for op in row if op.way == ">"}
        for source, target in sorted((s, t) for s, t in edges if t is not None):
            if (source, target) not in self._edges:
                self._edges.add((source, target))
                self._open(source, target)

    def _agree(self, table: Table) -> None:
        """Every rank derives its table for itself, and they must be equal."""
        if any(known is table for known in self._tables):
            return
        self.run(lambda rank, wire: wire.settle())  # or only some ranks would come here
        store, number = self._whole.get_group_store(), len(self._tables)
        self._tables.append(table)
        digest = hashlib.sha256(str(table).encode()).hexdigest()
        store.set(f"{_TABLE}/{number}/{self._rank}", digest)
        found = [store.get(f"{_TABLE}/{number}/{r}").decode() for r in range(self.ranks)]
        other = next((rank for rank, its in enumerate(found) if its != digest), None)
        if other is not None:
            raise RankError(
                f"ranks {self._rank} and {other} have different tables; give all ranks the same "
                "model, batch, schedule and costs, and the same version of Python"
            )

    def run(self, body: Callable[[int, Transport], T]) -> Mapping[int, T]:
        """Run this process's rank."""
        if self.failure is not None:
            raise RankError(f"an earlier step failed ({self.failure}); compile again to go on")
        try:
            with self._watching():
                return {self._rank: body(self._rank, self._wire)}
        except DifferError as differ:
            if differ.broken:
                self._break(str(differ))
            raise
        except LostError as lost:
            raise RankError(self._cause(lost)) from lost
        except BaseException as error:
            self._publish(str(error) or type(error).__name__)
            raise

    def _group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """A group of these ranks of the pipeline; None where this rank is not one of them.

        Every process of the world makes the groups of every pipeline, in one order: torch names a
        group by how many there are, and one that some process has skipped is never found.
        """
        mine = None
        for members in self._pipelines:
            group = dist.new_group([members[rank] for rank in ranks], backend=self.name)
            if members[self._rank] == dist.get_rank() and self._rank in ranks:
                mine = group
        return mine

    def _open(self, source: int, target: int) -> None:
        group: dist.ProcessGroup | None = self._whole
        seats = (source, target)
        if self.name != "gloo":
            group = self._group(sorted(seats))
            seats = (0, 1) if source < target else (1, 0)
        if group is None or self._rank not in (source, target):
            return
        self._channels[source, target] = Channel(group, *seats)
        if self._rank == source:
            first = torch.zeros(1, device=self.device.device)
            self._wire.sent(self._wire.send(target, [first], "connect"))
        else:
            self._wire.wait(self._wire.post(source, [((1,), torch.float32)], "connect"))

    # What follows is the end of a failed step.

    def _publish(self, failure: str) -> None:
        """Tell the others, and stay until they have read it: the store may live in this process."""
        with contextlib.suppress(RuntimeError):
            store = self._whole.get_group_store()
            store.compare_set(_FAILURE, "", failure)
            self._break(failure)
            end = time.monotonic() + _PATIENCE
            while store.add(_SEEN, 0) < self.ranks - 1 and time.monotonic() < end:
                time.sleep(0.01)

    def _cause(self, lost: LostError) -> str:
        """What the rank that failed has written; it may have died without a word."""
        failure = f"{lost}, and no rank has said why: one of them has died"
        with contextlib.suppress(RuntimeError):
            store = self._whole.get_group_store()
            end = time.monotonic() + _PATIENCE
            while not store.check([_FAILURE]) and time.monotonic() < end:
                time.sleep(0.01)
            failure = store.compare_set(_FAILURE, "", failure).decode()
            store.add(_SEEN, 1)
        self._break(failure)
        return failure

    def _break(self, failure: str) -> None:
        """Make every wait on fxpipe's groups fail, here and at the peers."""
        if self.failure is None:
            self.failure = failure
            channels = (channel.group for channel in self._channels.values())
            for group in {*self._groups.values(), *channels}:
                _break_group(group, self.name)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Break the groups when another rank fails. gloo needs no watch: its sockets close. On an
        accelerator the host does not wait for a transfer, and its device would wait for ever."""
        if self.name == "gloo":
            yield
            return
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(over,), daemon=True)
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()

    def _watch(self, over: threading.Event) -> None:
        store = self._whole.get_group_store()
        while not over.wait(0.5):
            if store.check([_FAILURE]):
                self._break(store.get(_FAILURE).decode())
                return


def _pipelines(members: Sequence[int]) -> list[tuple[int, ...]]:
    """The members of every pipeline in the world, where a mesh has several side by side."""
    found: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, tuple(members))
    return sorted({pipeline for pipeline in found if pipeline is not None})


def _break_group(group: dist.ProcessGroup, library: str) -> None:
    if library != "gloo":
        group.abort()
        return
    # gloo's own abort leaves the sockets open; a wait that times out closes all of them.
    peer = (group.rank() + 1) % group.size()
    if peer == group.rank():
        return
    with contextlib.suppress(RuntimeError):
        never = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=1)
        if never is not None:
            never.wait(timedelta(milliseconds=1))
