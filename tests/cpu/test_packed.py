"""How inputs lie in memory: followed as eager follows it, or refused, never the first one's."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CaptureError

WIDTH = 4


class Tail(nn.Module):
    """Two layers behind what a test does with the input."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(x)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h.square().mean()


def strided(x: Tensor) -> Tensor:
    return torch.as_strided(x, (x.shape[0], WIDTH), (WIDTH, 1))


def by_stride(x: Tensor) -> Tensor:
    return x * float(x.stride(0))


def by_contiguity(x: Tensor) -> Tensor:
    return x * 2 if x.t().is_contiguous() else x


def write_to_reshaped(x: Tensor) -> Tensor:
    h = torch.zeros_like(x) + x
    h.reshape(-1).add_(1.0)
    return h


def write_to_contiguous(x: Tensor) -> Tensor:
    h = x.clone()
    h.contiguous().mul_(2.0)
    return h


def by_offset(x: Tensor) -> Tensor:
    return x * float(x.storage_offset() + 1)


def plain(x: Tensor) -> Tensor:
    return x.reshape(-1).reshape(x.shape).contiguous() * 2


def drops(x: Tensor) -> Tensor:
    return torch.dropout(x, 0.5, train=True)


def laid_out() -> dict[str, Tensor]:
    """The same numbers: packed, transposed, with gaps, and packed within something larger."""
    torch.manual_seed(3)
    x = torch.randn(WIDTH, WIDTH)
    wide, long = torch.zeros(WIDTH, 2 * WIDTH), torch.zeros(2 * WIDTH, WIDTH)
    wide[:, WIDTH:], long[WIDTH:] = x, x
    return {
        "packed": x,
        "transposed": x.t().contiguous().t(),
        "gaps": wide[:, WIDTH:],
        "within": long[WIDTH:],
    }


def steps_as_eager(model: nn.Module, layouts: tuple[str, ...]) -> None:
    batch = [{"x": laid_out()[name]} for name in layouts]
    eager, pipe = copy.deepcopy(model), fxpipe.compile(model, ranks=1)
    torch.manual_seed(0)
    for microbatch in batch:
        (eager(**microbatch) / len(batch)).backward()
    torch.manual_seed(0)
    pipe.step(batch)
    for (name, one), two in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, msg=name)


@pytest.mark.parametrize(
    "read", [strided, by_stride, by_contiguity, write_to_reshaped, write_to_contiguous]
)
def test_a_layout_that_forward_depends_on_must_be_packed(read: Callable[[Tensor], Tensor]) -> None:
    model, packed = Tail(read), {"x": laid_out()["packed"]}
    steps_as_eager(model, ("packed", "within"))
    pipe = fxpipe.compile(model, packed, ranks=1)
    for layout in ("transposed", "gaps"):
        with pytest.raises(CaptureError, match=r"test_packed\.py:\d+ .* x, .* Pass x\.contiguous"):
            pipe.step([packed, {"x": laid_out()[layout]}])


def test_a_storage_that_forward_reads_must_hold_nothing_else() -> None:
    steps_as_eager(Tail(by_offset), ("packed", "packed"))
    with pytest.raises(CaptureError, match=r"reads the storage .* Pass x\.clone"):
        fxpipe.compile(Tail(by_offset), ranks=1).step([{"x": laid_out()["within"]}])


def test_other_layouts_share_a_graph() -> None:
    model = Tail(plain)
    steps_as_eager(model, ("packed", "transposed", "gaps", "within"))
    pipe = fxpipe.compile(model, ranks=1)
    pipe.step([{"x": x} for x in laid_out().values()])
    assert pipe.captures == 1


def test_tensors_of_inference_mode_are_as_others() -> None:
    model, made = Tail(plain), laid_out()
    pipe = fxpipe.compile(model, ranks=1)
    with torch.inference_mode():
        for x in (made["packed"], made["transposed"] * 2):
            torch.testing.assert_close(pipe.evaluate([{"x": x}]).loss, model(x))


def test_random_numbers_come_in_each_layouts_order() -> None:
    steps_as_eager(Tail(drops), ("packed", "transposed", "gaps", "transposed"))


class Reads(nn.Module):
    """Reads a float, and the layout of its input."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 2.0 if x.is_contiguous() else float(x.stride(1))
        return x * scale if x.sum().item() < 1e9 else x


class Opaque(nn.Module):
    """What reads values runs as the model's own code, blocks behind it as a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = Reads()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.reads(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return h.square().mean()


def test_an_opaque_stage_sees_tensors_as_they_lie() -> None:
    steps_as_eager(Opaque(), ("packed", "transposed", "gaps"))


class Noisy(nn.Module):
    """Noise of the layout of what a batch norm makes of a transposed tensor."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList({3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[dims](4) for _ in "ab")
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = x + torch.randn_like(x)
            x = norm(x.transpose(1, -1)).transpose(1, -1)
        loss: Tensor = self.head(F.dropout(x)).square().mean()
        return loss


@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 5, 3, 4)])
def test_noise_behind_a_batch_norm_lies_as_in_eager(shape: tuple[int, ...]) -> None:
    """Its kernel packs what it makes, whatever a trace says."""
    torch.manual_seed(0)
    model = Noisy(len(shape)).double()
    inputs = [torch.randn(shape).double() for _ in range(2)]
    pipe = fxpipe.compile(model, {"x": inputs[0]}, ranks=1, backend="local")
    reference = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = torch.stack([reference(x) for x in inputs])
    state = torch.get_rng_state()
    torch.manual_seed(1)
    result = pipe.step([{"x": x} for x in inputs])
    torch.testing.assert_close(result.losses, expected.detach(), rtol=1e-12, atol=0)
    assert torch.equal(state, torch.get_rng_state())
