"""An encoder of 2.5 stages: fxpipe, which nests it, against torch with the encoder as stage 0.

    python -m benchmarks.headroom [--quick] [--ms 10 50] [--rounds 6] [--plot FILE.png]

4 processes over gloo, 8 microbatches, ops that sleep (`benchmarks/emulated.py`). The encoder is two
blocks of 1.25 units each of forward, input and weight gradient, the first without the second of
these; the whole backbone takes 3 units of each. `torch.distributed.pipelining` runs them as one
chain: the encoder is stage 0 and the backbone three stages (1F1B), or halves of these are eight
stages (interleaved 1F1B, ZBV). fxpipe compiles the plain model, `nested/zb-h1`. All take turns in
the same processes; before that, each must sleep for the same 122 units in a step, over all ranks.
Exit code 1 when fxpipe is not so much faster than the best of torch's.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import chain, cycle, islice, permutations
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from benchmarks import plots
from benchmarks.emulated import DEVICE, precise_sleep, weight, work
from benchmarks.measure import agreed_start

RANKS, MICROBATCHES, WIDTH, ROWS = 4, 8, 256, 4
ENCODER, BACKBONE = 2.5, 3.0
BACK = ENCODER + ENCODER / 2  # of the encoder: no gradient of its own input
UNITS = MICROBATCHES * (ENCODER + BACK + 3 * BACKBONE)
PERFECT = UNITS / RANKS  # without the time to fill a pipeline
BAR, QUICK = 1.25, 1.1


class Piece(nn.Module):
    """So many units of forward, of input gradient and of weight gradient."""

    def __init__(self, units: float) -> None:
        super().__init__()
        self.units = units
        self.w = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = work(x, self.units, self.units) + weight(self.w, x.detach(), self.units)
        return y


class Model(nn.Module):
    """An encoder of two blocks, a backbone of one block per rank, and the mean as loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.blocks = nn.ModuleList(Piece(BACKBONE / RANKS) for _ in range(RANKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = x.mean()
        return loss


def encoder() -> nn.Sequential:
    """Both of its blocks."""
    return nn.Sequential(Piece(ENCODER / 2), Piece(ENCODER / 2))


class Runner(NamedTuple):
    """A way to run a step."""

    name: str
    step: Callable[[], object]
    parameters: list[nn.Parameter]


def batch() -> list[Tensor]:
    """The same microbatches on every call."""
    torch.manual_seed(1)
    return list(torch.rand(MICROBATCHES, ROWS, WIDTH))


def fxpipe_runner(rank: int) -> Runner:
    """The plain model, compiled; it is told what its stages take."""
    import fxpipe
    from fxpipe.costs import Costs

    data = [{"x": x} for x in batch()]
    regions = {"vision": ["encoder"], "llm": ["blocks"]}
    given: Any = {"regions": regions, "ranks": RANKS, "backend": "gloo"}
    pipe = fxpipe.compile(Model(), data[0], schedule="nested/1f1b", **given)
    units = {"vision": (ENCODER, BACK), "llm": (BACKBONE / RANKS,) * 3}
    costs = Costs.of_regions(pipe.cut, units)
    pipe = pipe.reschedule("nested/zb-h1", costs=costs)
    return Runner("fxpipe", lambda: pipe.step(data), list(pipe.parameters()))


def torch_runner(name: str, rank: int) -> Runner:
    """torch's schedule on a chain of one stage per rank, or of two."""
    kind = {"1F1B": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
    chunks = 1 if name == "1F1B" else 2
    count = RANKS * chunks
    second = 2 * RANKS - 1 - rank if name == "ZBV" else RANKS + rank
    mine = [rank, second][:chunks]
    layers: list[nn.Module] = [encoder()] if chunks == 1 else list(encoder())
    layers += [Piece(1 / chunks) for _ in range(count - chunks)]
    pieces = [layers[at] for at in mine]
    stages = [
        PipelineStage(piece, at, count, torch.device("cpu"))
        for piece, at in zip(pieces, mine, strict=True)
    ]
    made = kind.get(name, ScheduleZBVZeroBubble)
    schedule: Any = made(
        stages[0] if chunks == 1 else stages,
        MICROBATCHES,
        loss_fn=lambda y, _: y.mean(),
    )
    inputs = (torch.cat(batch()),) if 0 in mine else ()
    target = torch.zeros(MICROBATCHES) if count - 1 in mine else None

    def step() -> None:
        losses: list[Tensor] | None = None if target is None else []
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)

    return Runner(f"torch {name}", step, [w for piece in pieces for w in piece.parameters()])


def check(runners: list[Runner]) -> None:
    """Each sleeps as long in a step, over all ranks."""
    for runner in runners:
        DEVICE.unit = 0.0
        runner.step()
        DEVICE.unit = 1e-3
        DEVICE.asked = 0.0
        runner.step()
        asked = torch.tensor([DEVICE.asked], dtype=torch.float64)
        dist.all_reduce(asked)
        if abs(asked.item() - UNITS) > 1e-6:
            raise RuntimeError(f"{runner.name} sleeps {asked.item()} units, not {UNITS}")


def worker(rank: int, units: list[float], rounds: int, store: str, answer: Any) -> None:
    """One rank; rank 0 puts seconds by length of unit and runner into `answer`."""
    torch.set_num_threads(1)
    precise_sleep()
    method = f"file://{store}"
    dist.init_process_group(
        "gloo",
        init_method=method,
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=300),
    )
    runners = [fxpipe_runner(rank)]
    runners += [torch_runner(name, rank) for name in ("1F1B", "interleaved", "ZBV")]
    check(runners)
    found: dict[tuple[float, str], list[float]] = {}
    orders = [islice(cycle(permutations(runners)), 0, 5 * rounds, 5) for _ in units]
    for unit, order in zip(units, orders, strict=True):
        for runner in chain.from_iterable(order):
            found.setdefault((unit, runner.name), []).append(_seconds(runner, unit))
    if rank == 0:
        answer.put(found)
    dist.barrier()
    dist.destroy_process_group()


def _seconds(runner: Runner, unit: float) -> float:
    """Of one step, from the agreed start to the end of the last rank."""
    DEVICE.unit = unit
    for parameter in runner.parameters:
        parameter.grad = None
    start = agreed_start()
    runner.step()
    end = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(end, dist.ReduceOp.MAX)
    DEVICE.spans.clear()
    return end.item()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one length of op, two rounds")
    parser.add_argument("--ms", type=float, nargs="+", help="of a unit; 10 and 50, quick: 20")
    parser.add_argument("--rounds", type=int, help="steps of each; 10, or 2 with --quick")
    parser.add_argument("--plot", metavar="FILE.png", help="needs matplotlib")
    given = parser.parse_args()
    units = [ms / 1e3 for ms in given.ms or ([20.0] if given.quick else [10.0, 50.0])]
    rounds = given.rounds or (2 if given.quick else 10)
    answer = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        spawn: Any = vars(mp)["spawn"]  # untyped
        spawn(worker, (units, rounds, str(Path(folder, "store")), answer), nprocs=RANKS)
        found = answer.get()
    if given.plot:
        _plot(given.plot, found, units)
    return _report(found, units, QUICK if given.quick else BAR)


def _plot(path: str, found: dict[tuple[float, str], list[float]], units: list[float]) -> None:
    """The median step of every runner in units, for each length of a unit."""
    panels = []
    for unit in units:
        rows = {name: [median(x) / unit] for (own, name), x in found.items() if own == unit}
        title = f"a step in units of {1e3 * unit:g} ms"
        panels.append(plots.Bars(title, rows, mark=(PERFECT, "perfect balance")))
    plots.bars(path, panels)


def _report(found: dict[tuple[float, str], list[float]], units: list[float], bar: float) -> int:
    print(f"{RANKS} ranks, {MICROBATCHES} microbatches, perfect balance {PERFECT:g} units")
    print("| unit | runner | step, mean ± sd | median | units | fxpipe is faster by |")
    print("|---|---|---|---|---|---|")
    reached = True
    for unit in units:
        ours = median(found[unit, "fxpipe"])
        for (own, name), seconds in found.items():
            if own == unit:
                middle, sd = median(seconds), stdev(seconds)
                cells = [f"{1e3 * unit:g} ms", name, f"{1e3 * fmean(seconds):.1f} ± {1e3 * sd:.1f}"]
                cells += [
                    f"{1e3 * middle:.1f} ms",
                    f"{middle / unit:.1f}",
                    f"{middle / ours:.2f} ×",
                ]
                print(f"| {' | '.join(cells)} |")
        others = [median(x) for (own, n), x in found.items() if own == unit and n != "fxpipe"]
        reached &= min(others) >= bar * ours
        print(f"best of torch / fxpipe: {min(others) / ours:.2f}, bar {bar}")
    print("PASS" if reached else "FAIL")
    return int(not reached)


if __name__ == "__main__":
    sys.exit(main())
