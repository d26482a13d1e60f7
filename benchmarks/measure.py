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

from benchmarks.emulated import DEVICE, precise_sleep
from benchmarks.ideal import makespan, rows
from benchmarks.runners import RUNNERS, Runner, Setting

_LEAD = 0.003  # seconds from the agreement on a start to the start


@dataclass
class Samples:
    """What one runner took with one length of op: one entry per step.

    seconds: the step, from the agreed start to the end of the last rank. main, process: CPU
    seconds of the main threads, and of whole processes, summed over the ranks.
    """

    runner: str
    unit: float
    ideal: float
    ops: int
    seconds: list[float] = field(default_factory=list)
    main: list[float] = field(default_factory=list)
    process: list[float] = field(default_factory=list)


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
        runner.weight.grad = None
        before = DEVICE.ops
        runner.step()
        if DEVICE.ops - before != ops:
            raise RuntimeError(f"{runner.name} ran {DEVICE.ops - before} ops in a step, not {ops}")
        torch.testing.assert_close(runner.weight.grad, runners[0].weight.grad)


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
    runner.weight.grad = None
    before = DEVICE.ops
    start = _agreed_start()
    main, process = time.thread_time(), time.process_time()
    runner.step()
    took = torch.tensor(
        [
            time.perf_counter() - start,
            time.thread_time() - main,
            time.process_time() - process,
            DEVICE.ops - before,
        ],
        dtype=torch.float64,
    )
    if DEVICE.ops - before != ops:
        raise RuntimeError(f"{runner.name} ran {DEVICE.ops - before} ops in a step, not {ops}")
    every = [torch.empty_like(took) for _ in range(dist.get_world_size())]
    dist.all_gather(every, took)
    table = torch.stack(every)
    into.seconds.append(table[:, 0].max().item())
    into.main.append(table[:, 1].sum().item())
    into.process.append(table[:, 2].sum().item())
    into.ops = int(table[:, 3].sum().item())


def _agreed_start() -> float:
    """Wait for an instant that rank 0 names; the ranks of one machine share a monotonic clock."""
    start = torch.tensor(time.perf_counter() + _LEAD, dtype=torch.float64)
    dist.barrier()
    start.fill_(time.perf_counter() + _LEAD)
    dist.broadcast(start, 0)
    time.sleep(max(0.0, start.item() - time.perf_counter()))
    return start.item()
