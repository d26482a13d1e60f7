"""What a backend is: a device, ranks, and a transport between them. A transport has

    send(peer, tensors, name) -> handle     starts at once, never waits for the peer
    sent(handle)                            waits until the tensors have left
    post(peer, specs, name) -> handle       receives come in the order of the peer's sends
    wait(handle) -> tensors                 each in memory of its own, contiguous
    reduce(flat, ranks, name) -> flat       summed in the order of the ranks: the same bits anywhere
    agree(data) -> data                     uint8; rank 0's, on every rank
    pledge(number, more)                    nothing is exchanged before all have told the same
    settle()                                waits until all have
    expect(sizes) -> handle                 before the first op: get ready for the last exchange
    share(handle, numbers) -> numbers       float64; all ranks', one after the other
    collect(tensors, to) -> tensors         by key; all ranks', on one rank or on all

Handles are the transport's own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fxpipe.backends.device import Device
from fxpipe.costs import Costs
from fxpipe.device import Device as Speed
from fxpipe.table import Table

Spec = tuple[tuple[int, ...], torch.dtype]
Key = tuple[int, int]
T = TypeVar("T")


class LostError(Exception):
    """This rank cannot go on, because another one has stopped."""


class DifferError(Exception):
    """Ranks have pledged different numbers.

    more: what each rank gave beside its own; broken: whether some have posted receives, which the
    next step would find
    """

    def __init__(self, more: Sequence[Sequence[int]], broken: bool) -> None:
        super().__init__("ranks were not called alike")
        self.more = more
        self.broken = broken


class Transport(Protocol):
    """How one rank exchanges tensors with the others. Handles are the transport's own."""

    def send(self, peer: int, tensors: Sequence[Tensor], name: str) -> Any:
        """Start to send."""
        ...

    def sent(self, handle: Any) -> None:
        """Wait for the end of a send."""
        ...

    def post(self, peer: int, specs: Sequence[Spec], name: str) -> Any:
        """Post a receive."""
        ...

    def wait(self, handle: Any) -> Sequence[Tensor]:
        """Wait for a receive."""
        ...

    def reduce(self, flat: Tensor, ranks: tuple[int, ...], name: str) -> Tensor:
        """Sum a one-dimensional tensor over ranks, this one among them."""
        ...

    def agree(self, data: Tensor) -> Tensor:
        """What rank 0 has; every rank calls it, with as many bytes."""
        ...

    def pledge(self, number: int, more: Sequence[int]) -> None:
        """Begin to compare a number of 31 bits with every rank's, which all call it. Whatever this
        rank exchanges next waits for the others' and raises DifferError if one has another."""
        ...

    def settle(self) -> None:
        """Wait for the end of that comparison now, if there is one."""
        ...

    def expect(self, sizes: Sequence[int]) -> Any:
        """Get ready for `share`, in which each rank will give so many numbers."""
        ...

    def share(self, handle: Any, numbers: Tensor) -> Tensor:
        """Give every rank the numbers of all, in rank order; the last exchange of a step."""
        ...

    def collect(self, tensors: Mapping[Key, Tensor], to: int | None) -> dict[Key, Tensor]:
        """Give rank `to`, or every rank, the tensors of all; their shapes need not be known."""
        ...


class Backend(Protocol):
    """Where ranks run.

    ahead: how many receives of a channel may be posted before the row asks for them. On gloo a
    transfer starts only when its receive is posted, and a posted receive holds up nothing; on an
    accelerator it occupies the device, and the table's own slots are the right ones.
    costs: what ops take on an emulated machine; None where they compute.
    """

    name: str
    ranks: int
    mine: tuple[int, ...]
    device: Device
    ahead: int
    costs: Costs | Speed | None

    def costing(self, costs: Costs | Speed | None) -> "Backend":
        """The same processes, emulating a machine of other costs; itself where ops compute."""
        ...

    def connect(self, table: Table) -> None:
        """Open what the table needs: channels, groups. Every rank calls it with the same table."""
        ...

    def run(self, body: Callable[[int, Transport], T]) -> Mapping[int, T]:
        """Run `body(rank, transport)` for the ranks of this process; its results by rank.

        Raises RankError on every rank if it raises on any.
        """
        ...


def exchanged(backend: Backend, numbers: Sequence[int]) -> list[list[int]]:
    """Each rank's numbers, by rank. Every rank calls it, in a process of its own."""
    mine = torch.tensor(numbers, device=backend.device.device)

    def body(rank: int, transport: Transport) -> Sequence[tuple[int, list[int]]]:
        found = transport.collect({(rank, 0): mine}, None)
        return sorted((who, numbers.tolist()) for (who, _), numbers in found.items())

    (found,) = backend.run(body).values()
    return [numbers for _, numbers in found]
