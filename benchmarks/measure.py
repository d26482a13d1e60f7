"""Interleaved measurement: every runner takes turns in the same processes, at the same load.

A step starts at an instant agreed by all ranks and ends when the last of them is through it.
"""

import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import chain, cycle, islice, permutations
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.critical import excess
from benchmarks.emulated import DEVICE, precise_sleep
from benchmarks.ideal import makespan, rows
from benchmarks.runners import RUNNERS, Runner, Setting

_LEAD = 0.003  # seconds from the agreement on a start to the start


@dataclass
class Samples:
    """What one runner took with one length of op: one entry per step.

    seconds: the step, from the agreed start to the end of the last rank. main, process: CPU
    seconds of the main threads, and of whole processes, summed over the ranks. parts: where the
    excess lies, see `critical`.
    """

    runner: str
    unit: float
    ideal: float
    ops: int
    seconds: list[float] = field(default_factory=list)
    main: list[float] = field(default_factory=list)
    process: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)


def worker(
    rank: int,
    setting: Setting,
    names: tuple[str, ...],
    units: dict[float, tuple[int, int]],
    store: str,
    answer: Any,
) -> None:
    """One rank of the measurement; rank 0 puts the list of samples, as dicts, into `answer`.

    units: for each length of op in seconds, how many rounds, and steps of each runner per round.
    """
    torch.set_num_threads(1)
    precise_sleep()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=setting.ranks,
        timeout=timedelta(seconds=120),
    )
    plan = rows(setting.schedule, setting.ranks, setting.microbatches)
    runners = [RUNNERS[name](setting, plan, rank) for name in names]
    check(runners, len(plan[rank]))
    samples = [
        sample
        for unit, (rounds, steps) in units.items()
        for sample in interleave(runners, unit, rounds, steps, len(plan[rank]))
    ]
    if rank == 0:
        answer.put([asdict(sample) for sample in samples])
    dist.barrier()
    dist.destroy_process_group()


def check(runners: list[Runner], ops: int) -> None:
    """Warm up each runner, and see that all of them run as many ops and make the same gradient."""
    DEVICE.unit = 0.0
    for runner in runners:
        runner.step()
        forget(runner)
        DEVICE.spans.clear()
        runner.step()
        _count(runner, ops)
        for mine, first in zip(runner.weights, runners[0].weights, strict=True):
            if mine.grad is None:
                raise RuntimeError(f"{runner.name} makes no gradient of a block of this rank")
            torch.testing.assert_close(mine.grad, first.grad)


def forget(runner: Runner) -> None:
    """Its weights have no gradient afterwards."""
    for weight in runner.weights:
        weight.grad = None


def _count(runner: Runner, ops: int) -> None:
    if len(DEVICE.spans) != ops:
        raise RuntimeError(f"{runner.name} ran {len(DEVICE.spans)} ops in a step, not {ops}")


def interleave(
    runners: list[Runner], unit: float, rounds: int, steps: int, ops: int
) -> list[Samples]:
    """The samples of each runner. Every order of the runners takes its turn, and each of them
    takes a step without sleep first, so that no one pays for what the one before has left."""
    samples = {
        r.name: Samples(r.name, unit, unit * makespan(r.rows, fused=r.fused), 0) for r in runners
    }
    orders = islice(cycle(permutations(runners)), rounds)
    for runner in chain.from_iterable(orders):
        DEVICE.unit = 0.0
        runner.step()
        DEVICE.unit = unit
        for _ in range(steps):
            _sample(runner, samples[runner.name], ops)
    return list(samples.values())


def _sample(runner: Runner, into: Samples, ops: int) -> None:
    forget(runner)
    DEVICE.spans.clear()
    start = agreed_start()
    main, process = time.thread_time(), time.process_time()
    runner.step()
    end = time.perf_counter(), time.thread_time(), time.process_time()
    _count(runner, ops)
    mine = (end[0] - start, end[1] - main, end[2] - process, DEVICE.spans)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    seconds, mains, processes, spans = zip(*every, strict=True)
    into.seconds.append(max(seconds))
    into.main.append(sum(mains))
    into.process.append(sum(processes))
    into.ops = sum(map(len, spans))
    found = excess(runner.rows, list(spans), max(seconds), into.unit, fused=runner.fused)
    for kind, part in found.items():
        into.parts.setdefault(kind, []).append(part)


def agreed_start() -> float:
    """Wait for an instant that rank 0 names; the ranks of one machine share a monotonic clock."""
    start = torch.tensor(time.perf_counter() + _LEAD, dtype=torch.float64)
    dist.barrier()
    start.fill_(time.perf_counter() + _LEAD)
    dist.broadcast(start, 0)
    time.sleep(max(0.0, start.item() - time.perf_counter()))
    return start.item()
