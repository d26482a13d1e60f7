"""Parameters of low precision whose gradients add up in another dtype, as in autograd."""

import copy

import pytest
import torch
from torch import nn

import fxpipe
from tests.eager import loss_of


class Low(nn.Module):
    """bfloat16 blocks; the first and the last share a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = x + block(x).tanh()
        return (x * self.scale).float().square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulates_in_the_dtype_of_the_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Low().bfloat16()
    batch = [{"x": torch.randn(2, 8).bfloat16()} for _ in range(16)]
    reference = copy.deepcopy(model)
    for parameter in (*model.parameters(), *reference.parameters()):
        parameter.grad_dtype = dtype
    for mb in batch:
        (loss_of(reference, mb) / len(batch)).backward()
    fxpipe.compile(model, batch[0], schedule="nested/1f1b", ranks=2, backend="local").step(batch)
    for (name, one), two in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None
        assert one.grad.dtype is dtype
        if name == "scale":  # eager adds its two uses in bfloat16 first
            torch.testing.assert_close(one.grad, two.grad, rtol=2e-2, atol=1e-3)
        else:
            assert torch.equal(one.grad, two.grad)
