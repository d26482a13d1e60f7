"""On one rank, code that draws as much as its numbers say draws what eager does."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxpipe
from tests.eager import loss_of
from tests.models import worst

Body = Callable[[Tensor], Tensor]


class Model(nn.Module):
    """An encoder that draws with `body`, and blocks with dropout."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.encoder[0](x))
        x = self.encoder[1](x).tanh()
        for block in self.blocks:
            x = F.dropout(block(x).tanh(), 0.3, self.training)
        return x.square().mean()


def chosen(x: Tensor) -> Tensor:
    return x * 2 if torch.rand(1) < 0.5 else F.dropout(x, 0.2)


def rejecting(x: Tensor) -> Tensor:
    return x + nn.init.trunc_normal_(torch.empty(4, dtype=x.dtype), a=-0.5, b=0.5)


def by_activations(x: Tensor) -> Tensor:
    return x + torch.randn(1 + int(x.sum() > 0), 1, dtype=x.dtype).sum()


@pytest.mark.parametrize(
    ("body", "how"),
    [
        (chosen, {}),
        (rejecting, {"schedule": "nested/gpipe"}),
        (by_activations, {"recompute": ["encoder"], "schedule": "upfront/1f1b"}),
    ],
)
def test_draws_are_those_of_eager(body: Body, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Model(body).double()
    mbs = [{"x": torch.randn(n, 4, dtype=torch.float64)} for n in (2, 3, 2, 5)]
    reference = copy.deepcopy(model)
    pipe = fxpipe.compile(model, mbs[0], ranks=1, backend="local", **how)
    assert pipe.captured.prefix is not None
    for seeds in (None, [3, 4, 5, 6]):
        model.zero_grad()
        reference.zero_grad()
        torch.manual_seed(9)
        losses = []
        for number, mb in enumerate(mbs):
            if seeds:
                torch.manual_seed(seeds[number])
            losses.append(loss_of(reference, mb))
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        wanted = torch.rand(3)
        torch.manual_seed(9)
        assert torch.allclose(pipe.step(mbs, seeds=seeds).losses, torch.stack(losses))
        assert torch.equal(torch.rand(3), wanted)
        assert worst(model, reference) < 1e-10
    out_of_order = pipe.step(mbs, order=[1, 0, 3, 2], seeds=[3, 4, 5, 6]).losses
    assert torch.equal(out_of_order, pipe.step(mbs, order=[1, 0, 3, 2], seeds=[3, 4, 5, 6]).losses)
