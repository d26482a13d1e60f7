"""The runners of `benchmarks.real`: fxpipe, torch.distributed.pipelining, a loop by hand, eager.

All train the same module, whose parameters they share, on the same microbatches.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from benchmarks.real_model import Microbatch, Omni, Part, eager
from benchmarks.real_plans import RANKS, SCHEDULES, Plan

_TORCH: dict[str, Any] = {
    "1F1B": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "ZBV": ScheduleZBVZeroBubble,
}


class Runner(NamedTuple):
    """A way to run a step; its loss on the ranks that know it. trains: the parameters whose
    gradients are on this rank afterwards."""

    name: str
    step: Callable[[], Tensor | None]
    trains: list[nn.Parameter]


def eager_runner(model: Omni, data: Sequence[Microbatch]) -> Runner:
    """The whole model in one process on two threads, on rank 0."""

    def step() -> Tensor | None:
        if dist.get_rank():
            return None
        torch.set_num_threads(RANKS)
        loss = eager(model, data)
        torch.set_num_threads(1)
        return loss

    return Runner("eager", step, [] if dist.get_rank() else list(model.parameters()))


def torch_runner(name: str, plan: Plan, model: Omni, data: Sequence[Microbatch]) -> Runner:
    """A schedule of torch, the microbatches of their own sizes: the inputs that only a stage of
    this rank reads need no splitting, so that they are handed over as they are."""
    rank, count = dist.get_rank(), len(plan)
    chunks = SCHEDULES[name][0]
    mine = [rank, count - 1 - rank if name == "ZBV" else rank + RANKS][:chunks]
    parts = [Part(model, plan[at], first=at == 0, last=at == count - 1) for at in mine]
    stages = [
        PipelineStage(part, at, count, torch.device("cpu"))
        for part, at in zip(parts, mine, strict=True)
    ]
    schedule: Any = _TORCH[name](
        stages if chunks > 1 else stages[0],
        len(data),
        loss_fn=lambda loss, _: loss / len(data),
        scale_grads=False,
    )
    fields = _read(parts)
    inputs = [{name: mb[name] for name in fields} for mb in data]
    schedule._split_inputs = lambda args, kwargs: ([()] * len(data), inputs)
    last = any(part.last for part in parts)

    def step() -> Tensor | None:
        losses: list[Tensor] | None = [] if last else None
        target = torch.zeros(len(data)) if last else None
        schedule.step(target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).sum().detach() if losses else None

    return Runner("", step, [p for part in parts for p in part.parameters()])


def _read(parts: Sequence[Part]) -> list[str]:
    first = ["images", "sample", "tokens"] if any(part.first for part in parts) else []
    last = ["tokens", "noise", "image"] if any(part.last for part in parts) else []
    return list(dict.fromkeys(first + last))


def hand_written(plan: Plan, model: Omni, data: Sequence[Microbatch]) -> Runner:
    """1F1B in a loop over isend and irecv, autograd in each stage."""
    rank, count = dist.get_rank(), len(plan)
    part = Part(model, plan[rank], first=rank == 0, last=rank == count - 1)
    loop = _Loop(part, rank, count, data)
    return Runner("by hand", loop.step, list(part.parameters()))


class _Loop:
    """One rank of 1F1B."""

    def __init__(self, part: Part, rank: int, ranks: int, data: Sequence[Microbatch]) -> None:
        self.part, self.rank, self.ranks, self.data = part, rank, ranks, data
        tokens = data[0]["tokens"]
        patches = data[0]["images"].shape[1]
        width = part.whole[0].patch.out_features
        self.shape = (tokens.shape[0], patches + tokens.shape[1], width)

    def step(self) -> Tensor | None:
        """Forward and backward of every microbatch; the mean loss on the last rank."""
        self.kept: dict[int, tuple[Tensor | None, Tensor]] = {}
        self.sends: list[tuple[Any, Tensor]] = []
        self.losses: list[Tensor] = []
        count, ahead = len(self.data), self.ranks - 1 - self.rank
        self.forwards = self._posts(range(count), self.rank - 1)
        self.backwards = self._posts(range(count), self.rank + 1)
        for mb in range(count + ahead):
            if mb < count:
                self._forward(mb)
            if mb >= ahead:
                self._backward(mb - ahead)
        for sent, _ in self.sends:
            sent.wait()
        return torch.stack(self.losses).mean() if self.losses else None

    def _posts(self, mbs: range, peer: int) -> "_Posts | None":
        return _Posts(peer, self.shape, len(mbs)) if 0 <= peer < self.ranks else None

    def _forward(self, mb: int) -> None:
        x = self.forwards.take() if self.forwards else None
        inputs = (x.requires_grad_(),) if x is not None else ()
        y: Tensor = self.part(*inputs, **self.data[mb])
        self.kept[mb] = x, y
        if self.backwards:
            self._send(y.detach(), self.rank + 1)
        else:
            self.losses.append(y.detach())

    def _backward(self, mb: int) -> None:
        x, y = self.kept.pop(mb)
        if self.backwards:
            torch.autograd.backward(y, self.backwards.take())
        else:
            torch.autograd.backward(y / len(self.data))
        if x is not None and x.grad is not None:
            self._send(x.grad, self.rank - 1)

    def _send(self, tensor: Tensor, peer: int) -> None:
        self.sends = [(work, kept) for work, kept in self.sends if not work.is_completed()]
        self.sends.append((dist.isend(tensor, peer), tensor))


class _Posts:
    """Receives from one peer, one of them posted ahead."""

    def __init__(self, peer: int, shape: tuple[int, ...], count: int) -> None:
        self.peer, self.shape, self.left = peer, shape, count
        self.next = self._post()

    def _post(self) -> tuple[Any, Tensor] | None:
        if not self.left:
            return None
        self.left -= 1
        buffer = torch.empty(self.shape)
        return dist.irecv(buffer, self.peer), buffer

    def take(self) -> Tensor:
        """The next message."""
        assert self.next is not None
        work, buffer = self.next
        self.next = self._post()
        work.wait()
        return buffer
