"""What code reads beside its modules is followed: class attributes, globals, closures, defaults."""

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.mode import Watch

HERE = sys.modules[__name__]
SCALE = 1.0
TABLE = {"scale": 1.0, "unread": 1.0}
CONFIG = SimpleNamespace(scale=1.0)
SHIFT = torch.zeros(4)
UNREAD = 1.0


class Constants:
    scale = 1.0
    unread = 1.0


class Options:
    scale = 1.0


class Scaled:
    """An object that is called."""

    def __call__(self, x: Tensor) -> Tensor:
        return x * INDIRECT

    @classmethod
    def apply(cls, x: Tensor) -> Tensor:
        return cls()(x) * factor_of(cls)


def factor_of(cls: type) -> float:
    return cls.times  # type: ignore[attr-defined, no-any-return]


Scaled.times = 1.0  # type: ignore[attr-defined]
INDIRECT = 1.0


class Rescaled(torch.autograd.Function):
    """A function whose backward reads an attribute of its class."""

    scale = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * Rescaled.scale


IMPORTED = ModuleType(f"{__name__}_imported")
IMPORTED.scale = 1.0  # type: ignore[attr-defined]
sys.modules[IMPORTED.__name__] = IMPORTED


def importing(x: Tensor) -> Tensor:
    from tests.cpu.test_surroundings_imported import scale  # type: ignore

    return x * scale  # type: ignore[no-any-return]


def helper(x: Tensor) -> Tensor:
    return inner(x) * SCALE


def inner(x: Tensor) -> Tensor:
    return x + SHIFT


def enclosing() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    scale = 1.0

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return lambda x: x * scale, change


CLOSED, CHANGE = enclosing()


class Base(nn.Module):
    factor = 1.0
    options = {"factor": 1.0}  # noqa: RUF012

    def scaled(self, x: Tensor, by: list[float] = [1.0]) -> Tensor:  # noqa: B006
        return x * self.factor * by[0]

    @property
    def sign(self) -> float:
        return Base.options["factor"]


class Model(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.act = functools.partial(torch.mul, other=1.0)
        self.held = Options()

    def forward(self, x: Tensor) -> Tensor:
        x = Rescaled.apply(Scaled.apply(x) * self.held.scale)  # type: ignore[no-untyped-call]
        x = self.act(self.scaled(x)) * self.sign * getattr(self, "more", 1.0)
        x = CLOSED(helper(importing(x))) * TABLE["scale"] * CONFIG.scale * Constants.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "class attribute": lambda m, patch: patch(Base, "factor", 2.0),
    "attribute of a class that had none": lambda m, patch: patch(Model, "factor", 2.0),
    "container of a class": lambda m, patch: patch(Base.options, "factor", 2.0),
    "method": lambda m, patch: patch(Base, "scaled", lambda self, x: x * 2),
    "default": lambda m, patch: patch(Base.scaled.__defaults__[0], 0, 2.0),  # type: ignore[index]
    "global": lambda m, patch: patch(HERE, "SCALE", 2.0),
    "global function": lambda m, patch: patch(HERE, "inner", lambda x: x * 2),
    "global tensor": lambda m, patch: SHIFT.add_(1.0),
    "global dict": lambda m, patch: patch(TABLE, "scale", 2.0),
    "global namespace": lambda m, patch: patch(CONFIG, "scale", 2.0),
    "module that is imported in a function": lambda m, patch: patch(IMPORTED, "scale", 2.0),
    "other class": lambda m, patch: patch(Constants, "scale", 2.0),
    "class of an object": lambda m, patch: patch(Options, "scale", 2.0),
    "class that is handed on": lambda m, patch: patch(Scaled, "times", 2.0),
    "call of an object": lambda m, patch: patch(HERE, "INDIRECT", 2.0),
    "backward of a function": lambda m, patch: patch(Rescaled, "scale", 2.0),
    "closure": lambda m, patch: CHANGE(2.0),
    "partial": lambda m, patch: setattr(m, "act", functools.partial(torch.mul, other=2.0)),
}


def put(owner: Any, name: Any, value: object) -> Callable[[], object]:
    """Change an attribute or an item; what changes it back."""
    if isinstance(owner, (dict, list)):
        before = owner[name]
        owner[name] = value
        return lambda: owner.__setitem__(name, before)
    own = vars(owner)
    had, before = name in own, own.get(name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before) if had else delattr(owner, name)


@pytest.fixture
def patch() -> Iterator[Callable[..., None]]:
    undo: list[Callable[[], object]] = [lambda: SHIFT.zero_(), lambda: CHANGE(1.0)]
    yield lambda *change: undo.append(put(*change))
    for each in reversed(undo):
        each()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str, patch: Any) -> None:
    model = Model()
    watch = Watch(model)
    before = watch.mode()
    assert watch.mode() is before
    CHANGES[change](model, patch)
    assert watch.mode() != before


def test_what_code_does_not_read_is_no_change(patch: Any) -> None:
    watch = Watch(Model())
    before = watch.mode()
    for owner, name in ((HERE, "UNREAD"), (Constants, "unread")):
        patch(owner, name, 2.0)
    assert watch.mode() is before


def test_steps_follow(patch: Any) -> None:
    model, x = Model(), torch.ones(3, 4)
    pipe = fxpipe.compile(model, {"x": x}, ranks=1)
    for change in ("class attribute", "global", "closure", "class of an object"):
        CHANGES[change](model, patch)
        torch.testing.assert_close(pipe.step([{"x": x}]).loss, model(x))
