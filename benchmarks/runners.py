"""The three ways to run one schedule: a bare loop, fxpipe, torch.distributed.pipelining.

Each `Runner` is ready to step: the same blocks, the same batch, the same ops, its own weights.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.emulated import Block, Chain, input_grad, weight, weight_grad, work
from benchmarks.ideal import Op, Rows

_AHEAD = 1  # the bare loop posts a receive this many ops before the one that reads it


@dataclass(frozen=True)
class Setting:
    """What all runners run: the schedule, and microbatches of `rows` x `width` floats."""

    schedule: str
    ranks: int
    microbatches: int
    rows: int
    width: int

    def model(self) -> Chain:
        """The same model on every call."""
        torch.manual_seed(0)
        return Chain(self.ranks, self.width)

    def block(self, rank: int) -> Block:
        """The model's block of this rank."""
        block = self.model().blocks[rank]
        assert isinstance(block, Block)
        return block

    def batch(self) -> list[Tensor]:
        """The same microbatches on every call."""
        torch.manual_seed(1)
        return list(torch.rand(self.microbatches, self.rows, self.width))


@dataclass(frozen=True)
class Runner:
    """One way to run the schedule. fused: its gradients leave a stage only after the stage's W."""

    name: str
    rows: Rows
    fused: bool
    step: Callable[[], object]
    weight: nn.Parameter


def hand_written(setting: Setting, rows: Rows, rank: int) -> Runner:
    """A hand-written loop over this rank's row, without autograd."""
    w = setting.block(rank).w
    loop = BareLoop(rank, setting, rows[rank], w)
    return Runner("bare", rows, False, loop.step, w)


class BareLoop:
    """The row of one rank, its posts worked out beforehand, run op by op."""

    def __init__(self, rank: int, setting: Setting, row: tuple[Op, ...], w: nn.Parameter) -> None:
        self.rank, self.last = rank, rank == setting.ranks - 1
        self.row, self.w, self.batch = row, w, setting.batch()
        self.shape = (setting.rows, setting.width)
        self.scale = 1.0 / (setting.microbatches * setting.rows * setting.width)
        self.posts = list(self._posts())

    def _posts(self) -> Iterator[list[tuple[Op, int]]]:
        """For each op of the row, the receives to post before it: (reader, peer)."""
        peers = [self._peer(op) for op in self.row]
        for at in range(len(self.row)):
            window = slice(at + _AHEAD if at else 0, at + _AHEAD + 1)
            pairs = zip(self.row[window], peers[window], strict=True)
            yield [(reader, peer) for reader, peer in pairs if peer is not None]

    def _peer(self, op: Op) -> int | None:
        if op[0] == "F":
            return self.rank - 1 if self.rank else None
        opens_backward = op[0] == "B" or self.rank == 0
        return self.rank + 1 if opens_backward and not self.last else None

    @torch.no_grad()
    def step(self) -> None:
        """Forward and backward of every microbatch; the gradient is added to `w.grad`."""
        self.posted: dict[Op, tuple[dist.Work, Tensor]] = {}
        self.kept: dict[int, Tensor] = {}
        self.grads: dict[int, Tensor] = {}
        self.sends: list[tuple[dist.Work, Tensor]] = []
        run = {"F": self._forward, "B": self._backward, "W": self._weight}
        for op, posts in zip(self.row, self.posts, strict=True):
            for reader, peer in posts:
                buffer = torch.empty(self.shape)
                self.posted[reader] = _started(dist.irecv(buffer, peer)), buffer
            run[op[0]](op)
        for sent, _ in self.sends:
            sent.wait()

    def _received(self, op: Op) -> Tensor:
        work, buffer = self.posted.pop(op)
        work.wait()
        return buffer

    def _send(self, value: Tensor, peer: int) -> None:
        self.sends.append((_started(dist.isend(value, peer)), value))

    def _forward(self, op: Op) -> None:
        x = self._received(op) if self.rank else self.batch[op[1]]
        y = work(x, 1.0, 1.0) + weight(self.w, x, 1.0)
        self.kept[op[1]] = x
        if self.last:
            self.loss = y.mean()
        else:
            self._send(y, self.rank + 1)

    def _backward(self, op: Op) -> None:
        grad = self._grad(op)
        self.grads[op[1]] = grad
        self._send(input_grad(grad, 1.0), self.rank - 1)

    def _weight(self, op: Op) -> None:
        grad = self.grads.pop(op[1]) if self.rank else self._grad(op)
        made = weight_grad(grad, self.kept.pop(op[1]), 1.0)
        self.w.grad = made if self.w.grad is None else self.w.grad.add_(made)

    def _grad(self, op: Op) -> Tensor:
        return torch.full(self.shape, self.scale) if self.last else self._received(op)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a transfer of this rank to itself"
    return work


def torch_pipelining(setting: Setting, rows: Rows, rank: int) -> Runner:
    """torch.distributed.pipelining: one PipelineStage per rank, the mean as its loss function."""
    block = setting.block(rank)
    stage = PipelineStage(block, rank, setting.ranks, torch.device("cpu"))
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[setting.schedule]
    schedule = kind(stage, setting.microbatches, loss_fn=lambda y, _: y.mean())
    inputs = (torch.cat(setting.batch()),) if rank == 0 else ()
    target = torch.zeros(setting.microbatches) if rank == setting.ranks - 1 else None

    def step() -> None:
        losses: list[Tensor] | None = None if target is None else []
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)

    return Runner("torch", rows, True, step, block.w)


def compiled(setting: Setting, rows: Rows, rank: int) -> Runner:
    """fxpipe on the whole chain. Raises ValueError if its table has another order of ops."""
    import fxpipe

    batch = [{"x": x} for x in setting.batch()]
    pipe = fxpipe.compile(
        setting.model(),
        example=batch[0],
        schedule=f"nested/{setting.schedule}",
        ranks=setting.ranks,
        microbatches=setting.microbatches,
        backend="gloo",
    )
    found = tuple(
        tuple((str(op.kind), op.mb) for op in row if not op.way and op.mb is not None)
        for row in pipe.table.rows
    )
    if found != rows:
        raise ValueError(f"not the rows of the other runners ({rows}):\n{pipe.table}")
    weights = dict(pipe.named_parameters())
    return Runner("fxpipe", found, False, lambda: pipe.step(batch), weights[f"blocks.{rank}.w"])


RUNNERS = {"bare": hand_written, "fxpipe": compiled, "torch": torch_pipelining}
