"""The transport of one process over torch.distributed.

One message per transfer. A single tensor arrives in place; several are packed as bytes, and copied
out again so that each lives no longer than it is needed. This is the hot path of a step: it calls
the process groups' own methods, since `isend` and `irecv` check and translate first.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.backends.base import LostError, Spec

_ALIGN = 16  # bytes: the largest element
_LAST = 1  # tag of the last exchange of a step; transfers have 0
# What every library can move; anything else travels as bytes.
_PLAIN = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)


class Channel(NamedTuple):
    """One direction between two ranks: a group, and their ranks in it."""

    group: dist.ProcessGroup
    source: int
    target: int


class Send(NamedTuple):
    """A send under way; it keeps its payload alive."""

    work: dist.Work | None
    payload: Tensor
    name: str


class Receive(NamedTuple):
    """A posted receive."""

    work: dist.Work | None
    buffer: Tensor
    specs: Sequence[Spec]
    name: str


class Wire:
    """Sends, receives and sums of this process's rank, on the groups of its backend."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        channels: Mapping[tuple[int, int], Channel],
    ) -> None:
        self._rank = rank
        self._device = device
        self._groups = groups
        self._channels = channels

    def send(self, peer: int, tensors: Sequence[Tensor], name: str) -> Send:
        """Start a send of all tensors as one payload; nothing at all if that is empty."""
        payload = _message(tensors[0]) if len(tensors) == 1 else pack(tensors, self._device)
        if not payload.numel():
            return Send(None, payload, name)
        channel = self._channels[self._rank, peer]
        try:
            return Send(channel.group.send([payload], channel.target, 0), payload, name)
        except RuntimeError as error:
            raise LostError(f"{name} could not be sent ({error})") from error

    def sent(self, handle: Send) -> None:
        """Wait for the end of a send."""
        _finish(handle.work, handle.name)

    def post(self, peer: int, specs: Sequence[Spec], name: str) -> Receive:
        """Post the receive of a payload."""
        if len(specs) == 1:
            shape, dtype = specs[0]
            buffer = torch.empty(shape, dtype=dtype, device=self._device)
        else:
            size = sum(_padded(nbytes(spec)) for spec in specs)
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        if not buffer.numel():
            return Receive(None, buffer, specs, name)
        channel = self._channels[peer, self._rank]
        try:
            work = channel.group.recv([_message(buffer)], channel.source, 0)
        except RuntimeError as error:
            raise LostError(f"{name} could not be posted ({error})") from error
        return Receive(work, buffer, specs, name)

    def wait(self, handle: Receive) -> tuple[Tensor, ...]:
        """Wait for a payload, and take it apart."""
        _finish(handle.work, handle.name)
        if len(handle.specs) == 1:
            return (handle.buffer,)
        return tuple(unpack(handle.buffer, handle.specs))

    def reduce(self, flat: Tensor, ranks: tuple[int, ...], name: str) -> Tensor:
        """Each rank sums one slice, in the order of the ranks, and everybody collects the slices.

        The library's own all-reduce adds in an order of its own, so its bits differ.
        """
        group, count = self._groups[ranks], len(ranks)
        width = -(-flat.numel() // count)
        padded = torch.nn.functional.pad(flat, (0, width * count - flat.numel()))
        parts, whole = torch.empty_like(padded), torch.empty_like(padded)
        try:
            dist.all_to_all_single(_bytes(parts), _bytes(padded), group=group)
            total, *others = parts.view(count, width).unbind()
            for other in others:
                total += other
            slices = [_bytes(piece) for piece in whole.view(count, width).unbind()]
            dist.all_gather(slices, _bytes(total), group=group)
        except RuntimeError as error:
            raise LostError(f"{name} could not be summed over ranks {ranks} ({error})") from error
        return whole[: flat.numel()]

    def share(self, numbers: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Everybody sends to everybody: half the latency of an all-gather where it is for a few."""
        group = self._groups[tuple(range(len(sizes)))]
        parts = [torch.zeros(size, dtype=torch.float64, device=self._device) for size in sizes]
        parts[self._rank] = numbers.to(self._device)
        try:
            if self._device.type == "cpu":
                self._exchange(group, parts)
            else:
                self._gather(group, parts)
        except RuntimeError as error:
            raise LostError(f"the end of the step did not reach every rank ({error})") from error
        return [part.cpu() for part in parts]

    def _exchange(self, group: dist.ProcessGroup, parts: Sequence[Tensor]) -> None:
        peers = [rank for rank in range(len(parts)) if rank != self._rank]
        works = [group.recv([parts[peer]], peer, _LAST) for peer in peers]
        works += [group.send([parts[self._rank]], peer, _LAST) for peer in peers]
        for work in works:
            work.wait()

    def _gather(self, group: dist.ProcessGroup, parts: Sequence[Tensor]) -> None:
        width = max(part.numel() for part in parts)
        padded = [torch.nn.functional.pad(part, (0, width - part.numel())) for part in parts]
        dist.all_gather([_bytes(p) for p in padded], _bytes(padded[self._rank].clone()), group)
        for part, wide in zip(parts, padded, strict=True):
            part.copy_(wide[: part.numel()])


def _finish(work: dist.Work | None, name: str) -> None:
    if work is None:
        return
    try:
        work.wait()
    except RuntimeError as error:
        raise LostError(f"{name} did not arrive ({error})") from error


def nbytes(spec: Spec) -> int:
    """Bytes of a tensor."""
    shape, dtype = spec
    return prod(shape) * dtype.itemsize


def pack(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Tensors one after the other in one buffer, each aligned."""
    size = sum(_padded(tensor.nbytes) for tensor in tensors)
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    start = 0
    for tensor in tensors:
        buffer[start : start + tensor.nbytes].copy_(_bytes(tensor))
        start += _padded(tensor.nbytes)
    return buffer


def unpack(buffer: Tensor, specs: Sequence[Spec]) -> Iterator[Tensor]:
    """What `pack` packed, each tensor in memory of its own."""
    start = 0
    for spec in specs:
        shape, dtype = spec
        piece = buffer[start : start + nbytes(spec)]
        yield piece.view(dtype).view(shape).clone()
        start += _padded(nbytes(spec))


def _message(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in _PLAIN else _bytes(tensor)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
