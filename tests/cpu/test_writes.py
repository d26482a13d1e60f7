"""In-place writes of many kinds have eager's values and gradients, or are refused by name."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CaptureError
from tests.eager import trained_alike

Body = Callable[[Tensor, Tensor], Tensor]


def masks(x: Tensor, y: Tensor) -> Tensor:
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask |= x > 0.5
    mask &= x < 2
    count = torch.full_like(x, 2.0)
    count.eq_(2)
    return x.masked_fill(mask, 0.0) * count


def taken_apart(x: Tensor, y: Tensor) -> Tensor:
    table = torch.zeros_like(x)
    table.split(2, -1)[1].add_(1)
    table.chunk(3, dim=-1)[2].mul_(0).sub_(3)
    table.unbind(1)[0].fill_(5)
    return x * table + y


def moved(x: Tensor, y: Tensor) -> Tensor:
    z = y * 1
    z.movedim(0, -1)[0].mul_(2)
    z.swapaxes(1, 2)[:, 0].add_(x[..., 0])
    z.narrow(-1, 1, 2).mul_(3)
    z[:, 0:2][..., 1].index_put_((torch.tensor([0]),), torch.ones((), dtype=z.dtype))
    z.expand_as(z).mul_(1.5)
    z.mT[:, 2].neg_()
    return x + z


def parts(x: Tensor, y: Tensor) -> Tensor:
    z = torch.complex(x, y)
    z.real.mul_(2)
    z.imag.add_(x)
    torch.view_as_real(z)[..., 0].add_(1)
    return z.real * z.imag


def outputs(x: Tensor, y: Tensor) -> Tensor:
    scale = torch.zeros(x.shape[-1], dtype=x.dtype)
    torch.mul(torch.ones_like(scale), 3, out=scale)
    table = torch.ones(x.shape[-1], x.shape[-1], dtype=x.dtype)
    table.fill_diagonal_(4)
    return x * scale + y @ table


def several(x: Tensor, y: Tensor) -> Tensor:
    value, _ = y.softmax(-1).topk(2, dim=-1)
    value /= value.sum(-1, keepdim=True)
    index = y.detach().topk(2, dim=-1)[1]
    index += 1
    index[..., 0] -= 1
    return x * value.sum(-1, keepdim=True) * value[..., :1] + index.sum(-1, keepdim=True)


def overloads(x: Tensor, y: Tensor) -> Tensor:
    """In-place operators whose overloads are called otherwise than those of their counterparts."""
    z = (y * y + 1).pow_(2).pow_(x.sigmoid()) * 1
    torch.pow(z.detach(), 0.5, out=torch.empty_like(z)).floor_divide_(z.detach())
    z.transpose_(1, 2)
    z[:, 0].add_(1)
    z.transpose_(1, 2)
    z.swapaxes_(0, 1)[0].mul_(2)
    return z.swapaxes_(0, 1) + x


class Model(nn.Module):
    def __init__(self, bodies: list[Body]) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in bodies)
        self.bodies = bodies

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer, body in zip(self.layers, self.bodies, strict=True):
            x = body(x, layer(x)).tanh()
        return x.square().mean()


@pytest.mark.parametrize(
    "bodies", [[masks, moved, outputs], [taken_apart, parts, several, overloads]]
)
def test_values(bodies: list[Body]) -> None:
    torch.manual_seed(0)
    model = Model(bodies).double()
    batch = [(torch.randint(0, 9, shape),) for shape in [(2, 3), (3, 5)]]
    trained_alike(model, batch, 1e-12, ranks=2)


def behind_autograd(x: Tensor, y: Tensor) -> Tensor:
    z = y * 1
    z.detach().mul_(2)
    return z


def overlapping(x: Tensor, y: Tensor) -> Tensor:
    x.new_zeros(9).unfold(0, 3, 3)[0].add_(1)
    z = y.new_zeros(12)
    z.unfold(0, 3, 3)[0].add_(1)
    return y * z.sum()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (behind_autograd, r"aten\.mul_\.Tensor .*test_writes\.py.* aten\.detach"),
        (overlapping, r"aten\.add_\.Tensor .*test_writes\.py.* aten\.unfold"),
    ],
)
def test_refused(body: Body, found: str) -> None:
    with pytest.raises(CaptureError, match=found):
        fxpipe.compile(Model([body]).double(), (torch.zeros(2, 3, dtype=torch.long),), ranks=1)
