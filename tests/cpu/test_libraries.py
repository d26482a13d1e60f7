"""A tower whose library drops masks that hide nothing, and that is causal without a mask; a rule
that it computes otherwise while it is exported."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.eager import step_alike, trained_alike

pytestmark = pytest.mark.slow


class Attention(nn.Module):
    is_causal = True

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        heads = [part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        seen = None if mask is None else mask[:, :, :, : x.shape[1]]
        return x + self.out(attend(self, *heads, seen)[0].flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        from transformers import PretrainedConfig, masking_utils, modeling_utils

        super().__init__()
        self.library = masking_utils.__name__, modeling_utils.__name__
        config = PretrainedConfig(attn_implementation="sdpa")
        self.vision = nn.ModuleList(Attention(config) for _ in range(2))
        self.embed = nn.Embedding(9, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, pixels: Tensor, shown: Tensor, ids: Tensor) -> Tensor:
        from transformers.masking_utils import create_bidirectional_mask

        mask = create_bidirectional_mask(self.vision[0].config, pixels, shown)
        for block in self.vision:
            pixels = block(pixels, mask)
        x = self.embed(ids) + (pixels * shown[..., None]).mean(1, keepdim=True)
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def microbatch(lengths: list[int], width: int) -> tuple[Tensor, Tensor, Tensor]:
    shown = torch.arange(width) < torch.tensor(lengths)[:, None]
    pixels = torch.randn(len(lengths), width, 8, dtype=torch.float64)
    return pixels, shown, torch.randint(0, 9, (len(lengths), 4))


def test_each_microbatch_has_its_mask() -> None:
    torch.manual_seed(0)
    model = Model().double()
    batch = [microbatch([5, 5], 5), microbatch([4, 6, 1], 6), microbatch([3, 3], 3)]
    reference = copy.deepcopy(model)
    pipe = trained_alike(model, batch, 1e-12, ranks=2)
    assert pipe.captures == 1
    step_alike(pipe, batch[1:], reference, 1e-12)


class Delta(nn.Module):
    """A gated delta rule, as transformers computes it without special kernels."""

    def __init__(self) -> None:
        from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

        super().__init__()
        self.rule = torch_chunk_gated_delta_rule
        self.embed = nn.Embedding(9, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 26) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            *heads, gates = layer(x).split([8, 8, 8, 2], -1)
            query, key, value = (head.unflatten(-1, (1, 8)) for head in heads)
            decay, beta = gates.sigmoid().split(1, -1)
            x = x + self.rule(query, key, value, g=-decay, beta=beta, chunk_size=4)[0].flatten(2)
        return x.square().mean()


def test_triangular_systems_are_solved_as_in_eager() -> None:
    torch.manual_seed(0)
    batch = [(torch.randint(0, 9, (rows, 8)),) for rows in (2, 3)]
    pipe = trained_alike(Delta(), batch, 1e-5, ranks=2)
    found = [node.target for node in pipe.captured.graph.graph.nodes]
    assert found.count(torch.ops.aten.linalg_solve_triangular.default) == 4
