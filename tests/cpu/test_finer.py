"""A backbone with fewer blocks than stages is cut inside its blocks."""

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import StageError
from tests.eager import trained_alike


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x.mean(1, keepdim=True)) * x
        return x + self.down(self.up(x).relu())


class Short(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(9, 6), nn.ModuleList([Block(), Block()])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("schedule", ["nested/1f1b", "stage/1f1b"])
def test_two_blocks_on_four_ranks(schedule: str) -> None:
    torch.manual_seed(0)
    model = Short().double()
    batch = [(torch.randint(0, 9, (2, n)),) for n in (3, 5, 4)]
    pipe = trained_alike(model, batch, 1e-12, schedule=schedule, ranks=4)
    assert [stage.name for stage in pipe.cut.stages] == ["llm0", "llm1", "llm2", "llm3"]


def test_more_stages_than_parts() -> None:
    with pytest.raises(StageError, match="can be cut into"):
        fxpipe.compile(Short(), (torch.zeros(2, 3, dtype=torch.long),), ranks=40)
