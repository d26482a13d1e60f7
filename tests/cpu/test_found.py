"""What random models have found: the smallest model of each kind equals eager."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxpipe
from tests.models import worst

Body = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """An embedding, a body, two layers and a head."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.adapters = nn.ModuleList([nn.Linear(4, 4)])
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.body(self, self.embed(ids))
        for layer in self.layers:
            x = x + layer(x).tanh()
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def reads_its_backbone(model: Model, x: Tensor) -> Tensor:
    """A chain of one block looks like an encoder, and is none: tokens enter it."""
    return x + model.adapters[0](x).tanh()


def laid_out_otherwise(model: Model, x: Tensor) -> Tensor:
    """The kernel gives its gradient other strides than its trace says."""
    y = F.batch_norm(x.transpose(1, 2), None, None, training=True)
    return x + y.transpose(1, 2)


def only_reads(model: Model, x: Tensor) -> Tensor:
    """The first stage reads a tied weight that only the last one trains."""
    for frozen in (model.embed, model.adapters, model.layers[0]):
        frozen.requires_grad_(False)
    return x + x @ model.head.weight[:4].detach()


def overwritten(model: Model, x: Tensor) -> Tensor:
    """What is written over gets a gradient of zeros in eager, not None."""
    y = model.adapters[0](x)
    y.copy_(x)
    z = model.head(x)
    z.zero_()
    return x + y + z.sum(-1, keepdim=True)


@pytest.mark.parametrize("body", [reads_its_backbone, laid_out_otherwise, only_reads, overwritten])
def test_equals_eager(body: Body) -> None:
    torch.manual_seed(0)
    model = Model(body).double()
    model.body(model, torch.zeros(2, 2, 4).double())
    batch = [{"ids": torch.randint(0, 9, (2, 3))} for _ in range(2)]
    reference = copy.deepcopy(model)
    expected = [reference(**mb) for mb in batch]
    (sum(expected) / len(batch)).backward()  # type: ignore[union-attr]
    result = fxpipe.compile(model, batch[0], schedule="nested/1f1b", ranks=2).step(batch)
    assert torch.allclose(result.losses, torch.stack(expected), rtol=1e-10, atol=0)
    assert worst(model, reference) < 1e-10
