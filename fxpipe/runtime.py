"""One step: the programs of this process's ranks on a backend; losses, gradients, timeline.

    run_step(backend, {rank: Program}, [Bound], dtype) -> Step

Nothing here decides an order. Nothing is written to `.grad`: a step that fails leaves no trace.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fxpipe.backends import Backend, LostError, Transport
from fxpipe.bind import Bound
from fxpipe.cut import Kind
from fxpipe.errors import RankError
from fxpipe.program import Program
from fxpipe.stageop import Grads
from fxpipe.table import Op, Table
from fxpipe.timeline import Peak, Span, Timeline

# perf_counter counts from a moment of its own; with this it is the time of day, as on other hosts.
_EPOCH = time.time() - time.perf_counter()


class Meter:
    """What one rank keeps of one stage: units (microbatches) and bytes, each storage once."""

    def __init__(self) -> None:
        self.peak_units = 0
        self.peak_bytes = 0
        self._units: dict[int, int] = {}
        self._storages: dict[int, tuple[int, int]] = {}  # address -> uses, bytes
        self._bytes = 0

    def take(self, mb: int, kept: Sequence[Any], outside: Sequence[Any]) -> "Kept":
        """The list that counts while it lives. Parameters and inputs are outside: not kept."""
        ignored = {_address(value) for value in outside if isinstance(value, Tensor)}
        tensors = (value for value in kept if isinstance(value, Tensor))
        storages = {_address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        counted = [address for address in storages if address not in ignored]
        for address in counted:
            uses, size = self._storages.get(address, (0, storages[address]))
            self._storages[address] = (uses + 1, size)
            self._bytes += 0 if uses else size
        self._units[mb] = self._units.get(mb, 0) + 1
        self.peak_units = max(self.peak_units, len(self._units))
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        return Kept(kept, self, mb, counted)

    def free(self, storages: list[int]) -> None:
        """The op that reads them has started, and lets go of each as it goes."""
        while storages:
            address = storages.pop()
            uses, size = self._storages.pop(address)
            if uses > 1:
                self._storages[address] = (uses - 1, size)
            else:
                self._bytes -= size

    def end(self, mb: int) -> None:
        """A list is gone."""
        self._units[mb] -= 1
        if not self._units[mb]:
            del self._units[mb]


class Kept(list[Any]):
    """A list of kept values that tells its meter when it is cleared and when it dies."""

    __slots__ = ("_mb", "_meter", "_storages")

    def __init__(self, values: Sequence[Any], meter: Meter, mb: int, storages: list[int]) -> None:
        super().__init__(values)
        self._meter = meter
        self._mb = mb
        self._storages = storages

    def clear(self) -> None:
        """Let go of every value."""
        super().clear()
        self._meter.free(self._storages)

    def __del__(self) -> None:
        self._meter.free(self._storages)
        self._meter.end(self._mb)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Rank:
    """A running rank, as its program sees it."""

    def __init__(self, rank: int, transport: Transport, variants: frozenset[int]) -> None:
        self.now = "its first op"
        self.times: dict[str, tuple[float, float]] = {}
        self.variants = variants
        self.meters: dict[str, Meter] = {}
        self._rank = rank
        self._transport = transport

    def send(self, peer: int, bundles: tuple[tuple[Tensor, ...], ...], name: str) -> Any:
        """Start to send bundles to a rank."""
        self.now = name
        start = time.perf_counter()
        tensors = [tensor for bundle in bundles for tensor in bundle]
        handle = self._transport.send(peer, tensors, name)
        self.times[name] = (start, start)
        return handle

    def sent(self, handle: Any) -> None:
        """Wait until what was sent has left."""
        self._transport.sent(handle)

    def post(
        self, peer: int, mb: Bound, kind: str, seams: tuple[tuple[str, str], ...], name: str
    ) -> tuple[Any, list[int], float, str]:
        """Post the receive of the bundles of these seams from a rank."""
        self.now = name
        specs = [mb.spec(source, target, Kind(kind)) for source, target in seams]
        flat = [spec for bundle in specs for spec in bundle]
        handle = self._transport.post(peer, flat, name)
        return handle, [len(bundle) for bundle in specs], time.perf_counter(), name

    def wait(self, posted: tuple[Any, list[int], float, str]) -> list[tuple[Tensor, ...]]:
        """Wait for a posted receive; its bundles."""
        handle, sizes, start, name = posted
        self.now = name
        tensors = iter(self._transport.wait(handle))
        self.times[name] = (start, time.perf_counter())
        return [tuple([next(tensors) for _ in range(size)]) for size in sizes]

    def keep(self, stage: str, mb: int, kept: list[Any], outside: Sequence[Any]) -> Kept:
        """A counted list of what an op keeps for the next."""
        meter = self.meters.get(stage)
        if meter is None:
            meter = self.meters[stage] = Meter()
        return meter.take(mb, kept, outside)

    def reduce(self, name: str, flat: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """The sum over ranks, in their order."""
        return self._transport.reduce(flat, ranks, name)


@dataclass(frozen=True)
class Step:
    """What a step gives.

    losses: [microbatches], the same on every rank. gradients: name of parameter -> tensor, for the
    ranks of this process; what several of them hold is there once, their sums being equal.
    """

    losses: Tensor
    gradients: Grads
    table: Table
    numbers: Tensor

    @cached_property
    def timeline(self) -> Timeline:
        """Spans and peaks of every rank, as measured."""
        table = self.table
        pairs = self.numbers[_loss_slots(table) :].view(-1, 2).tolist()
        count = sum(map(len, table.rows))
        return Timeline(
            table.cut,
            tuple(_spans(table, pairs[:count])),
            tuple(_peaks(table, pairs[count:])),
        )


def run_step(
    backend: Backend, programs: Mapping[int, Program], batch: Sequence[Bound], dtype: torch.dtype
) -> Step:
    """Run one step. Collective; raises RankError on every rank if any of them fails."""
    table = next(iter(programs.values())).table
    variants = frozenset(mb.variant for mb in batch)

    def body(rank: int, transport: Transport) -> tuple[Tensor, Grads]:
        running = Rank(rank, transport, variants)
        try:
            with torch.no_grad():
                losses, gradients = programs[rank].module(running, *batch)
                running.now = "the end of the step"
                return transport.share(_numbers(programs[rank], running, losses)), gradients
        except LostError as lost:
            raise LostError(f"rank {rank}, {running.now}: {lost}") from lost
        except Exception as error:
            raise RankError(_failed(rank, running.now, error)) from error

    results = backend.run(body)
    numbers = next(iter(results.values()))[0]
    gradients: Grads = {}
    for rank in sorted(results):
        for name, grad in results[rank][1].items():
            gradients.setdefault(name, grad)
    return Step(_losses(table, numbers).to(dtype), gradients, table, numbers)


def _failed(rank: int, op: str, error: Exception) -> str:
    return (
        f"rank {rank} failed in {op}: {type(error).__name__}: {error}. Every rank has stopped, no "
        "gradient was written; the traceback of that rank shows the line"
    )


# A step ends with one exchange: [losses by stage and microbatch | start and end of every op of
# every row | peaks by rank and stage], in which each rank has filled what it knows.


def _loss_slots(table: Table) -> int:
    return len(table.cut.stages) * table.microbatches


def _numbers(program: Program, running: Rank, losses: Mapping[str, tuple[Tensor, ...]]) -> Tensor:
    table, rank = program.table, program.rank
    ops, stages = list(map(len, table.rows)), len(table.cut.stages)
    numbers = torch.zeros(_loss_slots(table) + 2 * sum(ops) + 2 * len(ops) * stages).double()
    _write_losses(numbers, table, losses)
    nothing = (-_EPOCH, -_EPOCH)
    times = [time for token in program.tokens for time in running.times.get(token, nothing)]
    start = _loss_slots(table) + 2 * sum(ops[:rank])
    numbers[start : start + len(times)] = torch.tensor(times, dtype=torch.float64) + _EPOCH
    start = _loss_slots(table) + 2 * sum(ops) + 2 * rank * stages
    for index, name in enumerate(table.cut.stage):
        if name in running.meters:
            meter = running.meters[name]
            numbers[start + 2 * index] = meter.peak_units
            numbers[start + 2 * index + 1] = meter.peak_bytes
    return numbers


def _write_losses(numbers: Tensor, table: Table, losses: Mapping[str, tuple[Tensor, ...]]) -> None:
    """The terms of each microbatch, summed per stage in the order in which the model adds them."""
    found = {token: sum(terms[1:], start=terms[0]) for token, terms in losses.items() if terms}
    if not found:
        return
    places = {name: index for index, name in enumerate(table.cut.stage)}
    ops = [Op.parse(token) for token in found]
    slots = [places[op.stage] * table.microbatches + (op.mb or 0) for op in ops]
    numbers[slots] = torch.stack([loss.double() for loss in found.values()]).cpu()


def _losses(table: Table, numbers: Tensor) -> Tensor:
    """[microbatches]: the stages' losses, added in the order of the stages."""
    stages = numbers[: _loss_slots(table)].view(-1, table.microbatches)
    total = torch.zeros(table.microbatches, dtype=torch.float64)
    for losses in stages:
        total = total + losses
    return total


def _spans(table: Table, pairs: Sequence[Sequence[float]]) -> Iterator[Span]:
    """Compute ops as they ran; a transfer from the start of its send to the end of its receive."""
    ops = [(rank, op) for rank, row in enumerate(table.rows) for op in row]
    times = dict(zip(ops, pairs, strict=True))
    for (rank, op), (start, end) in times.items():
        if not op.way:
            yield Span(rank, op, start, end)
        elif op.way == ">" and op.peer is not None:
            received = times[op.peer, op.value.source(rank)]
            yield Span(rank, op, start, received[1])


def _peaks(table: Table, pairs: Sequence[Sequence[float]]) -> Iterator[Peak]:
    homes = [(rank, name) for rank in range(len(table.rows)) for name in table.cut.stage]
    for (rank, name), (units, size) in zip(homes, pairs, strict=True):
        if units:
            yield Peak(rank, name, int(units), int(size))
