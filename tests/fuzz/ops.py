"""Instructions of random models: each changes a value `x [samples, length, WIDTH]`.

    run(own, x, c) -> x        own: the weights of this instruction; c: what layers share

An instruction is a function here or in ops_state.py, ops_modules.py; its name is its text.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

WIDTH = 4
VOCABULARY = 9
Run = Callable[[Any, Tensor, Any], Tensor]


class Op(NamedTuple):
    """An instruction: what makes its weights, and what it does."""

    parts: dict[str, Callable[[], Any]]
    run: Run


OPS: dict[str, Op] = {}


def op(**parts: Callable[[], Any]) -> Callable[[Run], Run]:
    """Register a function as an instruction with these weights."""

    def known(run: Run) -> Run:
        OPS[run.__name__] = Op(parts, run)
        return run

    return known


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def wide() -> nn.Linear:
    return nn.Linear(WIDTH, 3 * WIDTH)


def scale() -> nn.Parameter:
    return nn.Parameter(torch.tensor(0.3))


@op(w=square)
def linear(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + own.w(x).tanh()


@op(up=lambda: nn.Linear(WIDTH, 8), down=lambda: nn.Linear(8, WIDTH), n=lambda: nn.LayerNorm(WIDTH))
def mlp(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + own.down(F.silu(own.up(own.n(x))))


@op(g=lambda: nn.Parameter(torch.ones(WIDTH)))
def rms(own: Any, x: Tensor, c: Any) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * own.g


@op(qkv=wide)
def attend(own: Any, x: Tensor, c: Any) -> Tensor:
    q, k, v = own.qkv(x).chunk(3, -1)
    score = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    at = torch.arange(x.shape[1], device=x.device)
    score = score.masked_fill(at[:, None] < at[None], float("-inf"))
    return x + score.softmax(-1) @ v


@op(qkv=wide)
def sdpa(own: Any, x: Tensor, c: Any) -> Tensor:
    q, k, v = (p.unflatten(-1, (2, -1)).transpose(1, 2) for p in own.qkv(x).chunk(3, -1))
    made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + made.transpose(1, 2).flatten(2)


@op(qkv=wide)
def sdpa_masked(own: Any, x: Tensor, c: Any) -> Tensor:
    q, k, v = own.qkv(x).unsqueeze(1).chunk(3, -1)
    length = x.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1)


@op(w=square)
def cross(own: Any, x: Tensor, c: Any) -> Tensor:
    if c.memory is None or c.region != "llm":
        return x
    return x + torch.softmax(own.w(x) @ c.memory.mT, -1).nan_to_num() @ c.memory


@op(w=lambda: nn.Linear(WIDTH, 2 * WIDTH))
def gated(own: Any, x: Tensor, c: Any) -> Tensor:
    a, b = own.w(x).split(WIDTH, -1)
    return x + a.sigmoid() * b


@op(w=square)
def parts(own: Any, x: Tensor, c: Any) -> Tensor:
    a, b = own.w(x).tensor_split([1], -1)
    return x + torch.cat([b, a], -1)


@op(w=lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1))
def conv(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + own.w(x.transpose(1, 2)).transpose(1, 2)


@op(w=lambda: nn.Conv2d(1, 2, 3, padding=1), v=lambda: nn.Conv2d(2, 1, 1))
def conv_image(own: Any, x: Tensor, c: Any) -> Tensor:
    image = x.unsqueeze(1).contiguous(memory_format=torch.channels_last)
    return x + own.v(F.gelu(own.w(image))).squeeze(1)


@op(g=scale)
def roll(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + own.g * x.roll(1, 1)


@op()
def flip(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + 0.1 * x.flip(-1)


@op(w=square)
def cumsum(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + 0.1 * own.w(x).cumsum(1)


@op(w=square)
def sort(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + own.w(x).sort(-1).values


@op(w=square)
def top(own: Any, x: Tensor, c: Any) -> Tensor:
    values, at = own.w(x).topk(2, -1)
    return x + torch.zeros_like(x).scatter(-1, at, values)


@op()
def gather(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + x.gather(-1, x.argsort(-1)).cos()


@op(w=square)
def index_add(own: Any, x: Tensor, c: Any) -> Tensor:
    at = torch.arange(WIDTH, device=x.device) // 2
    return x + torch.zeros_like(x).index_add(2, at, own.w(x))


@op(w=square)
def scatter_add(own: Any, x: Tensor, c: Any) -> Tensor:
    made = own.w(x)
    at = (made > 0).long()
    return x + torch.zeros_like(x).scatter_add(-1, at, made)


@op(w=lambda: nn.Parameter(torch.randn(VOCABULARY, WIDTH)))
def one_hot(own: Any, x: Tensor, c: Any) -> Tensor:
    hot = F.one_hot(c.ids, VOCABULARY).to(x.dtype)
    return x + (hot @ own.w).mean(1, keepdim=True)


@op(w=lambda: nn.Embedding(VOCABULARY, WIDTH, padding_idx=0))
def padded(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + own.w(c.ids).mean(1, keepdim=True)


@op(w=lambda: nn.EmbeddingBag(VOCABULARY, WIDTH, mode="sum"))
def bag(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + own.w(c.ids).unsqueeze(1)


@op(w=square)
def where(own: Any, x: Tensor, c: Any) -> Tensor:
    return torch.where(x > 0, x, own.w(x))


@op(g=scale)
def clamp(own: Any, x: Tensor, c: Any) -> Tensor:
    return x.clamp(-1.0, 1.0) + own.g * x.clamp(min=own.g)


@op(w=lambda: nn.Parameter(torch.randn(WIDTH, WIDTH, 2)))
def einsum(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + torch.einsum("bld,dek,k->ble", x, own.w, own.w[0, 0]).tanh()


@op()
def unfold(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1)


@op()
def resized(own: Any, x: Tensor, c: Any) -> Tensor:
    up = F.interpolate(x.transpose(1, 2), scale_factor=2.0, mode="linear", align_corners=False)
    return x + F.avg_pool1d(up, 2).transpose(1, 2)


@op(w=square)
def repeated(own: Any, x: Tensor, c: Any) -> Tensor:
    made = own.w(x).repeat_interleave(2, 1).view(x.shape[0], -1, 2, WIDTH)
    return x + made.sum(2) * 0.1


@op(w=square)
def unbound(own: Any, x: Tensor, c: Any) -> Tensor:
    a, b, d, e = own.w(x).unbind(-1)
    return x + torch.stack([b, a * d, e, d], -1)


@op()
def spread(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + x.std(-1, keepdim=True) + x.logsumexp(1, keepdim=True)


@op()
def largest(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + x.max(1, keepdim=True).values * 0.1 + x.amin(-1, keepdim=True)


@op()
def normalized(own: Any, x: Tensor, c: Any) -> Tensor:
    return F.normalize(x, dim=-1) + torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)


@op(w=square)
def products(own: Any, x: Tensor, c: Any) -> Tensor:
    outer = own.w(x).mT @ x
    return x + 0.1 * x @ torch.tril(outer)


@op(w=square)
def pooled(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + own.w(x[:, :1]).expand_as(x) + own.w(x[:, -1]).unsqueeze(1)


@op()
def lengths(own: Any, x: Tensor, c: Any) -> Tensor:
    at = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
    return x / x.shape[1] ** 0.5 + at[None, :, None] * (0.1 / (x.shape[0] + 1))


@op(w=square)
def longer(own: Any, x: Tensor, c: Any) -> Tensor:
    c.epoch += 1
    return torch.cat([own.w(x[:, :1]), x], 1)


@op(w=square)
def halved(own: Any, x: Tensor, c: Any) -> Tensor:
    c.epoch += 1
    return own.w(x[:, ::2])


@op(w=lambda: nn.Linear(WIDTH, 2), a=square, b=square)
def experts(own: Any, x: Tensor, c: Any) -> Tensor:
    gates = own.w(x).softmax(-1)
    weight, choice = gates.topk(1, -1)
    c.aux.append(0.01 * gates.mean((0, 1)).square().sum())
    made = torch.where(choice == 0, own.a(x), own.b(x))
    return x + weight * made


@op(w=lambda: nn.Linear(WIDTH, 2), a=square, b=square)
def routed(own: Any, x: Tensor, c: Any) -> Tensor:
    flat = x.flatten(0, 1)
    gates = own.w(flat).softmax(-1)
    choice = gates.argmax(-1)
    out = torch.zeros_like(flat)
    for i, expert in enumerate((own.a, own.b)):
        at = torch.nonzero(choice == i).squeeze(1)
        out = out.index_add(0, at, expert(flat[at]) * gates[at, i : i + 1])
    return x + out.view_as(x)


@op()
def chosen(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + 0.1 * x[x > 0].sum()


@op()
def number(own: Any, x: Tensor, c: Any) -> Tensor:
    return x * (1 + c.number)


@op(w=square)
def flagged(own: Any, x: Tensor, c: Any) -> Tensor:
    return own.w(x) if c.flag else x


@op(w=square)
def by_size(own: Any, x: Tensor, c: Any) -> Tensor:
    return x * 2 if x.shape[1] > 3 else own.w(x)
