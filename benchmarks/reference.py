"""What eager does in a step, and how far a model's gradients are from it.

A gradient is compared entry by entry: the largest difference, over the largest entry of that
parameter's gradient, but at least over FLOOR times the largest entry of all of the model's. The
floor is for gradients that are zero but for rounding (the bias of keys before a softmax).
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor, nn

from benchmarks.zoo.architecture import Architecture, Microbatch

FLOOR = 1e-3


@dataclass(frozen=True)
class Reference:
    """What a step must leave behind: eager's loss, gradients and buffers."""

    loss: float
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]

    @staticmethod
    def of(model: nn.Module, batch: Sequence[Microbatch]) -> "Reference":
        """Run them; the model is as before, but for gradients."""
        with unchanged(model):
            model.zero_grad()
            total = 0.0
            for mb in batch:
                outputs = model(**mb)
                loss = (outputs if isinstance(outputs, Tensor) else outputs.loss) / len(batch)
                loss.backward()
                total += loss.item()
            found = {name: p.grad for name, p in model.named_parameters()}
            buffers = {name: b.clone() for name, b in model.named_buffers()}
            model.zero_grad()
        return Reference(total, found, buffers)

    def far(self, model: nn.Module, names: Iterable[str]) -> tuple[float, str]:
        """The worst difference of a gradient or a buffer among those of these names, and which."""
        mine = set(names)
        largest = max(float(g.abs().max()) for g in self.gradients.values() if g is not None)
        found = [(0.0, "")]
        for name, p in model.named_parameters():
            if name in mine:
                found.append((_far(p.grad, self.gradients[name], FLOOR * largest), name))
        for name, b in model.named_buffers():
            if name in mine:
                found.append((_far(b, self.buffers[name], 1.0), name))
        return max(found)


def _far(one: Tensor | None, other: Tensor | None, floor: float) -> float:
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    if not other.numel():
        return 0.0
    difference = float((one.double() - other.double()).abs().max())
    distance = difference / max(float(other.double().abs().max()), floor)
    return float("inf") if distance != distance else distance


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Whatever is written to the buffers inside is undone, and numbers are drawn from one seed."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    before = {name: b.clone() for name, b in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])


def rounding(architecture: Architecture, expected: Reference, equal: int) -> float:
    """How far the gradients of the reference are from those in float64; 0 where there are none."""
    model, batch = architecture.build(torch.float64), architecture.microbatches(torch.float64)
    try:
        exact = Reference.of(model, batch[:1] * equal or batch)
    except Exception:  # some operators are not there in float64
        return 0.0
    for name, parameter in model.named_parameters():
        gradient = expected.gradients[name]
        parameter.grad = None if gradient is None else gradient.double()
    return exact.far(model, dict(model.named_parameters()))[0]
