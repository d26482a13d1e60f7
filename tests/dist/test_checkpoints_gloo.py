"""Checkpoints of some ranks, for others and for eager: tied weights, buffers, optimizer states."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxpipe
from tests.dist.test_gloo import processes
from tests.models import Small

pytestmark = pytest.mark.slow

WIDTH = 4


class Tied(nn.Module):
    """An embedding that is the head as well, four blocks, a batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Small(WIDTH) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1:
                x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Saved(NamedTuple):
    """What ranks put on disk: the state of the model, and by name what the optimizer keeps."""

    state: dict[str, Tensor]
    momenta: dict[str, Tensor]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Tied().double()


def _batch(seed: int) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [{"ids": torch.randint(0, 9, (2, 3 + i), generator=g)} for i in range(3)]


def _optimizer(named: dict[str, nn.Parameter], momenta: dict[str, Tensor]) -> torch.optim.SGD:
    made = torch.optim.SGD(named.values(), lr=0.1, momentum=0.9)
    for name, parameter in named.items():
        if name in momenta:
            made.state[parameter]["momentum_buffer"] = momenta[name].clone()
    return made


def _train(seed: int, saved: Saved | None, rank: int, ranks: int) -> Saved:
    """Go on from a checkpoint for one step, and write another one."""
    model = _model()
    if saved is not None:
        model.load_state_dict(saved.state)
    pipe = fxpipe.compile(model, _batch(seed)[0], schedule="1f1b", backend="gloo")
    named = dict(pipe.named_parameters())
    optimizer = _optimizer(named, saved.momenta if saved else {})
    pipe.step(_batch(seed))
    optimizer.step()
    momenta = {n: optimizer.state[p]["momentum_buffer"] for n, p in named.items()}
    return Saved(pipe.state_dict(), momenta)


def _joined(parts: list[Any]) -> Saved:
    """One checkpoint of what all ranks have written."""
    state: dict[str, Tensor] = {}
    momenta: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.state.items():
            assert torch.equal(state.setdefault(name, tensor), tensor), name
        momenta |= part.momenta
    return Saved(state, momenta)


def test_from_two_ranks_to_four_and_back(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    reference, saved = _model(), None
    optimizer = _optimizer(dict(reference.named_parameters()), {})
    for seed, ranks in enumerate((2, 4, 2)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        saved = _joined(processes(partial(_train, seed, saved), ranks, folder))
        optimizer.zero_grad()
        for mb in _batch(seed):
            (reference(**mb) / 3).backward()
        optimizer.step()
        eager = _model()
        assert saved.state.keys() == eager.state_dict().keys()
        eager.load_state_dict(saved.state)
        for name, tensor in reference.state_dict().items():
            torch.testing.assert_close(eager.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
