"""Instructions about memory, gradients and what layers share."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.ops import VOCABULARY, WIDTH, op, scale, square


def keep(c: Any, value: Tensor) -> None:
    """Leave a value for any later layer, of this region or another."""
    c.saved.append((value, (c.region, c.epoch)))


@op()
def save(own: Any, x: Tensor, c: Any) -> Tensor:
    keep(c, x)
    return x


@op(w=square)
def save_new(own: Any, x: Tensor, c: Any) -> Tensor:
    keep(c, own.w(x))
    return x


@op(w=square)
def save_strided(own: Any, x: Tensor, c: Any) -> Tensor:
    keep(c, own.w(x).transpose(0, 1).transpose(0, 1).flip(1)[..., ::1])
    keep(c, own.w(x).mT.contiguous().mT)
    return x


@op()
def save_bool(own: Any, x: Tensor, c: Any) -> Tensor:
    keep(c, x > x.mean())
    return x


@op()
def save_int(own: Any, x: Tensor, c: Any) -> Tensor:
    keep(c, x.argsort(-1))
    return x


@op(w=square)
def save_complex(own: Any, x: Tensor, c: Any) -> Tensor:
    made = own.w(x)
    keep(c, torch.complex(made, x))
    return x


@op(w=square)
def save_half(own: Any, x: Tensor, c: Any) -> Tensor:
    keep(c, own.w(x).to(torch.bfloat16))
    return x


@op(w=square)
def save_single(own: Any, x: Tensor, c: Any) -> Tensor:
    keep(c, own.w(x).float())
    return x


@op(w=square)
def save_scalar(own: Any, x: Tensor, c: Any) -> Tensor:
    c.saved.append((own.w(x).mean(), None))
    return x


@op(w=square)
def save_empty(own: Any, x: Tensor, c: Any) -> Tensor:
    c.saved.append((own.w(x)[:, :0], None))
    return x


@op()
def save_weight(own: Any, x: Tensor, c: Any) -> Tensor:
    c.saved.append((c.model.shared.weight, None))
    return x


@op()
def save_expanded(own: Any, x: Tensor, c: Any) -> Tensor:
    keep(c, x.mean(1, keepdim=True).expand_as(x))
    return x


@op()
def save_view(own: Any, x: Tensor, c: Any) -> Tensor:
    c.saved.append((x[:, :1], None))
    c.saved.append((x.flatten(1), None))
    return x


def absorbed(x: Tensor, value: Tensor, same: bool) -> Tensor:
    """x with a saved value of any dtype; only a sum of it if the shapes differ."""
    if value.is_complex():
        value = value.real * value.imag
    value = value.to(x.dtype)
    return x + 0.1 * value if same else x + 0.01 * value.sum()


@op()
def use(own: Any, x: Tensor, c: Any) -> Tensor:
    if not c.saved:
        return x
    value, of = c.saved[-1]
    return absorbed(x, value, of == (c.region, c.epoch))


@op()
def use_first(own: Any, x: Tensor, c: Any) -> Tensor:
    if not c.saved:
        return x
    value, of = c.saved[0]
    return absorbed(x, value, of == (c.region, c.epoch))


@op(w=square)
def use_all(own: Any, x: Tensor, c: Any) -> Tensor:
    for value, of in c.saved:
        x = absorbed(x, value, of == (c.region, c.epoch))
    return own.w(x)


@op()
def write(own: Any, x: Tensor, c: Any) -> Tensor:
    return (x * 1).add_(1).mul_(0.5)


@op(w=square)
def write_slice(own: Any, x: Tensor, c: Any) -> Tensor:
    y = own.w(x)
    y[:, :1] = x[:, -1:] * 2
    y[..., 0] += 1
    return x + y


@op(w=square)
def write_view(own: Any, x: Tensor, c: Any) -> Tensor:
    y = own.w(x) * 1
    first = y[0]
    y.view(-1, WIDTH)[:, 1].mul_(2)
    y.transpose(1, 2)[:, 2:3].sub_(0.5)
    return x + y + first


@op(w=square)
def write_masked(own: Any, x: Tensor, c: Any) -> Tensor:
    y = own.w(x) + 0
    y.masked_fill_(x < 0, 0.25)
    y[x > 1] = 0.5
    return x + y


@op(w=square)
def write_indexed(own: Any, x: Tensor, c: Any) -> Tensor:
    y = torch.zeros_like(x)
    at = torch.tensor([0, 2], device=x.device)
    y[:, :, at] = own.w(x)[:, :, 1:3]
    y.index_put_((torch.zeros_like(at), torch.zeros_like(at), at), x.new_ones(2), accumulate=True)
    return x + y


@op(w=square)
def write_activation(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + torch.relu_(own.w(x))


@op(w=square)
def write_out(own: Any, x: Tensor, c: Any) -> Tensor:
    y = x.new_empty(x.shape)
    y.copy_(own.w(x))
    y.clamp_(max=0.9)
    return x + y


@op()
def write_saved(own: Any, x: Tensor, c: Any) -> Tensor:
    """A later layer writes to what an earlier one has kept."""
    y = x * 1
    c.saved.append((y, None))
    z = y + 1
    y.mul_(0.5)
    return z


@op()
def write_kept(own: Any, x: Tensor, c: Any) -> Tensor:
    if c.saved and c.saved[-1][0].is_floating_point():
        c.saved[-1][0].add_(0.25)
    return x


@op(w=square)
def detached(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + own.w(x).detach() * x


@op(w=square)
def no_grad(own: Any, x: Tensor, c: Any) -> Tensor:
    with torch.no_grad():
        factor = own.w(x).abs().mean()
        shift = x.mean(1, keepdim=True)
    return x * factor + shift


@op(
    w=lambda: square().requires_grad_(False),
    a=lambda: nn.Linear(WIDTH, 1, bias=False),
    b=lambda: nn.Linear(1, WIDTH, bias=False),
)
def lora(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + own.w(x) + own.b(own.a(x))


@op(w=square)
def unused(own: Any, x: Tensor, c: Any) -> Tensor:
    own.w(x)
    return x


@op(w=square)
def times_zero(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + 0 * own.w(x).sum()


@op(w=square)
def own_loss(own: Any, x: Tensor, c: Any) -> Tensor:
    c.aux.append(own.w(x).square().mean())
    return x


@op(g=scale)
def scalar(own: Any, x: Tensor, c: Any) -> Tensor:
    return x * own.g.exp() + own.g


@op()
def tied(own: Any, x: Tensor, c: Any) -> Tensor:
    table = c.model.embed.weight
    return x + (x @ table.mT).softmax(-1) @ table


@op()
def shared(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + c.model.shared(x)


@op()
def relative(own: Any, x: Tensor, c: Any) -> Tensor:
    """A bias that is computed once and read by every layer that wants it."""
    if c.bias is None:
        c.bias = c.model.relative(torch.arange(WIDTH, device=x.device)).tanh()
    return x + x @ c.bias


@op(table=lambda: torch.linspace(-1, 1, 64 * WIDTH, dtype=torch.float64).view(64, WIDTH))
def buffered(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + own.table[: x.shape[1]]


@op()
def constant(own: Any, x: Tensor, c: Any) -> Tensor:
    return x * torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=x.dtype, device=x.device)


@op()
def rotated(own: Any, x: Tensor, c: Any) -> Tensor:
    at = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
    turn = torch.polar(torch.ones_like(at), at)[None, :, None]
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


@op()
def fourier(own: Any, x: Tensor, c: Any) -> Tensor:
    return x + torch.fft.irfft(torch.fft.rfft(x, dim=-1) * 2, n=WIDTH, dim=-1)


@op(w=lambda: nn.Embedding(VOCABULARY, WIDTH))
def looked_up(own: Any, x: Tensor, c: Any) -> Tensor:
    at = (x.detach().sum(-1) > 0).long()
    return x + own.w(at)
