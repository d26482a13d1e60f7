"""Processes that run tables without a model: each op takes the time of a table of costs.

    with Emulator(ranks=4) as emulator:
        timelines = emulator.run(table, costs, steps=3)

The programs, the processes and the transfers over gloo are those of a real step; see
`fxpipe.emulation` for what stands in place of its graphs. A rank that fails or dies ends all.
"""

import contextlib
import multiprocessing as mp
import tempfile
import time
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fxpipe import passes
from fxpipe.backends import Emulated, LostError, choose
from fxpipe.costs import Costs
from fxpipe.emulation import Emulation, slots
from fxpipe.errors import FxpipeError, RankError, TableError
from fxpipe.passes.communicate import communicate
from fxpipe.passes.reduce import reduce
from fxpipe.program import emit
from fxpipe.rules_order import makes_progress
from fxpipe.runtime import run_step
from fxpipe.table import Table
from fxpipe.timeline import Timeline
from fxpipe.verify import MOVES, verify

_PATIENCE = 15.0  # seconds from the first failure until what is left is ended
_FOREVER = timedelta(days=1)  # of gloo: a rank that has died closes its sockets


class _Job(NamedTuple):
    table: Table
    costs: Costs
    steps: int
    fraction: float


class _Answer(NamedTuple):
    """The timelines, of rank 0 alone, or an error. says: less of it says more of the cause; another
    rank's failure that this one has only noticed says least."""

    timelines: tuple[Timeline, ...]
    error: FxpipeError | None = None
    says: int = 0


def finished(table: Table, costs: Costs) -> Table:
    """The table, verified, with transfers and reductions if it has none. Raises TableError."""
    if any(op.way for row in table.rows for op in row):
        verify(table)
        return table
    return passes.run(table, (partial(communicate, costs=costs), reduce))


class Emulator:
    """So many processes, one per rank, until the end of the `with` or the first failure."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.processes: list[mp.process.BaseProcess] = []
        self._pipes: list[Connection[Any, Any]] = []
        self._folder = contextlib.ExitStack()

    def __enter__(self) -> "Emulator":
        folder = self._folder.enter_context(tempfile.TemporaryDirectory())
        methods = mp.get_all_start_methods()
        context: Any = mp.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:  # torch is imported once for all ranks
            context.set_forkserver_preload([__name__])
        for rank in range(self.ranks):
            mine, its = context.Pipe()
            args = rank, self.ranks, str(Path(folder, "store")), its
            process = context.Process(target=_serve, args=args, name=f"rank{rank}", daemon=True)
            process.start()
            its.close()
            self.processes.append(process)
            self._pipes.append(mine)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()  # a rank that waits for a job ends
        self._end(time.monotonic() + 5)
        self._folder.close()

    def run(
        self, table: Table, costs: Costs, *, steps: int = 1, fraction: float = 1.0
    ) -> tuple[Timeline, ...]:
        """The measured timeline of each step, after one that warms up in no time.

        fraction: of the bytes of each transfer that travel. The links take the costs' time in any
        case. Raises TableError, or RankError where a rank fails or dies; then all ranks end.
        """
        if not self.processes:
            raise RankError("an earlier step failed; start another emulator")
        if len(table.rows) != self.ranks:
            raise TableError(
                f"the table has {len(table.rows)} ranks, and {self.ranks} processes run"
            )
        if not any(op.way for row in table.rows for op in row):
            table = finished(table, costs)
        verify(table, (*MOVES, makes_progress))  # else ranks could wait for ever
        job = _Job(table, costs, steps, fraction)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has died; that is said below
                pipe.send(job)
        answers = self._answers()
        failures = [answer for answer in answers.values() if answer.error is not None]
        if failures:
            self._end(time.monotonic())
            error = min(failures, key=lambda answer: answer.says).error
            assert error is not None
            raise error
        return answers[0].timelines

    def _answers(self) -> "dict[int, _Answer]":
        """One of each rank, as far as they come in time once one has failed."""
        found: dict[int, _Answer] = {}
        deadline = None
        while len(found) < self.ranks:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in found], left)
            if not ready:
                break
            for rank in (at for at, pipe in enumerate(self._pipes) if pipe in ready):
                found[rank] = self._answer(rank)
                if deadline is None and found[rank].error is not None:
                    deadline = time.monotonic() + _PATIENCE
        return found

    def _answer(self, rank: int) -> "_Answer":
        try:
            answer: _Answer = self._pipes[rank].recv()
        except (EOFError, OSError):
            self.processes[rank].join(5)
            code = self.processes[rank].exitcode
            what = f"rank {rank} has died, with exit code {code}; all ranks have ended"
            answer = _Answer((), RankError(what))
        return answer

    def _end(self, deadline: float) -> None:
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self.processes.clear()


def _serve(rank: int, ranks: int, store: str, pipe: "Connection[Any, Any]") -> None:
    """One rank: jobs come by the pipe until it is closed."""
    torch.set_num_threads(1)
    method = f"file://{store}"
    dist.init_process_group(
        "gloo", init_method=method, rank=rank, world_size=ranks, timeout=_FOREVER
    )
    chosen = choose("emulated", costs=Costs({}))
    assert isinstance(chosen, Emulated)
    while True:
        try:
            job: _Job = pipe.recv()
        except EOFError:
            break
        try:
            timelines = _run(rank, chosen.costing(job.costs), job)
            pipe.send(_Answer(timelines))
        except FxpipeError as error:
            pipe.send(_Answer((), error, says=1 + isinstance(error.__cause__, LostError)))
            break
    # No destroy_process_group: it would wait for ranks that have died.


def _run(rank: int, backend: Emulated, job: _Job) -> tuple[Timeline, ...]:
    """The steps of a job, after one in which ops take no time."""
    batch = slots(job.table, job.costs, job.fraction)
    timelines = []
    for costs in (Costs({}), *[job.costs] * job.steps):
        where = backend.costing(costs)
        engine = Emulation(costs)
        program = emit(job.table, rank, (), {}, engine=engine, ahead=where.ahead)
        where.connect(job.table)
        timelines.append(run_step(where, {rank: program}, batch, torch.float64))
    return tuple(step.timeline for step in timelines[1:]) if rank == 0 else ()
