"""Every rank in this process: one thread each, of which only the holder of the baton runs.

The baton goes on only where a rank has to wait for something that is not there yet, and then to the
next rank that can run: the order is the same each time. If no rank can run, that is said at once.
Values are copied on their way, as on a wire, so that the bits are those of a distributed run.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fxpipe.backends.base import Key, LostError, Spec, Transport
from fxpipe.backends.device import Device
from fxpipe.costs import Costs
from fxpipe.device import Device as Speed
from fxpipe.errors import RankError
from fxpipe.table import Table

T = TypeVar("T")


class Local:
    """A backend whose ranks are threads that take turns."""

    name = "local"
    ahead = 1
    costs: Costs | Speed | None = None

    def __init__(self, ranks: int, device: torch.device | None = None) -> None:
        self.ranks = ranks
        self.mine = tuple(range(ranks))
        self.device = Device(device or torch.device("cpu"))

    def costing(self, costs: Costs | Speed | None) -> "Local":
        """Its ops compute, whatever costs say."""
        return self

    def connect(self, table: Table) -> None:
        """Nothing to open."""

    def run(self, body: Callable[[int, Transport], T]) -> Mapping[int, T]:
        """Run all ranks to their ends."""
        baton, wires = _Baton(self.ranks), _Wires()
        results: dict[int, T] = {}

        def rank_body(rank: int) -> None:
            results[rank] = body(rank, _LocalTransport(rank, baton, wires))

        baton.run(rank_body)
        return results


class _Wait(NamedTuple):
    ready: Callable[[], bool]
    what: str


class _Baton:
    """Which rank may run, and what each of the others waits for."""

    def __init__(self, ranks: int) -> None:
        self._gates = [threading.Semaphore(0) for _ in range(ranks)]
        self._waits = {rank: _Wait(lambda: True, "its turn") for rank in range(ranks)}
        self._failure: BaseException | None = None

    def run(self, body: Callable[[int], None]) -> None:
        """Run the body of each rank; the first exception of any, here."""
        if len(self._gates) == 1:
            body(0)
            return
        threads = [
            threading.Thread(target=self._rank, args=(rank, body), name=f"rank{rank}", daemon=True)
            for rank in range(len(self._gates))
        ]
        for thread in threads:
            thread.start()
        self._gates[0].release()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:
            self._stop(error)
            raise
        if self._failure is not None:
            raise self._failure

    def until(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Return when `ready()`, letting others run until then."""
        if ready():
            return
        self._waits[rank] = _Wait(ready, what)
        self._hand_over(rank)
        self._gates[rank].acquire()
        if self._failure is not None:
            raise LostError(what)

    def _rank(self, rank: int, body: Callable[[int], None]) -> None:
        self._gates[rank].acquire()
        try:
            if self._failure is None:
                body(rank)
                del self._waits[rank]
                self._hand_over(rank)
        except LostError:
            pass
        except BaseException as error:
            self._stop(error)

    def _hand_over(self, rank: int) -> None:
        count = len(self._gates)
        for other in ((rank + step) % count for step in range(1, count + 1)):
            if other in self._waits and self._waits[other].ready():
                self._gates[other].release()
                return
        if self._waits:
            self._stop(RankError(_stuck(self._waits)))

    def _stop(self, failure: BaseException) -> None:
        self._failure = self._failure or failure
        for gate in self._gates:
            gate.release()


def _stuck(waits: Mapping[int, _Wait]) -> str:
    lines = (f"rank {rank} waits for {wait.what}" for rank, wait in sorted(waits.items()))
    return (
        f"no rank can go on: {'; '.join(lines)}. The table lets ranks wait for each other; "
        "`fxpipe.verify` names the op"
    )


class _Wires:
    """What is on its way between the ranks."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}
        self.sent: dict[tuple[int, int], int] = {}
        self.posted: dict[tuple[int, int], int] = {}
        self.sums: dict[tuple[str, int], dict[int, Tensor]] = {}
        self.totals: dict[tuple[str, int], Tensor] = {}
        self.shared: dict[int, Tensor] = {}


class _Receive(NamedTuple):
    message: tuple[int, int, int]
    specs: Sequence[Spec]
    name: str


class _Send(NamedTuple):
    source: int
    target: int
    number: int
    name: str


class _LocalTransport:
    """The transport of one thread."""

    def __init__(self, rank: int, baton: _Baton, wires: _Wires) -> None:
        self._rank = rank
        self._baton = baton
        self._wires = wires
        self._rounds: dict[str, int] = {}

    def send(self, peer: int, tensors: Sequence[Tensor], name: str) -> _Send:
        number = _next(self._wires.sent, (self._rank, peer))
        copies = tuple(t.clone(memory_format=torch.contiguous_format) for t in tensors)
        self._wires.messages[self._rank, peer, number] = copies
        return _Send(self._rank, peer, number, name)

    def sent(self, handle: _Send) -> None:
        """Wait until the receive is posted, as on a wire: no rank runs far ahead of its readers."""
        posted, pair = self._wires.posted, (handle.source, handle.target)
        ready = lambda: posted.get(pair, -1) >= handle.number  # noqa: E731
        self._baton.until(self._rank, ready, f"the receive of {handle.name}")

    def post(self, peer: int, specs: Sequence[Spec], name: str) -> _Receive:
        number = _next(self._wires.posted, (peer, self._rank))
        return _Receive((peer, self._rank, number), specs, name)

    def wait(self, handle: _Receive) -> tuple[Tensor, ...]:
        messages = self._wires.messages
        self._baton.until(self._rank, lambda: handle.message in messages, handle.name)
        tensors = messages.pop(handle.message)
        found = [(tuple(t.shape), t.dtype) for t in tensors]
        if found != list(handle.specs):
            raise ValueError(f"{handle.name} brought {found}; expected {list(handle.specs)}")
        return tensors

    def reduce(self, flat: Tensor, ranks: tuple[int, ...], name: str) -> Tensor:
        key = (name, _next(self._rounds, name))
        parts = self._wires.sums.setdefault(key, {})
        parts[self._rank] = flat
        self._baton.until(
            self._rank, lambda: len(parts) == len(ranks), f"the other ranks of {name}"
        )
        if key not in self._wires.totals:
            total = parts[ranks[0]].clone()
            for rank in ranks[1:]:
                total += parts[rank]
            self._wires.totals[key] = total
        return self._wires.totals[key].clone()

    def agree(self, data: Tensor) -> Tensor:
        """All ranks have one process's data."""
        return data

    def pledge(self, number: int, more: Sequence[int]) -> None:
        """All ranks are called by one process."""

    def settle(self) -> None:
        """There is nothing to compare."""

    def expect(self, sizes: Sequence[int]) -> int:
        return len(sizes)

    def share(self, handle: int, numbers: Tensor) -> Tensor:
        shared = self._wires.shared
        shared[self._rank] = numbers
        self._baton.until(self._rank, lambda: len(shared) == handle, "the end of the step")
        return torch.cat([shared[rank] for rank in range(handle)])

    def collect(self, tensors: Mapping[Key, Tensor], to: int | None) -> dict[Key, Tensor]:
        return dict(tensors)  # all ranks are in this process, which puts them together


_Key = TypeVar("_Key")


def _next(counts: dict[_Key, int], key: _Key) -> int:
    counts[key] = counts.get(key, -1) + 1
    return counts[key]
