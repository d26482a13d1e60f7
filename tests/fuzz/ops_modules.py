"""Instructions that are modules of torch, custom operators, checkpoints and parametrizations."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.fuzz.ops import WIDTH, op, square, wide


@torch.library.custom_op("fxpipe_fuzz::cube", mutates_args=())
def _cube(x: Tensor, factor: float) -> Tensor:
    return x * x * x * factor


@_cube.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return grad * 3 * x * x * ctx.factor, None


_cube.register_autograd(_backward, setup_context=_setup)


@op()
def custom(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + _cube(x.tanh(), 0.5)


@op(m=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True))
def heads(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + own.m(x, x, x, need_weights=False)[0]


@op(m=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True))
def heads_weights(own: Any, x: Tensor, c: Any) -> Tensor:
    made, weights = own.m(x, x, x)
    return x + made * weights.mean()


@op(m=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True))
def layer(own: Any, x: Tensor, c: Any) -> Tensor:
    return own.m(x)


@op(m=lambda: nn.GRU(WIDTH, WIDTH, batch_first=True))
def gru(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + own.m(x)[0]


@op(m=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True))
def lstm(own: Any, x: Tensor, c: Any) -> Tensor:
    made, (h, _) = own.m(x)
    return x + made + h.transpose(0, 1)


@op(m=lambda: nn.GroupNorm(2, WIDTH))
def groups(own: Any, x: Tensor, c: Any) -> Tensor:
    return own.m(x.transpose(1, 2)).transpose(1, 2)


@op(m=lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False))
def batch_norm(own: Any, x: Tensor, c: Any) -> Tensor:
    return own.m(x.transpose(1, 2)).transpose(1, 2)


@op(m=lambda: nn.BatchNorm1d(WIDTH).eval())
def batch_norm_eval(own: Any, x: Tensor, c: Any) -> Tensor:
    return own.m(x.transpose(1, 2)).transpose(1, 2)


@op(m=lambda: nn.Dropout(0.5).eval())
def dropout_eval(own: Any, x: Tensor, c: Any) -> Tensor:
    return own.m(x) * 2


@op(w=square)
def checkpointed(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + checkpoint(lambda y: own.w(y).tanh(), x, use_reentrant=False)


@op(w=lambda: parametrizations.weight_norm(square()))
def weight_norm(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + own.w(x)


class _LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, 1)), nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def _adapted() -> nn.Module:
    made = square().requires_grad_(False)
    parametrize.register_parametrization(made, "weight", _LowRank())
    return made


@op(w=_adapted)
def adapted(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + own.w(x)


@op(b=lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH))
def bilinear(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + own.b(x, x.cos())


@op(m=lambda: nn.PReLU(), s=lambda: nn.Softplus())
def activations(own: Any, x: Tensor, c: Any) -> Tensor:
    return own.m(x) + own.s(x) + nn.functional.glu(torch.cat([x, x], -1))


@op(d=lambda: nn.ParameterDict({"a b": torch.ones(WIDTH), "class": torch.zeros(WIDTH)}))
def named(own: Any, x: Tensor, c: Any) -> Tensor:
    return x * own.d["a b"] + own.d["class"]


@op(m=lambda: nn.Dropout(0.5))
def dropout(own: Any, x: Tensor, c: Any) -> Tensor:
    return own.m(x) + x


@op(w=square)
def noisy(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + own.w(torch.randn_like(x)) * torch.rand(x.shape[1], 1, dtype=x.dtype)


@op(qkv=wide)
def sdpa_dropout(own: Any, x: Tensor, c: Any) -> Tensor:
    q, k, v = own.qkv(x).unsqueeze(1).chunk(3, -1)
    return x + nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.25).squeeze(1)


@op(m=lambda: nn.BatchNorm1d(WIDTH))
def batch_norm_running(own: Any, x: Tensor, c: Any) -> Tensor:
    return own.m(x.transpose(1, 2)).transpose(1, 2)


@op(w=square, mean=lambda: torch.zeros(WIDTH, dtype=torch.float64))
def moving_mean(own: Any, x: Tensor, c: Any) -> Tensor:
    """A buffer that follows what passes by, and that nothing reads."""
    made = own.w(x)
    with torch.no_grad():
        own.mean.mul_(0.9).add_(made.detach().mean((0, 1)), alpha=0.1)
    return x + made
