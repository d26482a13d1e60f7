"""Real compute on two ranks: fxpipe beside torch.distributed.pipelining, a loop by hand and eager.

    python -m benchmarks.real [--rounds 12] [--plot FILE.png] [--inductor] [--quick]

2 processes over gloo, one thread each. A model of three regions (`benchmarks/real_model.py`): an
image encoder, a causal backbone and an image generator, 8 microbatches, each with as many images or
with numbers that vary tenfold. torch's 1F1B, interleaved 1F1B and ZBV have the encoder in the first
stage and the generator in the last one, the backbone's layers dealt out evenly or balanced by what
was measured (`real_plans.py`); `by hand` is 1F1B in a loop over isend and irecv, balanced; `eager`
is one process with two threads. All take turns in the same processes, on the same parameters, and
all must have eager's gradients before anything is timed. Peak memory is measured in processes of
its own, as in `memory_growth`; the engines are compared region by region in one process.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import real_engines, real_fxpipe, real_report
from benchmarks.measure import agreed_start
from benchmarks.memory_growth import peak_growth
from benchmarks.real_model import Microbatch, Omni, Sizes, batch, build, eager
from benchmarks.real_plans import RANKS, SCHEDULES, Plan, balanced, even, measured
from benchmarks.real_runners import Runner, eager_runner, hand_written, torch_runner

ALIKE, VARYING = "alike", "varying"
IMAGES = {ALIKE: (12,) * 8, VARYING: (4, 40, 6, 8, 4, 20, 6, 8)}  # 96 of both
QUICK = Sizes(encoder=2, backbone=4, generator=1, width=64)
_CLOSE = 1e-4  # of a gradient's largest entry, in float32

Found = dict[tuple[str, str], list[float]]  # by workload and runner


def main() -> int:
    """The command line."""
    given = arguments()
    schedules = real_fxpipe.QUICK if given.quick else tuple(real_fxpipe.SCHEDULES)
    sizes = QUICK if given.quick else Sizes()
    rounds = given.rounds or (4 if given.quick else 12)
    kinds = [VARYING] if given.quick else [ALIKE, VARYING]
    task = sizes, kinds, schedules, given.inductor
    seconds = spawned(timing, (*task, rounds))
    memory = {} if given.quick else spawned(peaks, task, MALLOC_MMAP_THRESHOLD_=str(1 << 16))
    engines = {} if given.quick else real_engines.compared(sizes, IMAGES[ALIKE][0])
    text, reached = real_report.report(seconds, memory, engines, quick=given.quick)
    print(text)
    if given.plot:
        real_report.plot(Path(given.plot), seconds, memory)
    return int(not reached)


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, help="steps of each; 12, or 4 with --quick")
    parser.add_argument("--inductor", action="store_true", help="compile fxpipe's graphs as well")
    parser.add_argument("--plot", metavar="FILE.png")
    parser.add_argument("--quick", action="store_true", help="a small model, varying images")
    return parser.parse_args()


def spawned(work: Callable[..., None], task: tuple[Any, ...], **environment: str) -> Found:
    """What rank 0 of two processes answers."""
    before = dict(os.environ)
    os.environ.update(environment)
    answer = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        spawn: Any = vars(mp)["spawn"]  # untyped
        spawn(_process, (work, task, str(Path(folder, "store")), answer), nprocs=RANKS)
        os.environ.clear()
        os.environ.update(before)
        found: Found = answer.get()
        return found


def _process(
    rank: int, work: Callable[..., None], task: tuple[Any, ...], store: str, answer: Any
) -> None:
    torch.set_num_threads(1)
    method, patience = f"file://{store}", timedelta(seconds=600)
    group: Any = {"rank": rank, "world_size": RANKS, "timeout": patience}
    dist.init_process_group("gloo", init_method=method, **group)
    work(*task, answer if rank == 0 else None)
    dist.barrier()
    dist.destroy_process_group()


def runners(
    model: Omni, kind: str, sizes: Sizes, schedules: tuple[str, ...], *, inductor: bool
) -> list[Runner]:
    """Every runner of a workload, its gradients checked."""
    data = batch(sizes, IMAGES[kind])
    mean = batch(sizes, [sum(IMAGES[kind]) // len(data)])[0]
    takes, layers = measured(model, mean), len(model.layers)
    plans: dict[tuple[str, str], Plan] = {}
    for name, (chunks, *_) in SCHEDULES.items():
        plans[name, "even"] = even(layers, RANKS * chunks)
        plans[name, "balanced"] = balanced(name, layers, takes, len(data))
    pipe = real_fxpipe.compiled(model, data)
    found = [real_fxpipe.runner(name, pipe, data) for name in schedules]
    if inductor:
        faster = real_fxpipe.compiled(model, data, engine="inductor")
        found.append(real_fxpipe.runner("nested/zb-h1", faster, data, "nested/zb-h1, inductor"))
    for (name, form), plan in plans.items():
        runner = torch_runner(name, plan, model, data)
        found.append(runner._replace(name=f"torch {name}, {form}"))
    found.append(hand_written(plans["1F1B", "balanced"], model, data))
    found.append(eager_runner(model, data))
    check(model, data, found)
    return found


def check(model: Omni, data: list[Microbatch], found: list[Runner]) -> None:
    """All have eager's loss and gradients."""
    model.zero_grad()
    loss = eager(model, data)
    truth = {id(p): p.grad for p in model.parameters()}
    names = {id(p): name for name, p in model.named_parameters()}
    for runner in found:
        model.zero_grad()
        its = runner.step()
        if its is not None:
            torch.testing.assert_close(its, loss)
        for parameter in runner.trains:
            true, name = truth[id(parameter)], names[id(parameter)]
            if true is None or parameter.grad is None:
                raise RuntimeError(f"{runner.name} makes no gradient of {name}")
            apart = (parameter.grad - true).abs().max() / true.abs().max()
            if apart > _CLOSE:
                raise RuntimeError(f"{runner.name}: the gradient of {name} is {apart:.1e} off")
    model.zero_grad()


def timing(
    sizes: Sizes,
    kinds: list[str],
    schedules: tuple[str, ...],
    inductor: bool,
    rounds: int,
    answer: Any,
) -> None:
    """Seconds of each step of each runner, in turns, each round in another order."""
    found: Found = {}
    for kind in kinds:
        model = build(sizes)
        every = runners(model, kind, sizes, schedules, inductor=inductor)
        dealt = Random(0)
        orders = [dealt.sample(every, len(every)) for _ in range(rounds)]
        for runner in chain.from_iterable(orders):
            model.zero_grad()
            found.setdefault((kind, runner.name), []).append(_seconds(runner))
    if answer is not None:
        answer.put(found)


def _seconds(runner: Runner) -> float:
    """Of one step, from the agreed start to the end of the last rank."""
    start = agreed_start()
    runner.step()
    end = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(end, dist.ReduceOp.MAX)
    return end.item()


def peaks(
    sizes: Sizes, kinds: list[str], schedules: tuple[str, ...], inductor: bool, answer: Any
) -> None:
    """MiB by which each rank grows in a step of each runner."""
    found: Found = {}
    for kind in kinds:
        model = build(sizes)
        for runner in runners(model, kind, sizes, schedules, inductor=inductor):
            model.zero_grad()
            runner.step()
            model.zero_grad()
            grown = torch.tensor([peak_growth(runner.step)], dtype=torch.float64)
            every = [torch.empty_like(grown) for _ in range(RANKS)]
            dist.all_gather(every, grown)
            found[kind, runner.name] = [one.item() for one in every]
    if answer is not None:
        answer.put(found)


if __name__ == "__main__":
    sys.exit(main())
