"""Real compute on two ranks: fxpipe beside torch.distributed.pipelining, a loop by hand and eager.

    python -m benchmarks.real [--rounds 12] [--blocks 7,8,2] [--plot FILE.png]
                              [--inductor] [--quick]

2 processes over gloo, one thread each. A model of three regions (`benchmarks/real_model.py`): an
image encoder, a causal backbone and an image generator, 8 microbatches, each with as many images or
with numbers that vary tenfold. torch's 1F1B, interleaved 1F1B and ZBV have the encoder in the first
stage and the generator in the last one, the backbone's layers dealt out evenly or balanced by what
was measured (`real_plans.py`); `by hand` is 1F1B in a loop over isend and irecv, balanced; `eager`
is one process with two threads. All take turns in the same processes, on the same parameters, and
all must have eager's gradients before anything is timed. Peak memory is measured after that, as in
`memory_growth`; the engines are compared region by region in one process. Linux only.

With the usual blocks an even first stage has 0.71 of the work, as on two ranks it would have 0.63
of Mpipe's workload B and 0.73 of BigMac's understanding (`benchmarks/workloads.py`).
"""

import argparse
import ctypes
import os
import sys
import tempfile
import time
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
from benchmarks.real_model import Microbatch, Omni, Sizes, batch, build, eager
from benchmarks.real_plans import RANKS, SCHEDULES, balanced, even, parts
from benchmarks.real_report import Found, Measured
from benchmarks.real_runners import Runner, eager_runner, hand_written, torch_runner
from benchmarks.resident import peak_growth
from fxpipe import Pipe

ALIKE, VARYING = "alike", "varying"
IMAGES = {ALIKE: (12,) * 8, VARYING: (4, 40, 6, 8, 4, 20, 6, 8)}  # 96 of both
QUICK = Sizes(encoder=2, backbone=4, generator=1, width=64)
QUICK_OF_TORCH = ("1F1B", "ZBV")
_MMAP_THRESHOLD = -3  # of mallopt(3)
_CLOSE = 1e-4  # of a gradient's largest entry, in float32


def main() -> int:
    """The command line."""
    given = arguments()
    sizes = QUICK if given.quick else Sizes(*given.blocks)
    rounds = given.rounds or (6 if given.quick else 12)
    kinds = [VARYING] if given.quick else [ALIKE, VARYING]
    answer = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        task = sizes, kinds, rounds, given.quick, given.inductor
        spawn: Any = vars(mp)["spawn"]  # untyped
        spawn(worker, (task, str(Path(folder, "store")), answer), nprocs=RANKS)
        measured = answer.get()
    engines = {} if given.quick else real_engines.compared(sizes, IMAGES[ALIKE][0])
    text, reached = real_report.report(measured, engines, quick=given.quick)
    print(text)
    if given.plot:
        real_report.plot(Path(given.plot), measured)
    return int(not reached)


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, help="steps of each; 12, or 4 with --quick")
    parser.add_argument(
        "--blocks",
        type=_three,
        default="7,8,2",
        help="of encoder, backbone and generator; %(default)s",
    )
    parser.add_argument("--inductor", action="store_true", help="compile fxpipe's graphs as well")
    parser.add_argument("--plot", metavar="FILE.png")
    parser.add_argument("--quick", action="store_true", help="a small model, varying images")
    return parser.parse_args()


def _three(text: str) -> tuple[int, int, int]:
    """Three numbers."""
    encoder, backbone, generator = map(int, text.split(","))
    return encoder, backbone, generator


def worker(rank: int, task: tuple[Any, ...], store: str, answer: Any) -> None:
    """One rank; rank 0 puts seconds and MiB by workload and runner into `answer`."""
    torch.set_num_threads(1)
    method, patience = f"file://{store}", timedelta(seconds=600)
    group: Any = {"rank": rank, "world_size": RANKS, "timeout": patience}
    dist.init_process_group("gloo", init_method=method, **group)
    found = measure(*task)
    if rank == 0:
        answer.put(found)
    dist.barrier()
    dist.destroy_process_group()


def measure(sizes: Sizes, kinds: list[str], rounds: int, quick: bool, inductor: bool) -> Measured:
    """The steps of each runner, in turns, each round in another order; then what they hold."""
    model = build(sizes)
    pipes = {"aten": real_fxpipe.compiled(model, batch(sizes, IMAGES[ALIKE]))}
    if inductor:
        pipes["inductor"] = real_fxpipe.compiled(model, batch(sizes, IMAGES[ALIKE]), "inductor")
    seconds: Found = {}
    work: Found = {}
    every = {}
    for kind in kinds:
        every[kind] = runners(model, kind, sizes, pipes, quick=quick)
        dealt = Random(0)
        orders = [dealt.sample(every[kind], len(every[kind])) for _ in range(rounds)]
        for runner in chain.from_iterable(orders):
            model.zero_grad()
            taken, used = _timed(runner)
            seconds.setdefault((kind, runner.name), []).append(taken)
            work.setdefault((kind, runner.name), []).append(used)
    return Measured(seconds, work, {} if quick else peaks(model, every))


def runners(
    model: Omni, kind: str, sizes: Sizes, pipes: dict[str, Pipe], *, quick: bool
) -> list[Runner]:
    """Every runner of a workload, its gradients checked."""
    data = batch(sizes, IMAGES[kind])
    ways = [real_fxpipe.QUICK] if quick else list(real_fxpipe.WAYS)
    ways = [way for way in ways if kind == VARYING or "not known" not in way]
    found = [real_fxpipe.runner(way, pipes["aten"], data) for way in ways]
    if "inductor" in pipes:
        compiled = real_fxpipe.runner(real_fxpipe.COMPILED, pipes["inductor"], data)
        found.append(compiled._replace(name=f"{compiled.name}, inductor"))
    takes, layers = parts(model, batch(sizes, IMAGES[ALIKE])[0]), len(model.layers)
    names = QUICK_OF_TORCH if quick else tuple(SCHEDULES)
    for name in names:
        chunks = SCHEDULES[name][0]
        plans = {
            "even": even(layers, RANKS * chunks),
            "balanced": balanced(name, layers, takes, len(data)),
        }
        for form, plan in plans.items():
            runner = torch_runner(name, plan, model, data)
            found.append(runner._replace(name=f"torch {name}, {form}"))
        if name == "1F1B":
            found.append(hand_written(plans["balanced"], model, data))
    if not quick:
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


def _timed(runner: Runner) -> tuple[float, float]:
    """Seconds of a step, from the agreed start to the end of the last rank, and of CPU, of both."""
    start, before = agreed_start(), time.process_time()
    runner.step()
    end = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    used = torch.tensor([time.process_time() - before], dtype=torch.float64)
    dist.all_reduce(end, dist.ReduceOp.MAX)
    dist.all_reduce(used)
    return end.item(), used.item()


def peaks(model: Omni, every: dict[str, list[Runner]]) -> Found:
    """MiB by which each rank grows in a step of each runner. Large blocks are mapped one by one
    from here on, so that freed ones leave the resident set."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)
    found: Found = {}
    for kind, runner in [(kind, runner) for kind, own in every.items() for runner in own]:
        model.zero_grad()
        runner.step()
        model.zero_grad()
        ctypes.CDLL(None).malloc_trim(0)
        grown = torch.tensor([peak_growth(runner.step)], dtype=torch.float64)
        ranks = [torch.empty_like(grown) for _ in range(RANKS)]
        dist.all_gather(ranks, grown)
        found[kind, runner.name] = [one.item() for one in ranks]
    return found


if __name__ == "__main__":
    sys.exit(main())
