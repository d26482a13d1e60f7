"""gloo processes on an emulated machine: ops and links take what a table of costs says.

Ops sleep (`fxpipe.emulation`). A message says when it has crossed its emulated link, and whoever
receives it waits until then; real bytes travel meanwhile, so that a link is never faster than gloo
on this machine. All ranks start a step at one instant. For processes of one machine, which share a
clock.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxpipe.backends.base import Key, Spec, Transport
from fxpipe.backends.distributed import Distributed
from fxpipe.costs import Costs
from fxpipe.device import Device
from fxpipe.emulation import precise_sleep, sleep_until
from fxpipe.errors import BackendError
from fxpipe.table import Op, Table

T = TypeVar("T")
_LEAD = 0.005  # seconds from the agreement on a start to the start
_STAMP: Spec = ((1,), torch.float64)


class Emulated:
    """A backend of one rank of a group of gloo processes. costs: of a table, or of a device."""

    name = "emulated"

    def __init__(self, inner: Distributed, costs: Costs | Device | None) -> None:
        """Raises BackendError without costs."""
        if costs is None:
            raise BackendError(
                "backend 'emulated' needs to know what ops take: pass costs=, a fxpipe.costs.Costs "
                "or a fxpipe.device.Device"
            )
        self.costs: Costs | Device | None = costs
        self.ranks, self.mine = inner.ranks, inner.mine
        self.device, self.ahead = inner.device, inner.ahead
        self._inner = inner

    def costing(self, costs: Costs | Device | None) -> "Emulated":
        """The same processes with other costs."""
        return Emulated(self._inner, costs)

    def connect(self, table: Table) -> None:
        """Open what the table needs."""
        self._inner.connect(table)

    def run(self, body: Callable[[int, Transport], T]) -> Mapping[int, T]:
        """Run this process's rank, from an instant that all agree on."""
        precise_sleep()
        costs = self.costs if isinstance(self.costs, Costs) else Costs({})

        def emulated(rank: int, wire: Transport) -> T:
            wire.agree(torch.zeros(1, dtype=torch.uint8))  # every rank has come
            now = torch.tensor([time.perf_counter() + _LEAD], dtype=torch.float64)
            start = wire.agree(now.view(torch.uint8)).view(torch.float64)
            sleep_until(start.item())
            return body(rank, Links(wire, costs))

        return self._inner.run(emulated)


class Links:
    """A transport on emulated links: one from this rank to each other, as in the simulator."""

    def __init__(self, inner: Transport, costs: Costs) -> None:
        self._inner, self._costs = inner, costs
        self._free: dict[int, float] = {}

    def send(self, peer: int, tensors: Sequence[Tensor], name: str) -> Any:
        """Start to send, with the time at which it will have crossed the link."""
        value = Op.parse(name).value
        begin = max(time.perf_counter(), self._free.get(peer, 0.0))
        self._free[peer] = begin + self._costs.occupies(value)
        stamp = torch.tensor([self._free[peer] + self._costs.latency], dtype=torch.float64)
        return self._inner.send(peer, [stamp, *tensors], name)

    def sent(self, handle: Any) -> None:
        """Wait for the end of a send."""
        self._inner.sent(handle)

    def post(self, peer: int, specs: Sequence[Spec], name: str) -> Any:
        """Post a receive."""
        return self._inner.post(peer, [_STAMP, *specs], name)

    def wait(self, handle: Any) -> Sequence[Tensor]:
        """Wait for a receive, and until it has crossed the link."""
        stamp, *tensors = self._inner.wait(handle)
        sleep_until(stamp.item())
        return tensors

    def reduce(self, flat: Tensor, ranks: tuple[int, ...], name: str) -> Tensor:
        """Sum over ranks."""
        return self._inner.reduce(flat, ranks, name)

    def agree(self, data: Tensor) -> Tensor:
        """What rank 0 has."""
        return self._inner.agree(data)

    def pledge(self, number: int, more: Sequence[int]) -> None:
        """Begin to compare a number."""
        self._inner.pledge(number, more)

    def settle(self) -> None:
        """Wait for the comparison."""
        self._inner.settle()

    def expect(self, sizes: Sequence[int]) -> Any:
        """Get ready for the last exchange."""
        return self._inner.expect(sizes)

    def share(self, handle: Any, numbers: Tensor) -> Tensor:
        """The last exchange."""
        return self._inner.share(handle, numbers)

    def collect(self, tensors: Mapping[Key, Tensor], to: int | None) -> dict[Key, Tensor]:
        """Nothing: no op makes an output."""
        return self._inner.collect(tensors, to)
