"""What a graph is traced with is watched from step to step: followed, never silently stale."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_full_backward_hook,
)

import fxpipe
from fxpipe.errors import CaptureError
from fxpipe.mode import Watch
from tests import models


class Block(nn.Module):
    """A linear layer whose scale, signs and bias come from a configuration and plain attributes."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), nn.Tanh()
        self.config = config
        self.signs = [1, -1]
        self.constants = {"shift": torch.ones(4)}

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.linear(x)) * self.config.scale * self.config.more["factor"]
        return x * sum(self.signs[0:1]) + self.constants["shift"]


class Model(nn.Module):
    """Three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(scale=1.5, more={"factor": 2.0}, names=("a", "b"))
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def made() -> Any:
    torch.manual_seed(0)
    return Model().double()


CHANGES: dict[str, Callable[[Any], object]] = {
    "configuration": lambda m: setattr(m.config, "scale", 0.5),
    "nested configuration": lambda m: m.config.more.update(factor=3.0),
    "list": lambda m: m.blocks[0].signs.__setitem__(0, -1),
    "tensor in a dict": lambda m: m.blocks[1].constants["shift"].add_(1),
    "module replaced": lambda m: setattr(m.blocks[1], "act", nn.ReLU()),
    "module added": lambda m: m.blocks.append(Block(m.config).double()),
    "forward hook": lambda m: m.blocks[0].register_forward_hook(lambda *call: call[2] * 2),
    "forward replaced": lambda m: setattr(m.blocks[2], "forward", lambda x: x + 1),
    "weights tied": lambda m: setattr(m.blocks[0].linear, "weight", m.blocks[1].linear.weight),
    "frozen": lambda m: m.blocks[0].requires_grad_(False),
    "train and eval": lambda m: m.blocks[0].eval(),
    "dtype": lambda m: m.float(),
}
KEPT: dict[str, Callable[[Any], object]] = {
    "nothing": lambda m: None,
    "an equal value": lambda m: setattr(m.config, "scale", 3.0 / 2),
    "an update": lambda m: m.blocks[0].linear.weight.data.add_(1),
    "another parameter": lambda m: setattr(
        m.blocks[0].linear, "bias", nn.Parameter(torch.zeros(4).double())
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    model = made()
    watch = Watch(model)
    before = watch.mode()
    CHANGES[change](model)
    assert watch.mode() != before
    assert watch.mode() == watch.mode()


@pytest.mark.parametrize("change", KEPT)
def test_what_no_graph_depends_on_is_no_change(change: str) -> None:
    model = made()
    watch = Watch(model)
    before = watch.mode()
    KEPT[change](model)
    assert watch.mode() == before


def test_settings_of_torch_count() -> None:
    watch = Watch(made())
    before = watch.mode()
    torch.set_default_dtype(torch.float64)
    try:
        assert watch.mode() != before
    finally:
        torch.set_default_dtype(torch.float32)
    assert watch.mode() == before
    hook = register_module_forward_hook(lambda *call: call[2] * 2)
    try:
        assert watch.mode() != before
    finally:
        hook.remove()
    assert watch.mode() == before


def test_a_hook_on_the_gradients_of_all_modules_is_refused() -> None:
    hook = register_module_full_backward_hook(lambda *call: None)
    try:
        with pytest.raises(CaptureError, match="every module has a hook on its gradient"):
            fxpipe.compile(made(), (torch.randn(2, 4).double(),), ranks=2, backend="local")
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        (lambda: torch.jit.script(nn.Linear(4, 4)), "is made by torch.jit"),
        (lambda: nn.LazyLinear(4), "is lazy"),
    ],
)
def test_what_no_trace_can_look_into_is_refused(layer: Callable[[], Any], found: str) -> None:
    model = made()
    model.blocks[0].linear = layer()
    with pytest.raises(CaptureError, match=f"module blocks.0.linear {found}"):
        fxpipe.compile(model, (torch.randn(2, 4).double(),), ranks=2, backend="local")


def test_steps_follow() -> None:
    """One after the other, in one model; eager is the truth."""
    model, reference = made(), made()
    batch = [torch.randn(n, 4).double() for n in (2, 3)]
    pipe = fxpipe.compile(model, (batch[0],), ranks=2, backend="local", schedule="nested/1f1b")
    for name in ("nothing", "configuration", "list", "tensor in a dict", "weights tied"):
        for part in (model, reference):
            (CHANGES | KEPT)[name](part)
            part.zero_grad()
        result = pipe.step([(x,) for x in batch])
        losses = [reference(x) for x in batch]
        (sum(losses, start=torch.zeros(())) / 2).backward()
        assert torch.allclose(result.losses, torch.stack(losses).detach(), rtol=1e-12), name
        assert models.worst(model, reference) < 1e-10, name
