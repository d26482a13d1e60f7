"""Numbers that a model writes down in messages alone."""

import warnings

import torch
from torch import Tensor, nn

from tests.eager import trained_alike


class Reporting(nn.Module):
    """Checks its sizes, and a number that follows from data, with messages that say them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        count = (ids > 3).sum().item()
        torch._check(count <= ids.numel(), lambda: "never")
        if x.shape[0] < 1:
            raise ValueError(f"{x.shape[0]} rows, {count} of them")
        warnings.warn(f"{x.shape[0]} rows, {count} ids", stacklevel=1)
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


def test_numbers_in_messages_bind_no_graph() -> None:
    batch = [{"ids": torch.arange(rows * 3).reshape(rows, 3) % 9} for rows in (2, 3, 5)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = trained_alike(Reporting().double(), batch, 1e-12, ranks=2)
    assert pipe.captures == 1
