"""The demo from start to end: eager in this process, the pipeline in others, and what both gave."""

import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from torch.multiprocessing.spawn import ProcessException, start_processes

from fxpipe.demo import data, model, show, worker

MICROBATCHES = 8
SIZE = 16
ROUNDS = 12
SHOWN = 7
"""The digit that the model is asked about at the end."""


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    ranks: int = 2
    steps: int = 40
    schedule: str = "auto"
    trace: Path = Path("fxpipe-demo.perfetto.json")


def run(options: Options, console: Console | None = None) -> int:
    """Both trainings and the report; the exit status, 1 if they differ or do not learn."""
    console = console or Console(highlight=False)
    started = time.perf_counter()
    os.environ["OMP_NUM_THREADS"] = "1"  # the processes that are started read it
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        setup = _setup(options, Path(folder))
        show.opening(console, setup, _parameters())
        try:
            with _bars(console) as bars:
                outcome = _train(setup, bars)
        except ProcessException as error:
            console.print("[red]a rank failed[/red]")
            console.print(str(error), markup=False, soft_wrap=True)
            return 1
    show.report(console, setup, outcome)
    console.print(f"whole demo: {time.perf_counter() - started:.0f} s")
    return 0 if outcome.faithful and outcome.falling else 1


def _setup(options: Options, folder: Path) -> worker.Setup:
    return worker.Setup(
        ranks=options.ranks,
        steps=options.steps,
        rounds=ROUNDS,
        schedule=options.schedule,
        microbatches=MICROBATCHES,
        size=SIZE,
        trace=options.trace.absolute(),
        folder=folder,
    )


def _parameters() -> int:
    return sum(parameter.numel() for parameter in model.build().parameters())


def _bars(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<44}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def _train(setup: worker.Setup, bars: Progress) -> show.Outcome:
    """The ranks compile while this process trains in eager: nothing is timed meanwhile."""
    digits = data.load()
    with _ranks(setup) as events:
        eager = _eager(setup, digits, bars)
        compiled, losses, timings = _collect(setup, events, bars)
    llava = model.build()
    llava.load_state_dict(worker.gathered(setup))
    unseen = digits.digits[data.UNSEEN :]
    answers = model.answers(llava, digits.pixels[data.UNSEEN :], data.PROMPTS[0])
    right = sum(data.caption(digit) == said for digit, said in zip(unseen, answers, strict=True))
    shown = unseen.index(SHOWN)
    picture = data.drawn(digits.pixels[data.UNSEEN + shown])
    sample = show.Sample(picture, data.NAMES[SHOWN], answers[shown], right, len(unseen))
    return show.Outcome(tuple(eager), tuple(losses), compiled, tuple(timings), sample)


def _eager(setup: worker.Setup, digits: data.Digits, bars: Progress) -> list[float]:
    llava = model.build()
    optimizer = model.optimizer(llava.parameters())
    losses = []
    bar = bars.add_task("eager, one process", total=setup.steps, note="")
    for step in range(setup.steps):
        model.set_rate(optimizer, step)
        optimizer.zero_grad()
        batch = data.step_of(digits, step, setup.microbatches, setup.size, model.PATCHES)
        losses.append(model.eager_step(llava, batch))
        optimizer.step()
        bars.update(bar, advance=1, note=f"loss {losses[-1]:.4f}")
    return losses


@contextmanager
def _ranks(setup: worker.Setup) -> Iterator[Iterator[worker.Event]]:
    """Starts every rank and gives what rank 0 reports; a failed rank raises ProcessException."""
    events: Any = get_context("spawn").Queue()
    processes = start_processes(  # type: ignore[no-untyped-call]
        worker.main, (setup, events), setup.ranks, join=False, start_method="spawn"
    )
    try:
        yield _reported(events, lambda: bool(processes.join(timeout=0.1)))
    finally:
        for process in processes.processes:
            process.terminate()


def _reported(events: Any, ended: Callable[[], bool]) -> Iterator[worker.Event]:
    over = False
    while not over:
        over = ended()
        try:
            while True:
                yield events.get_nowait()
        except queue.Empty:
            continue


def _collect(
    setup: worker.Setup, events: Iterator[worker.Event], bars: Progress
) -> tuple[worker.Compiled, list[float], list[worker.Timed]]:
    compiled, losses, timings = worker.Compiled((), (), ()), [], []
    train = bars.add_task(f"fxpipe, {setup.ranks} processes", total=setup.steps, note="compiling")
    clock = bars.add_task("step time beside torch 1F1B", total=setup.rounds, note="", start=False)
    for event in events:
        match event:
            case worker.Compiled():
                compiled = event
            case worker.Trained(loss=loss):
                losses.append(loss)
                bars.update(train, advance=1, note=f"loss {loss:.4f}")
                if len(losses) == setup.steps:
                    bars.start_task(clock)
            case worker.Timed():
                timings.append(event)
                bars.update(clock, advance=1)
    return compiled, losses, timings
