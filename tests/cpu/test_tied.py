"""Parameters that have several names, in places where torch or a module is not as usual."""

import copy

import torch
from torch import Tensor, nn

from tests.eager import trained_alike


class Quiet(nn.Module):
    """A part without gradients, and after it a result that nobody uses."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.factor, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.unused.weight = self.unused.weight if weight is None else weight

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            factor, shift = self.factor(x).mean(), x.mean(1, keepdim=True)
        x = x * factor + shift
        self.unused(x)
        return x


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first = Quiet()
        self.blocks = nn.ModuleList([first, Quiet(first.unused.weight)])
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


def test_what_torch_cuts_out_does_not_hide_the_users_of_a_tied_weight() -> None:
    batch = [{"x": torch.randn(rows, 4).double()} for rows in (2, 3)]
    trained_alike(Tied().double(), batch, 1e-12, schedule="stage/1f1b", ranks=1)


class Copied(nn.Module):
    """Two layers that are copies of one, and hold the same parameters in the same dict."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([first, copy.copy(first)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


def test_copies_of_a_module_may_share_its_parameters() -> None:
    batch = [{"x": torch.randn(rows, 4).double()} for rows in (2, 3)]
    trained_alike(Copied().double(), batch, 1e-12, schedule="stage/1f1b", ranks=2)
