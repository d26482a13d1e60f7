"""The engine that runs a stage's graphs against eager autograd, region by region, in one process.

Both run the same microbatch in turns, forward and backward of a region: what fxpipe's ops of it
take in a step (F, and B and W together), and what eager takes for the same modules.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.real_model import Microbatch, Omni, Sizes, batch, build
from fxpipe import Pipe, compile

Times = dict[str, tuple[float, float]]  # region -> seconds of forward and backward
_ROUNDS, _MICROBATCHES = 25, 4


def compared(sizes: Sizes, images: int) -> dict[str, Times]:
    """By engine and region, seconds of one microbatch: the least of all rounds, since what else is
    done on the machine only adds to them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, data = build(sizes), batch(sizes, [images] * _MICROBATCHES)
    pipe = compile(model, data[0], schedule="nested/1f1b", ranks=1, backend="local")
    runs: dict[str, Callable[[], Times]] = {
        "eager": lambda: _eager(model, data),
        "aten": lambda: _graphs(pipe, data),
    }
    samples: dict[str, list[Times]] = defaultdict(list)
    for _ in range(_ROUNDS + 1):
        for name, run in runs.items():
            model.zero_grad()
            samples[name].append(run())
    torch.set_num_threads(threads)
    return {name: _least(found[1:]) for name, found in samples.items()}


def _least(found: list[Times]) -> Times:
    return {
        region: (
            min(times[region][0] for times in found),
            min(times[region][1] for times in found),
        )
        for region in found[0]
    }


def _graphs(pipe: Pipe, data: list[Microbatch]) -> Times:
    """Of one step, by its own timeline."""
    pipe.step(data)
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for span in pipe.timeline.compute:
        region = pipe.cut.stage[span.op.stage].region
        seconds[region][span.op.kind != "F"] += span.seconds / len(data)
    return {region: (forward, backward) for region, (forward, backward) in seconds.items()}


def _eager(model: Omni, data: list[Microbatch]) -> Times:
    """Of one step, its autograd graph cut where the regions meet."""
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def forward(region: str, run: Callable[[], Tensor]) -> Tensor:
        start = time.perf_counter()
        out = run()
        seconds[region][0] += (time.perf_counter() - start) / len(data)
        return out

    def backward(region: str, out: list[Tensor], grads: list[Tensor | None]) -> None:
        start = time.perf_counter()
        torch.autograd.backward(out, grads)
        seconds[region][1] += (time.perf_counter() - start) / len(data)

    for mb in data:
        seen = forward("vision", partial(model.see, mb["images"], mb["sample"]))
        features = seen.detach().requires_grad_()
        loss, x = _backbone(model, features, mb, forward)
        hidden = x.detach().requires_grad_()
        make = partial(model.make, hidden, mb["noise"], mb["image"])
        made = forward("generator", make) / len(data)
        backward("generator", [made], [None])
        backward("llm", [loss / len(data), x], [None, hidden.grad])
        backward("vision", [seen], [features.grad])
    return {region: (forward, backward) for region, (forward, backward) in seconds.items()}


def _backbone(
    model: Omni,
    features: Tensor,
    mb: Microbatch,
    forward: Callable[[str, Callable[[], Tensor]], Tensor],
) -> tuple[Tensor, Tensor]:
    """The loss of the text, and the hidden states of the last layer."""

    def layers() -> Tensor:
        x = model.read(features, mb["tokens"])
        for layer in model.layers:
            x = layer(x)
        return x

    x = forward("llm", layers)
    return forward("llm", lambda: model.say(x, mb["tokens"])), x
