"""What a step reads and the model does not hold: followed, or refused, but never forgotten."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import BatchError, CaptureError
from tests.eager import trained_alike

X = torch.ones(3, 4)


class Model(nn.Module):
    def __init__(self, scale: Tensor | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x if self.scale is None else x * self.scale


class Weighted(nn.Module):
    def __init__(self, trained: bool = False) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean() * self.factor


class Plain:
    factor = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return x.square().mean() * self.factor


def squares(x: Tensor) -> Tensor:
    return x.square().mean()


def enclosed() -> tuple[Callable[[Tensor], Tensor], Callable[[], object]]:
    kept = {"factor": 1.0}
    return lambda x: x.square().mean() * kept["factor"], lambda: kept.update(factor=3.0)


def changed() -> list[tuple[Callable[[Tensor], Tensor], Callable[[], object]]]:
    module, plain = Weighted(), Plain()
    return [
        (module, lambda: module.factor.fill_(3)),
        (plain, lambda: setattr(plain, "factor", 3.0)),
        enclosed(),
    ]


@pytest.mark.parametrize("case", range(3))
def test_a_loss_that_changes_is_followed(case: int) -> None:
    loss_fn, change = changed()[case]
    pipe = fxpipe.compile(Model(), (X,), loss_fn=loss_fn, ranks=1, backend="local")
    before = pipe.step([(X,)]).loss
    assert float(pipe.step([(X,)]).loss / before) == 1
    assert pipe.captures == 1
    with torch.no_grad():
        change()
    assert float(pipe.step([(X,)]).loss / before) == pytest.approx(3)


def test_tensors_that_would_get_no_gradient_are_refused() -> None:
    for model, loss_fn in [
        (Model(), Weighted(trained=True)),
        (Model(torch.ones(4, requires_grad=True)), squares),
    ]:
        with pytest.raises(CaptureError, match="requires a gradient and is no parameter"):
            fxpipe.compile(model, (X,), loss_fn=loss_fn, ranks=1, backend="local")
    pipe = fxpipe.compile(Model(), (X,), loss_fn=squares, ranks=1, backend="local")
    with pytest.raises(BatchError, match="argument 0 requires a gradient"):
        pipe.step([(X.clone().requires_grad_(),)])


OWNED_BY_NOBODY = nn.Parameter(torch.ones(4))


class Aliased(Model):
    """Reads weights of its layers that it also keeps in a list, and beside its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.layers[0].weight]
        object.__setattr__(self, "beside", self.layers[1].bias)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return (x @ self.kept[0] + self.beside).square().mean()


class Foreign(Model):
    """Reads a parameter that no module has."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * OWNED_BY_NOBODY


class Beside(Foreign):
    """The same, where no gradient would come."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = OWNED_BY_NOBODY * 2
        return (Model.forward(self, x) * scale + OWNED_BY_NOBODY.detach()).square().mean()


class ForeignBefore(nn.Module):
    """Reads it in code that also reads values, which runs as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = Reading(), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().mean()


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * OWNED_BY_NOBODY if x.sum().item() < 1e9 else x


def test_parameters_read_from_elsewhere_get_their_gradients() -> None:
    for model in (Aliased(), Beside()):
        trained_alike(model.double(), [(X.double(),), (2 * X.double(),)], 1e-10, ranks=1)


def test_parameters_that_no_module_has_are_refused() -> None:
    for model, loss_fn in [
        (Foreign(), squares),
        (Model(), lambda x: (x * OWNED_BY_NOBODY).mean()),
        (ForeignBefore(), None),
    ]:
        with pytest.raises(CaptureError, match="requires a gradient and is no parameter"):
            fxpipe.compile(model, (X,), loss_fn=loss_fn, ranks=1, backend="local")


class Cropped(nn.Module):
    """An encoder that cuts as much as an argument says: how much crosses, one integer decides."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.embed = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, ids: Tensor, pixels: Tensor, sizes: Tensor) -> Tensor:
        for layer in self.vision:
            pixels = layer(pixels).tanh()
        x = torch.cat([*(pixels[:, :size] * size for size in sizes.tolist()), self.embed(ids)], 1)
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


def test_a_size_that_crosses_may_be_read() -> None:
    ids, pixels = torch.arange(8).view(2, 4), torch.randn(2, 5, 4).double()
    batch = [{"ids": ids, "pixels": pixels, "sizes": torch.tensor([size])} for size in (3, 2)]
    trained_alike(Cropped().double(), batch, 1e-12, ranks=2, schedule="nested/1f1b")
