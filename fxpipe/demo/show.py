"""What the demo prints."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, zip_longest
from statistics import median

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from fxpipe.demo import worker

TOLERANCE = 1e-4
ROW_OPS = 14


@dataclass(frozen=True)
class Sample:
    """A digit never trained on, as text; what it is; what the model says of it; and how many of
    all such digits it captions right."""

    picture: str
    digit: str
    said: str
    right: int
    count: int


@dataclass(frozen=True)
class Outcome:
    """What both trainings gave. Losses are one per step."""

    eager: tuple[float, ...]
    losses: tuple[float, ...]
    compiled: worker.Compiled
    timings: tuple[worker.Timed, ...]
    sample: Sample

    @property
    def difference(self) -> float:
        """The largest difference between the losses of one step."""
        return max(abs(a - b) for a, b in zip(self.eager, self.losses, strict=True))

    @property
    def faithful(self) -> bool:
        """Whether the pipeline's losses are eager's throughout."""
        return self.difference <= TOLERANCE

    @property
    def falling(self) -> bool:
        """Whether the loss ends well below where it starts."""
        return self.losses[-1] < self.losses[0] / 2


def opening(console: Console, setup: worker.Setup, parameters: int) -> None:
    """What is about to happen."""
    console.print(
        f"[bold]fxpipe demo[/bold]: a LLaVA of {parameters / 1e6:.1f} million random weights "
        f"learns\nto caption handwritten digits: {setup.steps} steps of {setup.microbatches} "
        f"microbatches of {setup.size} images,\n{setup.ranks} processes over gloo, "
        "one thread each\n"
    )


def report(console: Console, setup: worker.Setup, outcome: Outcome) -> None:
    """Everything that the demo found."""
    _plan(console, outcome.compiled)
    _losses(console, outcome)
    _times(console, setup, outcome.timings)
    console.print(f"[bold]Timeline[/bold] of the last step: {setup.trace}")
    console.print("  open it at ui.perfetto.dev\n")
    _caption(console, outcome.sample)


def _plan(console: Console, compiled: worker.Compiled) -> None:
    console.print("\n[bold]Regions and stages[/bold], found in the model's graph")
    for line in (*compiled.regions, *compiled.stages):
        console.print(f"  {line}", soft_wrap=True)
    console.print(f"\n[bold]Operator table[/bold], the first {ROW_OPS} ops of each row")
    for row in compiled.rows:
        ops = row.split(" ")[: ROW_OPS + 2]
        console.print(f"  {' '.join(ops)} …", soft_wrap=True, markup=False)
    console.print()


def _losses(console: Console, outcome: Outcome) -> None:
    heads = ("step", "eager", "fxpipe", "apart")
    grid = Grid(*heads, *heads, title="Loss per step", title_justify="left")
    for column in grid.columns:
        column.justify = "right"
    rows = [_loss_row(*row) for row in zip(count(1), outcome.eager, outcome.losses, strict=False)]
    half = (len(rows) + 1) // 2
    for left, right in zip_longest(rows[:half], rows[half:], fillvalue=()):
        grid.add_row(*left, *right)
    console.print(grid)
    verdict = "equal" if outcome.faithful else "[red]NOT equal[/red]"
    falls = "falling" if outcome.falling else "[red]NOT falling[/red]"
    console.print(
        f"{verdict} to {TOLERANCE:g} throughout (largest difference {outcome.difference:.1e}), "
        f"and {falls}\n"
    )


def _loss_row(step: int, eager: float, ours: float) -> tuple[str, ...]:
    return str(step), f"{eager:.6f}", f"{ours:.6f}", f"{abs(eager - ours):.1e}"


def _times(console: Console, setup: worker.Setup, timings: Sequence[worker.Timed]) -> None:
    last = timings[-1]
    layers = ", ".join(str(len(stage)) for stage in last.plan)
    console.print(
        f"[bold]Step time[/bold], forward and backward, {len(timings)} steps of each in turn,\n"
        f"{setup.ranks} processes of one thread each"
    )
    _time(console, "fxpipe", [timing.fxpipe_seconds for timing in timings], last.fxpipe_loss)
    name = "torch.distributed.pipelining 1F1B"
    _time(console, name, [timing.torch_seconds for timing in timings], last.torch_loss)
    console.print(
        "  (the latter with the encoder in stage 0 and the fastest, as measured, of all\n"
        f"  splits of the decoder's layers over the stages: {layers})\n"
    )


def _time(console: Console, name: str, seconds: Sequence[float], loss: float) -> None:
    low, middle, high = (f"{1e3 * x:.0f}" for x in (min(seconds), median(seconds), max(seconds)))
    console.print(f"  {name:<34} {middle:>5} ms  ({low} to {high}), loss {loss:.5f}")


def _caption(console: Console, sample: Sample) -> None:
    console.print(f"[bold]A digit it has not seen[/bold] (a {sample.digit})")
    console.print(Text(sample.picture))
    console.print(f"the trained model says: [bold]{sample.said}[/bold]")
    console.print(f"of {sample.count} unseen digits it captions {sample.right} right\n")
