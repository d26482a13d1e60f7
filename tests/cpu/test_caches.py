"""What code puts away while it is traced is no trap for eager, nor for the next trace."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.eager import trained_alike

WIDTH = 4
TABLE: dict[int, Tensor] = {}
HELD: Any = None


@functools.cache
def cached(width: int) -> Tensor:
    return torch.arange(width, dtype=torch.float64)


def in_a_dict(width: int) -> Tensor:
    if width not in TABLE:
        TABLE[width] = torch.ones(width).double() * 2
    return TABLE[width]


def in_a_default(width: int, known: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    if width not in known:
        known[width] = torch.ones(width).double() * 3
    return known[width]


def in_a_global(width: int) -> Tensor:
    global HELD
    if HELD is None:
        HELD = torch.ones(width).double() * 5
    return HELD  # type: ignore[no-any-return]


def enclosing() -> Callable[[int], Tensor]:
    known: dict[int, Tensor] = {}

    def in_a_closure(width: int) -> Tensor:
        if width not in known:
            known[width] = torch.ones(width).double() * 4
        return known[width]

    return in_a_closure


ENCLOSED = enclosing()


class Remembering(nn.Module):
    """Scales by what a function of its size remembers."""

    def __init__(self, how: int) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        functions = (cached, in_a_dict, in_a_default, in_a_global, ENCLOSED)
        scale = functions[self.how](x.shape[-1])
        for layer in self.layers:
            x = torch.tanh(layer(x)) * scale
        return x.square().mean()


@pytest.mark.parametrize("how", range(5))
def test_what_is_remembered_has_values(how: int) -> None:
    model = Remembering(how).double()
    batch = [{"x": torch.randn(n, WIDTH).double()} for n in (3, 5)]
    trained_alike(model, batch, 1e-10, ranks=1)
    assert type(model(**batch[0])) is Tensor
    trained_alike(model, batch, 1e-10, ranks=1)
