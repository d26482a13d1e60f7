"""How memory grows with the number of microbatches: fxpipe beside torch.distributed.pipelining.

    python -m benchmarks.memory_growth [--quick] [--plot FILE.png]

4 processes over gloo, a chain of blocks (`benchmarks/emulated.py`, without sleep) of which each
keeps 4 MiB of a microbatch, one block per stage. All runners share the processes; growth is the
peak resident set of a step over what is resident before it, when the model, the batch and the
runner are there and a first step has run. Slope: of the worst rank, from the fewest to the most
microbatches, for each of them. Large blocks of memory are mapped one by one
(`MALLOC_MMAP_THRESHOLD_`), for every runner, so that freed ones leave the resident set. Linux only.
Exit code 1 when fxpipe's slope is more than 0.2 MiB for each microbatch.
"""

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 16))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from benchmarks import plots
from benchmarks.emulated import Chain
from benchmarks.resident import Step, peak_growth

RANKS, WIDTH, BAR = 4, 1 << 20, 0.2
COUNTS, FEW = (8, 16, 32), (8, 32)
RUNNERS = ("fxpipe nested/1f1b", "fxpipe nested/interleaved", "torch 1F1B", "torch interleaved")


def fxpipe_steps(name: str) -> Callable[[list[Tensor]], Step]:
    """fxpipe on the whole chain, compiled once for any number of microbatches."""
    import fxpipe

    blocks = RANKS * (2 if "interleaved" in name else 1)
    given: Any = {"regions": {"llm": ["blocks"]}, "ranks": RANKS, "backend": "gloo"}
    example = {"x": torch.ones(1, WIDTH)}
    pipe = fxpipe.compile(Chain(blocks, WIDTH), example, schedule=name.split()[1], **given)
    return lambda batch: lambda: pipe.step([{"x": x} for x in batch])


def torch_step(name: str, batch: list[Tensor], rank: int) -> Step:
    """torch's schedule, one block per stage."""
    single = name == "torch 1F1B"
    mine = [rank] if single else [rank, rank + RANKS]
    count = RANKS * len(mine)
    chain = Chain(count, WIDTH)
    device = torch.device("cpu")
    stages = [PipelineStage(chain.blocks[at], at, count, device) for at in mine]
    schedule: Any = (
        Schedule1F1B(stages[0], len(batch), loss_fn=_mean)
        if single
        else ScheduleInterleaved1F1B(list(stages), len(batch), loss_fn=_mean)
    )
    inputs = (torch.cat(batch),) if rank == 0 else ()
    target = torch.zeros(len(batch)) if count - 1 in mine else None

    def step() -> None:
        losses: list[Tensor] | None = None if target is None else []
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)

    return step


def _mean(y: Tensor, _: Tensor) -> Tensor:
    return y.mean()


def worker(rank: int, names: list[str], counts: list[int], store: str, answer: Any) -> None:
    """One rank; rank 0 puts MiB of growth by runner and number of microbatches into `answer`."""
    torch.set_num_threads(1)
    method, patience = f"file://{store}", timedelta(seconds=600)
    group: Any = {"rank": rank, "world_size": RANKS, "timeout": patience}
    dist.init_process_group("gloo", init_method=method, **group)
    found = {}
    for name in names:
        ours = fxpipe_steps(name) if name.startswith("fxpipe") else None
        for count in counts:
            batch = [torch.ones(1, WIDTH) for _ in range(count)]
            step = ours(batch) if ours else torch_step(name, batch, rank)
            step()
            grown = torch.tensor([peak_growth(step)], dtype=torch.float64)
            every = [torch.empty_like(grown) for _ in range(RANKS)]
            dist.all_gather(every, grown)
            found[name, count] = [one.item() for one in every]
            del step, batch
            gc.collect()
    if rank == 0:
        answer.put(found)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one runner of each, two counts")
    parser.add_argument("--plot", metavar="FILE.png", help="needs matplotlib")
    given = parser.parse_args()
    quick = given.quick
    counts = FEW if quick else COUNTS
    names = list(RUNNERS[::2] if quick else RUNNERS)
    answer = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        spawn: Any = vars(mp)["spawn"]  # untyped
        store = str(Path(folder, "store"))
        spawn(worker, (names, list(counts), store, answer), nprocs=RANKS)
        found = answer.get()
    if given.plot:
        rows = {name: [(m, max(found[name, m])) for m in counts] for name in names}
        title = "MiB at the peak of a step, of the worst rank"
        plots.lines(given.plot, [plots.Lines(title, "microbatches", rows, logs=True)])
    print(f"| runner | {' | '.join(f'M = {count}: MiB' for count in counts)} | slope, MiB |")
    print("|---" * (len(counts) + 2) + "|")
    slopes = {}
    for name in names:
        rows = [found[name, count] for count in counts]
        slopes[name] = max(b - a for a, b in zip(rows[0], rows[-1], strict=True))
        slopes[name] /= counts[-1] - counts[0]
        cells = [f"{max(ranks):.1f} (mean {fmean(ranks):.1f})" for ranks in rows]
        print(f"| {name} | {' | '.join(cells)} | {slopes[name]:.2f} |")
    worst = max(slope for name, slope in slopes.items() if name.startswith("fxpipe"))
    print(f"fxpipe's slope is at most {worst:.2f} MiB, bar {BAR}: ", end="")
    print("PASS" if worst <= BAR else "FAIL")
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main())
