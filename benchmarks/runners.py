"""The three ways to run one schedule: a bare loop, fxpipe, torch.distributed.pipelining.

Each `Runner` is ready to step: the same blocks, the same batch, the same ops, its own weights.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from benchmarks.emulated import Block, Chain, input_grad, weight, weight_grad, work
from benchmarks.ideal import Op, Rows, needs, ranks_of
from fxpipe.skeletons import base

# Schedules, as torch has them; all have one stage on each rank or two.
TORCH: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}
_SPLIT = ("zb-v",)  # where torch's backward is two ops
_AHEAD = 1  # the bare loop posts a receive this many ops before the one that reads it


@dataclass(frozen=True)
class Setting:
    """What all runners run: the schedule, and microbatches of `rows` x `width` floats."""

    schedule: str
    ranks: int
    microbatches: int
    rows: int
    width: int

    @property
    def chunks(self) -> int:
        """Stages on each rank."""
        return base(self.schedule).default_chunks

    @property
    def stages(self) -> int:
        """Of all ranks, one block each."""
        return self.ranks * self.chunks

    def model(self) -> Chain:
        """The same model on every call."""
        torch.manual_seed(0)
        return Chain(self.stages, self.width)

    def blocks(self, rows: Rows, rank: int) -> dict[int, Block]:
        """Those of the stages of this rank."""
        model, home = self.model(), ranks_of(rows)
        found = {stage: model.blocks[stage] for stage in sorted(home) if home[stage] == rank}
        assert len(found) == self.chunks
        return {stage: block for stage, block in found.items() if isinstance(block, Block)}

    def batch(self) -> list[Tensor]:
        """The same microbatches on every call."""
        torch.manual_seed(1)
        return list(torch.rand(self.microbatches, self.rows, self.width))


@dataclass(frozen=True)
class Runner:
    """One way to run the schedule. fused: its gradients leave a stage only after the stage's W.
    weights: those of this rank's blocks, in the order of stages."""

    name: str
    rows: Rows
    fused: bool
    step: Callable[[], object]
    weights: tuple[nn.Parameter, ...]


def hand_written(setting: Setting, rows: Rows, rank: int) -> Runner:
    """A hand-written loop over this rank's row, without autograd."""
    loop = BareLoop(rank, setting, rows)
    return Runner("bare", rows, False, loop.step, tuple(loop.weights.values()))


class BareLoop:
    """The row of one rank, its posts worked out beforehand, run op by op."""

    def __init__(self, rank: int, setting: Setting, rows: Rows) -> None:
        self.rank, self.row, self.home = rank, rows[rank], ranks_of(rows)
        self.end, self.batch = setting.stages - 1, setting.batch()
        self.weights = {stage: block.w for stage, block in setting.blocks(rows, rank).items()}
        self.shape = (setting.rows, setting.width)
        self.scale = 1.0 / (setting.microbatches * setting.rows * setting.width)
        self.posts = list(self._posts())

    def _posts(self) -> Iterator[list[tuple[Op, int]]]:
        """For each op of the row, the receives to post before it: (value, peer)."""
        values = [next(needs(op, self.end + 1, fused=False), None) for op in self.row]
        for at in range(len(self.row)):
            window = values[at + _AHEAD if at else 0 : at + _AHEAD + 1]
            pairs = [(value, self.home[value[1]]) for value in window if value is not None]
            yield [(value, peer) for value, peer in pairs if peer != self.rank]

    @torch.no_grad()
    def step(self) -> None:
        """Forward and backward of every microbatch; the gradient is added to each `w.grad`."""
        self.posted: dict[Op, tuple[dist.Work, Tensor]] = {}
        self.here: dict[Op, Tensor] = {}  # values between two stages of this rank
        self.kept: dict[tuple[int, int], Tensor] = {}
        self.grads: dict[tuple[int, int], Tensor] = {}
        self.sends: list[tuple[dist.Work, Tensor]] = []
        run = {"F": self._forward, "B": self._backward, "W": self._weight}
        for op, posts in zip(self.row, self.posts, strict=True):
            for value, peer in posts:
                buffer = torch.empty(self.shape)
                self.posted[value] = _started(dist.irecv(buffer, peer, tag=_tag(value))), buffer
            run[op[0]](*op[1:])
        for sent, _ in self.sends:
            sent.wait()

    def _take(self, value: Op) -> Tensor:
        if value in self.here:
            return self.here.pop(value)
        work, buffer = self.posted.pop(value)
        work.wait()
        return buffer

    def _give(self, value: Op, tensor: Tensor, stage: int) -> None:
        peer = self.home[stage]
        if peer == self.rank:
            self.here[value] = tensor
        else:
            self.sends.append((_started(dist.isend(tensor, peer, tag=_tag(value))), tensor))

    def _forward(self, stage: int, mb: int) -> None:
        x = self._take(("F", stage - 1, mb)) if stage else self.batch[mb]
        y = work(x, 1.0, 1.0) + weight(self.weights[stage], x, 1.0)
        self.kept[stage, mb] = x
        if stage == self.end:
            self.loss = y.mean()
        else:
            self._give(("F", stage, mb), y, stage + 1)

    def _backward(self, stage: int, mb: int) -> None:
        grad = self.grads[stage, mb] = self._grad(stage, mb)
        self._give(("B", stage, mb), input_grad(grad, 1.0), stage - 1)

    def _weight(self, stage: int, mb: int) -> None:
        grad = self.grads.pop((stage, mb)) if stage else self._grad(stage, mb)
        made, w = weight_grad(grad, self.kept.pop((stage, mb)), 1.0), self.weights[stage]
        w.grad = made if w.grad is None else w.grad.add_(made)

    def _grad(self, stage: int, mb: int) -> Tensor:
        if stage == self.end:
            return torch.full(self.shape, self.scale)
        return self._take(("B", stage + 1, mb))


def _tag(value: Op) -> int:
    """Two ranks may have forwards and gradients of several stages between them."""
    kind, stage, mb = value
    return (2 * stage + (kind == "F")) * 10_000 + mb


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a transfer of this rank to itself"
    return work


def torch_pipelining(setting: Setting, rows: Rows, rank: int) -> Runner:
    """torch.distributed.pipelining: a PipelineStage for each block, the mean as its loss function.
    Raises ValueError if its schedule has another order of ops."""
    blocks = setting.blocks(rows, rank)
    stages = [
        PipelineStage(block, stage, setting.stages, torch.device("cpu"))
        for stage, block in blocks.items()
    ]
    mine = stages if setting.chunks > 1 else stages[0]
    schedule = TORCH[setting.schedule](mine, setting.microbatches, loss_fn=lambda y, _: y.mean())
    if setting.chunks > 1 and (found := _actions(schedule.pipeline_order)) != rows:
        raise ValueError(f"torch's rows {found} are not those of the other runners: {rows}")
    inputs = (torch.cat(setting.batch()),) if 0 in blocks else ()
    target = torch.zeros(setting.microbatches) if setting.stages - 1 in blocks else None

    def step() -> None:
        losses: list[Tensor] | None = None if target is None else []
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)

    weights = tuple(block.w for block in blocks.values())
    return Runner("torch", rows, setting.schedule not in _SPLIT, step, weights)


def _actions(order: dict[int, list[Any]]) -> Rows:
    """torch's order of ops in ours: its full backward is a B and a W."""
    kinds = {"F": "F", "I": "B", "W": "W", "B": "BW"}
    return tuple(
        tuple(
            (kind, int(action.stage_index), int(action.microbatch_index))
            for action in order[rank]
            if action is not None
            for kind in kinds[action.computation_type.value]
            if action.stage_index or kind != "B"
        )
        for rank in sorted(order)
    )


def compiled(setting: Setting, rows: Rows, rank: int) -> Runner:
    """fxpipe on the whole chain. Raises ValueError if its table has another order of ops."""
    import fxpipe

    batch = [{"x": x} for x in setting.batch()]
    pipe = fxpipe.compile(
        setting.model(),
        example=batch[0],
        schedule=f"stage/{setting.schedule}",
        ranks=setting.ranks,
        microbatches=setting.microbatches,
        backend="gloo",
    )
    numbers = {stage: number for number, stage in enumerate(pipe.cut.stage)}
    found = tuple(
        tuple(
            (str(op.kind), numbers[op.stage], op.mb)
            for op in row
            if not op.way and op.mb is not None
        )
        for row in pipe.table.rows
    )
    if found != rows:
        raise ValueError(f"not the rows of the other runners ({rows}):\n{pipe.table}")
    named = dict(pipe.named_parameters())
    home = ranks_of(rows)
    weights = tuple(named[f"blocks.{s}.w"] for s in sorted(home) if home[s] == rank)
    return Runner("fxpipe", found, False, lambda: pipe.step(batch), weights)


RUNNERS = {"bare": hand_written, "fxpipe": compiled, "torch": torch_pipelining}
