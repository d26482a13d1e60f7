"""A reentrant checkpoint in code that runs as it is."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.eager import trained_alike


def factor(x: Tensor) -> int:
    return 2 if x.sum() > 0 else 3


class Model(nn.Module):
    """An encoder that reads its input, and checkpoints; one checkpoint has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.encoder
        plain = checkpoint(first, x, use_reentrant=True)
        x = first(x).tanh() * factor(x)
        x = checkpoint(second, x, use_reentrant=True) + plain
        for block in self.blocks:
            x = block(x).tanh()
        loss: Tensor = x.square().mean()
        return loss


def test_equals_eager() -> None:
    torch.manual_seed(0)
    batch = [{"x": torch.randn(n, 3, dtype=torch.float64)} for n in (2, 4, 2)]
    pipe = trained_alike(Model().double(), batch, 1e-12, ranks=2, schedule="stage/1f1b")
    assert pipe.captured.prefix is not None
