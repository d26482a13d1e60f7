"""Ops that take the time of a table of costs, compute nothing and use no CPU: `emit(engine=...)`.

The program is the one of a real step, and so are its transfers; in place of a stage's graphs stand
sleeps until an absolute time, and in place of values, bytes of no meaning. So there are no losses
(they are nan) and no gradients.
"""

import ctypes
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxpipe.costs import Amount, Costs, combine
from fxpipe.cut import Cut, Kind
from fxpipe.delivery import carried
from fxpipe.stageop import Running, ends_of
from fxpipe.table import Op, Table

if TYPE_CHECKING:
    from fxpipe.bind import Bound

_PR_SET_TIMERSLACK = 29
Spec = tuple[tuple[int, ...], torch.dtype]
Specs = Callable[[str, str, Kind], tuple[Spec, ...]]


def sleep_until(deadline: float) -> None:
    """Sleep until `time.perf_counter()` says so."""
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(left)


def precise_sleep() -> None:
    """Ask Linux to wake the sleeps of this thread within 1 ns of slack, not 50 microseconds."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


@dataclass(frozen=True)
class Emulation:
    """What a program's ops take, instead of graphs that compute."""

    costs: Costs

    def stage(self, stage: str, kind: Kind, cut: Cut) -> nn.Module:
        """What stands for F, B or W of a stage."""
        return StageNap(stage, kind, cut, self.costs)

    def group(self, group: str, cut: Cut) -> nn.Module:
        """What stands for R of a group."""
        return GroupNap(group, cut, self.costs)


class StageNap(nn.Module):
    """F, B or W of a stage, with the signature of a `StageOp`."""

    def __init__(self, stage: str, kind: Kind, cut: Cut, costs: Costs) -> None:
        super().__init__()
        self.stage, self.kind = stage, kind
        self._costs, ends = costs, ends_of(cut, stage)
        self._pairs = [(stage, target) for target in ends.sent]
        if kind is not Kind.F:
            self._pairs = [(source, stage) for source in ends.returned]

    def __call__(self, rank: Running, mb: "Slot", *args: Any) -> Any:
        """Take the op's time, and note when."""
        op = Op(self.stage, self.kind, mb.index)
        rank.now = token = str(op)
        start = time.perf_counter()
        result = self._result(rank, mb, *args)
        sleep_until(start + self._costs.compute(op))
        rank.times[token] = (start, time.perf_counter())
        return result

    def _result(self, rank: Running, mb: "Slot", *args: Any) -> Any:
        if self.kind is Kind.W:
            return args[0] or {}
        bundles = [_bundle(mb.spec(*pair, self.kind)) for pair in self._pairs]
        kept = rank.keep(self.stage, mb.index, [], (), ())
        if self.kind is Kind.B:
            return (*bundles, kept)
        losses = () if bundles else (torch.tensor(float("nan"), dtype=torch.float64),)
        return (*bundles, losses, kept)


class GroupNap(nn.Module):
    """R of a group: its ranks meet, and take the time of a sum."""

    def __init__(self, group: str, cut: Cut, costs: Costs) -> None:
        super().__init__()
        self._token = f"{group}.R"
        self._ranks = cut.ranks_of(cut.groups[group])
        self._seconds = costs.compute(Op(group, Kind.R))

    def forward(self, rank: Running, grads: Sequence[object]) -> dict[str, Tensor]:
        """The op starts when the last rank has come."""
        rank.now = self._token
        rank.reduce(self._token, torch.zeros(1), self._ranks)
        start = time.perf_counter()
        sleep_until(start + self._seconds)
        rank.times[self._token] = (start, time.perf_counter())
        return {}


class Slot:
    """A microbatch without data: its number, and the sizes of what crosses. It has what a step and
    a program without graphs ask of a `Bound`."""

    variant = 0
    updates = None
    draws = ()
    size = None
    returns = False
    wants = False

    def __init__(self, index: int, specs: Specs) -> None:
        self.index = index
        self.spec = specs
        self.weight = torch.ones((), dtype=torch.float64)
        self.tensors: Mapping[str, Tensor] = {}
        self.chance: object = None

    def fields(self, stages: object) -> frozenset[str]:
        """It has none."""
        return frozenset()


def slots(table: Table, costs: Costs, fraction: float = 1.0) -> "list[Bound]":
    """The microbatches of a table, with the bytes of its transfers, or a fraction of them."""
    sizes = _sizes(table, costs, fraction)
    found: list[Any] = [Slot(mb, _sized(sizes, mb)) for mb in range(table.microbatches)]
    return found


def emptied(bound: Sequence["Bound"]) -> "list[Bound]":
    """Microbatches of a model without their data; as many bytes cross as in a real step."""
    found: list[Any] = [Slot(mb.index, _as_bytes(mb)) for mb in bound]
    return found


def stretched(costs: Costs, factor: float) -> Costs:
    """Costs in which everything takes so many times as long."""

    def longer(amount: Amount) -> Amount:
        return combine(lambda parts: factor * parts[0], (amount,))

    seconds = {key: longer(amount) for key, amount in costs.seconds.items()}
    latency, bandwidth = factor * costs.latency, costs.bandwidth / factor
    return replace(costs, seconds=seconds, latency=latency, bandwidth=bandwidth)


def _bundle(specs: Sequence[Spec]) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in specs)


def _raw(size: float) -> Spec:
    return (int(size),), torch.uint8


def _as_bytes(mb: "Bound") -> Specs:
    def specs(source: str, target: str, kind: Kind) -> tuple[Spec, ...]:
        real = mb.spec(source, target, kind)
        sizes = (torch.Size(shape).numel() * dtype.itemsize for shape, dtype in real)
        return (_raw(sum(sizes)),) if real else ()

    return specs


_Sizes = Mapping[tuple[str, str, Kind, int | None], float]


def _sized(sizes: _Sizes, mb: int) -> Specs:
    """What stays on its rank has no bytes; but every bundle is there, so that all are awaited."""
    return lambda source, target, kind: (_raw(sizes.get((source, target, kind, mb), 0.0)),)


def _sizes(table: Table, costs: Costs, fraction: float) -> _Sizes:
    """Bytes that cross each seam: those of a transfer, shared by the seams that it carries."""
    found: dict[tuple[str, str, Kind, int | None], float] = {}
    for rank, row in enumerate(table.rows):
        for op in row:
            if op.way == ">":
                seams = carried(table, op, rank)
                size = fraction * costs.sends(op.value) / len(seams)
                found |= {(s.source, s.target, op.kind, op.mb): size for s in seams}
    return found
