"""The transport of one process over torch.distributed.

One message per transfer. A single tensor arrives in place; several are packed as bytes, and copied
out again so that each lives no longer than it is needed. This is the hot path of a step: it calls
the process groups' own methods, since `isend` and `irecv` check and translate first.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.backends.base import DifferError, Key, LostError, Spec

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


# Handles: the work, if there is anything to do; what it must keep alive; the name of the transfer,
# or how many numbers each rank shares.
Send = tuple[dist.Work | None, Tensor, str]
Receive = tuple[dist.Work | None, Tensor, Sequence[Spec], str]
Expected = tuple[list[dist.Work], list[Tensor], Sequence[int]]


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
        self._size = max(max(ranks) for ranks in groups) + 1
        self._device = device
        self._groups = groups
        self._channels = channels
        self._pledged: tuple[Any, Tensor, Sequence[int]] | None = None
        self._posted = False  # whether a receive was posted since the last pledge

    def send(self, peer: int, tensors: Sequence[Tensor], name: str) -> Send:
        """Start a send of all tensors as one payload; nothing at all if that is empty."""
        self.settle()
        payload = _message(tensors[0]) if len(tensors) == 1 else pack(tensors, self._device)
        if not payload.nbytes:
            return None, payload, name
        channel = self._channels[self._rank, peer]
        try:
            return channel.group.send([payload], channel.target, 0), payload, name
        except RuntimeError as error:
            raise LostError(f"{name} could not be sent ({error})") from error

    def sent(self, handle: Send) -> None:
        """Wait for the end of a send."""
        work, _, name = handle
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise LostError(f"{name} did not arrive ({error})") from error

    def post(self, peer: int, specs: Sequence[Spec], name: str) -> Receive:
        """Post the receive of a payload."""
        if len(specs) == 1:
            shape, dtype = specs[0]
            buffer = torch.empty(shape, dtype=dtype, device=self._device)
        else:
            size = sum(_padded(nbytes(spec)) for spec in specs)
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        if not buffer.nbytes:
            return None, buffer, specs, name
        channel, self._posted = self._channels[peer, self._rank], True
        try:
            work = channel.group.recv([_message(buffer)], channel.source, 0)
        except RuntimeError as error:
            raise LostError(f"{name} could not be posted ({error})") from error
        return work, buffer, specs, name

    def wait(self, handle: Receive) -> tuple[Tensor, ...]:
        """Wait for a payload, and take it apart."""
        self.settle()
        work, buffer, specs, name = handle
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise LostError(f"{name} did not arrive ({error})") from error
        return (buffer,) if len(specs) == 1 else tuple(unpack(buffer, specs))

    def reduce(self, flat: Tensor, ranks: tuple[int, ...], name: str) -> Tensor:
        """Each rank sums one slice, in the order of the ranks, and everybody collects the slices.

        The library's own all-reduce adds in an order of its own, so its bits differ.
        """
        self.settle()
        group, count = self._groups[ranks], len(ranks)
        width = -(-flat.numel() // count)
        rest = width * count - flat.numel()
        padded = torch.nn.functional.pad(flat, (0, rest)) if rest else flat
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

    def agree(self, data: Tensor) -> Tensor:
        """What rank 0 has."""
        self.settle()
        group = max(self._groups.items(), key=lambda item: len(item[0]))[1]
        found = data.to(self._device)
        try:
            dist.broadcast(found, group=group, group_src=0)
        except RuntimeError as error:
            raise LostError(f"rank 0 did not reach every rank ({error})") from error
        return found.cpu()

    def pledge(self, number: int, more: Sequence[int]) -> None:
        """By the greatest and the least of any: beside the first ops, but on a device at once."""
        ends = torch.tensor([number, -number], dtype=torch.int32, device=self._device)
        group = self._groups[tuple(range(self._size))]
        work = dist.all_reduce(ends, dist.ReduceOp.MAX, group, async_op=True)
        self._pledged, self._posted = (work, ends, more), False
        if self._device.type != "cpu":
            self.settle()

    def settle(self) -> None:
        """Every exchange begins with it."""
        if self._pledged is None:
            return
        (work, ends, more), self._pledged = self._pledged, None
        try:
            work.wait()
        except RuntimeError as error:
            raise LostError(f"a rank has not begun the step ({error})") from error
        most, least = ends.tolist()
        if most != -least:
            mine = torch.tensor([int(self._posted), *more], device=self._device)
            found = self.collect({(self._rank, 0): mine}, None)
            told = [found[rank, 0].tolist() for rank in range(self._size)]
            raise DifferError([own[1:] for own in told], any(own[0] for own in told))

    def expect(self, sizes: Sequence[int]) -> Expected:
        """On CPUs the last rank collects: in a pipeline it starts late, and has time to post."""
        if self._device.type != "cpu" or self._rank != len(sizes) - 1:
            return [], [], sizes
        group, self._posted = self._groups[tuple(range(len(sizes)))], True
        parts = [torch.empty(size, dtype=torch.float64) for size in sizes[:-1]]
        works = [group.recv([part], rank, _LAST) for rank, part in enumerate(parts)]
        return works, parts, sizes

    def share(self, handle: Expected, numbers: Tensor) -> Tensor:
        """Collect and hand out; on devices, where a rank must not wait for one peer, gather."""
        self.settle()
        group = self._groups[tuple(range(len(handle[-1])))]
        try:
            if self._device.type != "cpu":
                return self._gather(group, handle[-1], numbers.to(self._device)).cpu()
            return self._collect(group, handle, numbers)
        except RuntimeError as error:
            raise LostError(f"the end of the step did not reach every rank ({error})") from error

    def _collect(
        self,
        group: dist.ProcessGroup,
        handle: Expected,
        numbers: Tensor,
    ) -> Tensor:
        works, parts, sizes = handle
        last = len(sizes) - 1
        if self._rank == last:
            for work in works:
                work.wait()
            everything = torch.cat([*parts, numbers])
            works = [group.send([everything], rank, _LAST) for rank in range(last)]
        else:
            everything = torch.empty(sum(sizes), dtype=torch.float64)
            works = [group.recv([everything], last, _LAST), group.send([numbers], last, _LAST)]
        for work in works:
            work.wait()
        return everything

    def _gather(self, group: dist.ProcessGroup, sizes: Sequence[int], numbers: Tensor) -> Tensor:
        mine = torch.nn.functional.pad(numbers, (0, max(sizes) - numbers.numel()))
        padded = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather([_bytes(wide) for wide in padded], _bytes(mine), group)
        return torch.cat([wide[:size] for wide, size in zip(padded, sizes, strict=True)])

    def collect(self, tensors: Mapping[Key, Tensor], to: int | None) -> dict[Key, Tensor]:
        """First what there is, then one message from each rank that has anything."""
        self.settle()
        group = self._groups[tuple(range(self._size))]
        mine = {key: (tuple(value.shape), value.dtype) for key, value in tensors.items()}
        theirs: list[dict[Key, Spec]] = [{} for _ in range(self._size)]
        try:
            dist.all_gather_object(theirs, mine, group)
            found = dict(tensors) if to in (None, self._rank) else {}
            for rank, specs in enumerate(theirs):
                reads = rank != self._rank and to in (None, self._rank)
                if specs and (reads or rank == self._rank != to):
                    payload = self._moved(group, rank, tensors, specs.values(), to)
                if specs and reads:
                    found.update(zip(specs, unpack(payload, list(specs.values())), strict=True))
        except RuntimeError as error:
            raise LostError(f"the outputs did not reach every rank ({error})") from error
        return found

    def _moved(
        self,
        group: dist.ProcessGroup,
        rank: int,
        tensors: Mapping[Key, Tensor],
        specs: Iterable[Spec],
        to: int | None,
    ) -> Tensor:
        """What a rank has, in one buffer, on that rank and on those that it comes to."""
        if self._rank == rank:
            plain = [value.resolve_conj().resolve_neg() for value in tensors.values()]
            payload = pack(plain, self._device)
        else:
            size = sum(_padded(nbytes(spec)) for spec in specs)
            payload = torch.empty(size, dtype=torch.uint8, device=self._device)
        if not payload.nbytes:
            return payload
        if to is None:
            dist.broadcast(payload, group=group, group_src=rank)
        elif self._rank == rank:
            group.send([payload], to, _LAST).wait()
        else:
            group.recv([payload], rank, _LAST).wait()
        return payload


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
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.dtype in _PLAIN else _bytes(tensor)


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    # One element counts as contiguous whatever its stride is; a change of dtype does not.
    plain = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    return plain.view(torch.uint8)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
