"""What the ranks tell each other when a step ends: losses, times of ops, peaks of memory.

Each rank gives float64 numbers: [loss of each forward of its row | start and end of each op of its
row | peaks by stage]. All have the table, so that the place of a number says what it is.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import islice

import torch
from torch import Tensor

from fxpipe.meter import Meter
from fxpipe.passes.reorder import reorder
from fxpipe.table import Op, Table
from fxpipe.timeline import Peak, Span, Timeline

# perf_counter counts from a moment of its own; with this it is the time of day, as on other hosts.
_EPOCH = time.time() - time.perf_counter()
_NEVER = (-_EPOCH, -_EPOCH)

Numbers = Sequence[float]
Times = Mapping[str, tuple[float, float]]


class Report:
    """The report of every step of a table. sizes: how many numbers each rank gives."""

    def __init__(self, table: Table) -> None:
        self.table = table
        forwards = [tuple(op for op in row if op.is_forward) for row in table.rows]
        self.sizes = [
            len(own) + 2 * len(row) + 3 * len(table.cut.stages)
            for own, row in zip(forwards, table.rows, strict=True)
        ]
        self._forwards = forwards
        self._tokens = cache(lambda rank: tuple(map(str, table.rows[rank])))
        places = {name: place for place, name in enumerate(table.cut.stage)}
        found = [
            (places[op.stage], rank, at, op.mb or 0)
            for rank, own in enumerate(forwards)
            for at, op in enumerate(own)
        ]
        # In the order of the stages, in which the model adds them: rank, place, microbatch.
        self._losses = [(rank, at, mb) for _, rank, at, mb in sorted(found)]

    def write(
        self,
        rank: int,
        times: Times,
        losses: Mapping[str, tuple[Tensor, ...]],
        meters: Mapping[str, Meter],
    ) -> Tensor:
        """What a rank tells. losses: `llm1.F0` -> the terms made there, in the order in which the
        model adds them."""
        numbers = self._terms(rank, losses)
        for token in self._tokens(rank):
            start, end = times.get(token, _NEVER)
            numbers += (start + _EPOCH, end + _EPOCH)
        for stage in self.table.cut.stages:
            meter = meters.get(stage.name)
            peak = (meter.peak_units, meter.peak_bytes, meter.forward_bytes) if meter else (0, 0, 0)
            numbers += peak
        return torch.tensor(numbers, dtype=torch.float64)

    def _terms(self, rank: int, losses: Mapping[str, tuple[Tensor, ...]]) -> list[float]:
        sums = {token: sum(terms[1:], start=terms[0]) for token, terms in losses.items() if terms}
        if not sums:
            return [0.0] * len(self._forwards[rank])
        values = torch.stack([loss.double() for loss in sums.values()]).tolist()
        by_token = dict(zip(sums, values, strict=True))
        return [by_token.get(str(op), 0.0) for op in self._forwards[rank]]

    def losses(self, told: Sequence[Numbers], order: Sequence[int]) -> Tensor:
        """[microbatches] of the caller, float64, from what each rank has told.

        order: which microbatch of the caller ran as number 0, 1, ... of the table
        """
        sums = [0.0] * self.table.microbatches
        for rank, at, mb in self._losses:
            sums[order[mb]] += told[rank][at]
        return torch.tensor(sums, dtype=torch.float64)

    def timeline(self, told: Sequence[Numbers], order: Sequence[int]) -> Timeline:
        """Spans and peaks of every rank, under the caller's numbers of microbatches."""
        table = reorder(self.table, tuple(order))
        spans: list[Span] = []
        peaks: list[Peak] = []
        times: dict[tuple[int, Op], tuple[float, float]] = {}
        for rank, (row, numbers) in enumerate(zip(table.rows, told, strict=True)):
            ends = iter(numbers[len(self._forwards[rank]) :])
            times.update(((rank, op), (next(ends), next(ends))) for op in row)
            peaks.extend(_peaks(table, rank, ends))
        spans.extend(_spans(times))
        return Timeline(table.cut, tuple(spans), tuple(peaks))


def _spans(times: Mapping[tuple[int, Op], tuple[float, float]]) -> Iterator[Span]:
    """Compute ops as they ran; a transfer from the start of its send to the end of its receive."""
    for (rank, op), (start, end) in times.items():
        if not op.way:
            yield Span(rank, op, start, end)
        elif op.way == ">" and op.peer is not None:
            yield Span(rank, op, start, times[op.peer, op.value.source(rank)][1])


def _peaks(table: Table, rank: int, numbers: Iterator[float]) -> Iterator[Peak]:
    for stage in table.cut.stages:
        units, size, kept = map(int, islice(numbers, 3))
        if units:
            yield Peak(rank, stage.name, units, size, kept)
