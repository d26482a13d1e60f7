"""fxpipe on the model of `benchmarks.real`, each schedule laid out by what its ops have taken."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from torch import Tensor

from benchmarks.real_model import Microbatch, Omni
from benchmarks.real_runners import Runner
from fxpipe import Pipe, compile
from fxpipe.costmodel import observed
from fxpipe.costs import Costs
from fxpipe.cut import Kind

# What there is to run: schedule, options, and whether its table is laid out by what the ops of each
# microbatch have taken, or by their means, as if only their number were known.
WAYS: Mapping[str, tuple[str, Mapping[str, Any], bool]] = {
    "nested/1f1b": ("nested/1f1b", {}, True),
    "nested/zb-h1": ("nested/zb-h1", {}, True),
    "auto": ("auto", {}, True),
    "auto, few live": ("auto", {"live": {"modality": 1, "llm": 2}}, True),
    "nested/zb-h1, images not known": ("nested/zb-h1", {}, False),
}
QUICK, COMPILED = "nested/zb-h1", "nested/zb-h1"
_STEPS = 5


def compiled(model: Omni, data: Sequence[Microbatch], engine: str = "aten") -> Pipe:
    """The plain model, traced once for every schedule."""
    example = sorted(data, key=lambda mb: mb["images"].shape[0])[len(data) // 2]
    return compile(model, example, schedule="nested/1f1b", backend="gloo", engine=engine)


def runner(way: str, pipe: Pipe, data: Sequence[Microbatch]) -> Runner:
    """A way, its table derived once more with the seconds that its ops took."""
    schedule, options, told = WAYS[way]
    first = pipe.reschedule(schedule, **options)
    costs = measured(first, data)
    chosen = first.reschedule(schedule, costs=costs if told else mean(costs), **options)

    def step() -> Tensor:
        return chosen.step(data).loss

    return Runner(f"fxpipe {way}", step, list(chosen.parameters()))


def mean(costs: Costs) -> Costs:
    """One number for all microbatches."""
    seconds: dict[tuple[str, Kind], Any] = dict(costs.seconds)
    return replace(costs, seconds={key: fmean(of) for key, of in seconds.items()})


def measured(pipe: Pipe, data: Sequence[Microbatch]) -> Costs:
    """Seconds of each op of each microbatch, medians of some steps; the same on every rank."""
    pipe.step(data)
    found = []
    for _ in range(_STEPS):
        pipe.step(data)
        found.append(observed(pipe.timeline))
    keys = found[0].seconds
    return replace(found[0], seconds={key: _median(found, key) for key in keys})


def _median(found: Sequence[Costs], key: tuple[str, Kind]) -> tuple[float, ...]:
    steps: list[Any] = [costs.seconds[key] for costs in found]
    return tuple(median(of) for of in zip(*steps, strict=True))
