"""One step: the programs of this process's ranks on a backend; losses, gradients, timeline.

    run_step(backend, {rank: Program}, [Bound], dtype) -> Step

Nothing here decides an order. Nothing is written to `.grad`: a step that fails leaves no trace.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from fxpipe.accumulation import Grads
from fxpipe.backends import Backend, DifferError, LostError, Transport
from fxpipe.bind import Bound
from fxpipe.changes import Changes
from fxpipe.cut import Kind
from fxpipe.errors import RankError
from fxpipe.meter import Kept, Meter
from fxpipe.program import Program
from fxpipe.report import Numbers, Report
from fxpipe.streams import held, stream_of
from fxpipe.table import Table
from fxpipe.timeline import Timeline

# What microbatches return beside their losses: (microbatch, number of the value) -> tensor.
Outputs = dict[tuple[int, int], Tensor]
Brought = tuple[Tensor, Grads, Outputs]


class Rank:
    """A running rank, as its program sees it."""

    def __init__(
        self, rank: int, transport: Transport, batch: Sequence[Bound], changes: Changes
    ) -> None:
        self.now = "its first op"
        self.times: dict[str, tuple[float, float]] = {}
        self.variants = frozenset(mb.variant for mb in batch)
        self.buffer, self.note = changes.value, changes.note
        self.meters: dict[str, Meter] = {}
        self.outputs: Outputs = {}
        self._transport = transport

    def send(self, peer: int, bundles: tuple[tuple[Tensor, ...], ...], name: str) -> Any:
        """Start to send bundles to a rank; nothing, where the microbatch's variant sends nothing
        there, which the receiving rank knows as well."""
        self.now = name
        start = time.perf_counter()
        self.times[name] = (start, start)
        if not any(bundles):
            return None
        if len(bundles) == 1:
            return self._transport.send(peer, bundles[0], name)
        return self._transport.send(peer, [value for bundle in bundles for value in bundle], name)

    def sent(self, handle: Any) -> None:
        """Wait until a send has left."""
        if handle is not None:
            self._transport.sent(handle)

    def post(
        self, peer: int, mb: Bound, kind: str, seams: tuple[tuple[str, str], ...], name: str
    ) -> tuple[Any, list[int], str]:
        """Post the receive of the bundles of these seams from a rank."""
        self.now = name
        specs = [mb.spec(source, target, Kind(kind)) for source, target in seams]
        flat = specs[0] if len(specs) == 1 else [spec for bundle in specs for spec in bundle]
        handle = self._transport.post(peer, flat, name) if flat else None
        return handle, [len(bundle) for bundle in specs], name

    def wait(self, posted: tuple[Any, list[int], str]) -> Sequence[Sequence[Tensor]]:
        """Wait for a posted receive; its bundles."""
        handle, sizes, name = posted
        self.now = name
        for meter in self.meters.values():
            meter.count()
        start = time.perf_counter()
        tensors = self._transport.wait(handle) if handle is not None else ()
        self.times[name] = (start, time.perf_counter())
        if len(sizes) == 1:
            return (tensors,)
        values = iter(tensors)
        return [tuple(islice(values, size)) for size in sizes]

    def keep(
        self, stage: str, mb: int, kept: list[Any], state: Sequence[Any], feed: Sequence[Any]
    ) -> Kept:
        """A counted list of what an op keeps for the next."""
        meter = self.meters.get(stage)
        if meter is None:
            meter = self.meters[stage] = Meter(state)
        return meter.take(mb, kept, feed)

    def reduce(self, name: str, flat: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """The sum over ranks, in their order."""
        return self._transport.reduce(flat, ranks, name)

    def collect(self, any_rank: bool, to: int | None) -> Outputs:
        """The outputs of all ranks, if any rank may have some."""
        return self._transport.collect(self.outputs, to) if any_rank else {}


@dataclass(frozen=True)
class Step:
    """What a step gives.

    losses: [microbatches], the same on every rank. gradients: name of parameter -> tensor, for the
    ranks of this process; what several of them hold is there once, their sums being equal. order:
    which microbatch ran as number 0, 1, ... of the table; losses and timeline have its own number.
    outputs: those that came to the ranks of this process, by the table's numbers.
    buffers: name -> its value after the step, of all that forward changes, on every rank.
    """

    losses: Tensor
    gradients: Grads
    outputs: Outputs
    buffers: Mapping[str, Tensor]
    report: Report
    told: Sequence[Numbers]
    order: tuple[int, ...]

    @property
    def table(self) -> Table:
        """The table that ran."""
        return self.report.table

    @cached_property
    def timeline(self) -> Timeline:
        """Spans and peaks of every rank, as measured."""
        return self.report.timeline(self.told, self.order)


def run_step(
    backend: Backend,
    programs: Mapping[int, Program],
    batch: Sequence[Bound],
    dtype: torch.dtype,
    order: tuple[int, ...] = (),
    to: int | None = None,
    *,
    state: Mapping[str, Tensor] | None = None,
    seeds: Sequence[int] | None = None,
) -> Step:
    """Run one step. Collective; raises RankError on every rank if any of them fails.

    batch: in the order of the table; order: which microbatch of the caller each is; to: the one
    rank that gets the outputs, not all; state: the model's tensors; seeds: one per microbatch.
    """
    order, report = order or tuple(range(len(batch))), next(iter(programs.values())).report
    changes = Changes(report.table, batch, order, state or {})
    alone = len(report.table.rows) == 1
    stream = stream_of(batch, order, held(report.table, programs), seeds, alone)
    sizes = [size + changes.words(rank) for rank, size in enumerate(report.sizes)]

    def body(rank: int, transport: Transport) -> Brought:
        running = Rank(rank, transport, batch, changes)
        with torch.no_grad(), _explained(running, rank, order):
            expected = transport.expect(sizes)
            stream.start(transport.agree)
            losses, gradients = programs[rank].module.forward(running, *batch)
            running.now = "the end of the step"
            own = report.write(rank, running.times, losses, running.meters)
            shared = transport.share(expected, changes.packed(rank, own))
            return shared, gradients, running.collect(any(mb.returns for mb in batch), to)

    results = backend.run(body)
    told, tails = _apart(next(iter(results.values()))[0], sizes, report.sizes)
    buffers = changes.apply(tails)
    stream.finish()
    losses = report.losses(told, order).to(dtype)
    return Step(losses, *_merged(results), buffers, report, told, order)


def _apart(
    shared: Tensor, sizes: Sequence[int], own: Sequence[int]
) -> tuple[Sequence[Numbers], Iterator[Tensor]]:
    """By rank, the numbers of the report, and what follows them."""
    numbers, starts = shared.tolist(), [0, *accumulate(sizes)]
    ends = [start + size for start, size in zip(starts, own, strict=False)]
    told = [numbers[start:end] for start, end in zip(starts, ends, strict=False)]
    return told, (shared[end:start] for end, start in zip(ends, starts[1:], strict=True))


@contextmanager
def _explained(running: Rank, rank: int, order: tuple[int, ...]) -> Iterator[None]:
    """Errors say which op of the rank they come from."""
    try:
        yield
    except DifferError:
        raise
    except LostError as lost:
        raise LostError(f"rank {rank}, {running.now}: {lost}") from lost
    except Exception as error:
        raise RankError(_failed(rank, running.now, error, order)) from error


def _merged(results: Mapping[int, Brought]) -> tuple[Grads, Outputs]:
    """The gradients and the outputs of this process's ranks, each once."""
    gradients: Grads = {}
    outputs: Outputs = {}
    for rank in sorted(results):
        outputs.update(results[rank][2])
        for name, grad in results[rank][1].items():
            gradients.setdefault(name, grad)
    return gradients, outputs


def _failed(rank: int, op: str, error: Exception, order: tuple[int, ...]) -> str:
    moved = order != tuple(range(len(order)))
    note = f". The table's microbatches 0, 1, ... are {order} of the batch" if moved else ""
    return (
        f"rank {rank} failed in {op}: {type(error).__name__}: {error}. Every rank has stopped, no "
        f"gradient was written; the traceback of that rank shows the line{note}"
    )
