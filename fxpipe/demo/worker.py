"""One rank of the demo: the same script in every process, as under torchrun."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fxpipe
from fxpipe.demo import baseline, data, model
from fxpipe.trace import write_perfetto

Report = Callable[["Event"], None]


@dataclass(frozen=True)
class Setup:
    """What every rank is told."""

    ranks: int
    steps: int
    rounds: int
    schedule: str
    microbatches: int
    size: int
    trace: Path
    folder: Path


@dataclass(frozen=True)
class Compiled:
    """What the compiler found, as text."""

    regions: tuple[str, ...]
    stages: tuple[str, ...]
    rows: tuple[str, ...]


@dataclass(frozen=True)
class Trained:
    """A training step is done, with this loss."""

    step: int
    loss: float


@dataclass(frozen=True)
class Timed:
    """A step of each was timed, in seconds; and their losses on the same batch and weights."""

    fxpipe_seconds: float
    torch_seconds: float
    fxpipe_loss: float
    torch_loss: float
    plan: baseline.Plan


Event = Compiled | Trained | Timed


def main(rank: int, setup: Setup, events: Any) -> None:
    """What torch.multiprocessing starts on each rank; rank 0 puts events into the queue."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    meeting = f"file://{setup.folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=setup.ranks)
    _work(rank, setup, events.put if rank == 0 else lambda event: None)
    dist.barrier()
    dist.destroy_process_group()


def _work(rank: int, setup: Setup, report: Report) -> None:
    digits = data.load()
    llava = model.build()
    pipe = fxpipe.compile(
        llava,
        example=_batch(digits, setup, step=0)[0],
        schedule=setup.schedule,
        ranks=setup.ranks,
        backend="gloo",
    )
    _train(pipe, digits, setup, report)
    timeline = pipe.timeline
    if rank == 0:
        write_perfetto(timeline, setup.trace)
    torch.save(pipe.state_dict(), setup.folder / f"rank{rank}.pt")
    dist.barrier()
    llava.load_state_dict(gathered(setup))
    _compare(pipe, llava, digits, setup, report)


def _batch(digits: data.Digits, setup: Setup, step: int) -> list[data.Microbatch]:
    return data.step_of(digits, step, setup.microbatches, setup.size, model.PATCHES)


def _train(pipe: Any, digits: data.Digits, setup: Setup, report: Report) -> None:
    optimizer = model.optimizer(pipe.parameters())
    for step in range(setup.steps):
        model.set_rate(optimizer, step)
        optimizer.zero_grad()
        result = pipe.step(_batch(digits, setup, step))
        optimizer.step()
        if step == 0:
            rows = str(pipe.table).removeprefix(str(pipe.table.cut)).strip().splitlines()
            found = tuple(map(str, pipe.cut.regions)), tuple(map(str, pipe.cut.stages))
            report(Compiled(*found, tuple(rows)))
        report(Trained(step, result.loss.item()))


def _compare(
    pipe: Any, llava: nn.Module, digits: data.Digits, setup: Setup, report: Report
) -> None:
    """Time steps of both, in turn, on one batch whose microbatches have one shape."""
    batch = data.even_step(digits, setup.microbatches, setup.size, model.PATCHES)
    rank = dist.get_rank()
    hand = baseline.fastest(llava, rank, setup.ranks, batch)
    losses = torch.zeros(2)

    def ours() -> None:
        losses[0] = pipe.step(batch).loss

    def theirs() -> None:
        loss = hand.step(batch)
        losses[1] = 0.0 if loss is None else loss

    ours()
    for _ in range(setup.rounds):
        seconds = [baseline.timed(ours), baseline.timed(theirs)]
        shared = losses.clone()
        dist.broadcast(shared[1], src=setup.ranks - 1)
        report(Timed(seconds[0], seconds[1], shared[0].item(), shared[1].item(), hand.plan))


def gathered(setup: Setup) -> dict[str, Any]:
    """The model's state, of what each rank has written."""
    state: dict[str, Any] = {}
    for rank in range(setup.ranks):
        state |= torch.load(setup.folder / f"rank{rank}.pt")
    return state
