"""Random numbers before and behind a boundary: eager's own."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxpipe
from tests.eager import loss_of
from tests.models import worst

pytestmark = pytest.mark.slow


class Decoder(nn.Module):
    """Blocks with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.dropout(block(x).tanh(), 0.2)
        return x.square().mean()


class Noisy(nn.Module):
    """Draws as often, and as much, as integers say; then blocks that draw as well."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.embed = nn.Linear(4, 4), nn.Embedding(9, 4)
        self.decoder = Decoder()

    def forward(self, x: Tensor, counts: Tensor, ids: Tensor) -> Tensor:
        for count in [n for n in counts.tolist() for _ in range(n % 3)]:
            x = F.dropout(self.encoder(x).tanh(), 0.3)
            x = x + torch.randn(count, 4, dtype=x.dtype).sum(0) * torch.rand_like(x.t()).t()
        return self.decoder(self.embed(ids) + x.mean(0))


def batch() -> list[dict[str, Tensor]]:
    counts = [[1], [2, 1], [17, 2, 1], [1, 1], [3]]
    return [
        {
            "x": torch.randn(2 + len(each), 4, dtype=torch.float64),
            "counts": torch.tensor(each),
            "ids": torch.randint(0, 9, (2, 5)),
        }
        for each in counts
    ]


@pytest.mark.parametrize("how", [{}, {"recompute": ["encoder"]}])
def test_masks_are_those_of_eager(how: dict) -> None:
    torch.manual_seed(0)
    model, mbs = Noisy().double(), batch()
    reference = copy.deepcopy(model)
    pipe = fxpipe.compile(model, mbs, ranks=2, backend="local", schedule="transpose/1f1b")
    pipe = pipe.reschedule("nested/1f1b", 2, **how)
    assert pipe.captured.prefix is not None
    torch.manual_seed(5)
    losses = [loss_of(reference, mb) for mb in mbs]
    torch.stack(losses).mean().backward()
    wanted = torch.rand(3)
    torch.manual_seed(5)
    assert pipe.step(mbs).losses.tolist() == pytest.approx([float(x) for x in losses])
    assert torch.equal(torch.rand(3), wanted)
    assert worst(model, reference) < 1e-10
