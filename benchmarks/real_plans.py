"""Which layers each stage of a hand-made pipeline has: dealt out evenly, or balanced by hand.

The encoder is in the first stage and the generator in the last one, for every plan.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from itertools import combinations_with_replacement, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import ideal
from benchmarks.real_model import Microbatch, Omni

Plan = tuple[range, ...]
"""The layers of each stage."""
Pair = tuple[float, float]  # seconds of forward and backward

RANKS = 2
# Schedules of torch by their names here: stages on a rank, base (`fxpipe.skeletons`), and whether
# the backward of a stage is one op.
SCHEDULES: Mapping[str, tuple[int, str, bool]] = {
    "1F1B": (1, "1f1b", True),
    "interleaved": (2, "interleaved", True),
    "ZBV": (2, "zb-v", False),
}
_REPEATS = 5


def even(layers: int, stages: int) -> Plan:
    """As many layers for each stage, as nearly as can be."""
    return _plan(tuple(round(layers * at / stages) for at in range(1, stages)), layers)


def balanced(schedule: str, layers: int, takes: Mapping[str, Pair], microbatches: int) -> Plan:
    """Of all plans the one with the shortest step of this schedule, by what each part takes: what
    somebody gets who measures the parts and tries out, by arithmetic, every way to cut."""
    chunks, base, fused = SCHEDULES[schedule]
    rows = ideal.rows(base, RANKS, microbatches)
    cuts = combinations_with_replacement(range(layers + 1), RANKS * chunks - 1)
    plans = [_plan(cut, layers) for cut in cuts]
    return min(plans, key=lambda plan: ideal.makespan(rows, fused=fused, takes=_takes(plan, takes)))


def _plan(cut: tuple[int, ...], layers: int) -> Plan:
    return tuple(range(a, b) for a, b in pairwise([0, *cut, layers]))


def _takes(plan: Plan, takes: Mapping[str, Pair]) -> Callable[[ideal.Op], float]:
    """Seconds of an op. A backward is an input gradient and a weight gradient, half of it each."""
    seconds = {}
    for stage, layers in enumerate(plan):
        for index, kind in enumerate("FB"):
            own = takes["layer"][index] * len(layers)
            own += takes["first"][index] if stage == 0 else 0.0
            own += takes["last"][index] if stage == len(plan) - 1 else 0.0
            seconds[kind, stage] = own
    return lambda op: (
        seconds["F", op[1]] if op[0] == "F" else seconds["B", op[1]] / (2 if op[1] else 1)
    )


def parts(model: Omni, mb: Microbatch) -> dict[str, Pair]:
    """Seconds of a layer, of what comes before the first and of what comes after the last, the
    same numbers on every rank."""
    hidden = model.read(model.see(mb["images"], mb["sample"]), mb["tokens"]).detach()
    hidden.requires_grad_()

    def first() -> Tensor:
        return model.read(model.see(mb["images"], mb["sample"]), mb["tokens"])

    def layer() -> Tensor:
        x: Tensor = model.layers[0](hidden)
        return x

    def last() -> Tensor:
        return model.say(hidden, mb["tokens"]) + model.make(hidden, mb["noise"], mb["image"])

    pairs = [timed(part) for part in (first, layer, last)]
    shared = torch.tensor(pairs, dtype=torch.float64)
    if dist.is_initialized():
        dist.broadcast(shared, 0)
    model.zero_grad()
    found = [(forward, backward) for forward, backward in shared.tolist()]
    return dict(zip(("first", "layer", "last"), found, strict=True))


def timed(part: Callable[[], Tensor], repeats: int = _REPEATS) -> Pair:
    """Median seconds of the forward of a part of a model and of its backward."""
    pairs = []
    for _ in range(repeats):
        start = time.perf_counter()
        out = part()
        middle = time.perf_counter()
        torch.autograd.backward(out, torch.ones_like(out))
        pairs.append((middle - start, time.perf_counter() - middle))
    forward, backward = zip(*pairs[1:], strict=True)
    return statistics.median(forward), statistics.median(backward)
