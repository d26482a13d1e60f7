"""Models that read values of their inputs in Python: graphs for the values that they were read."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.capture import capture
from fxpipe.errors import CaptureError
from fxpipe.inputs import contents
from tests.eager import trained_alike
from tests.grids import GridModel, grids


def against_eager(model: nn.Module, batch: Sequence[Any], **how: Any) -> fxpipe.Pipe:
    """A step has the losses and the gradients of eager."""
    return trained_alike(model, batch, 1e-5, ranks=2, **how)


@pytest.mark.slow
def test_values_that_repeat() -> None:
    """One graph serves other floats and other texts; it holds for the grid alone."""
    torch.manual_seed(0)
    batch = grids([[(2, 4), (4, 2)]] * 3, text=[5, 9, 7])
    pipe = against_eager(GridModel(), batch, schedule="nested/1f1b")
    assert len(pipe.variants) == 1
    assert list(pipe.captured.values) == ["grid"]
    assert "read at" in pipe.explain()
    assert "grids.py" in pipe.explain()


def test_other_values_of_the_same_shape() -> None:
    """Images turned by 90 degrees have the same shapes, and are another variant."""
    torch.manual_seed(0)
    batch = grids([[(2, 4), (4, 2)], [(4, 2), (2, 4)], [(2, 4), (4, 2)]])
    pipe = against_eager(GridModel(deep=True), batch, schedule="stage/1f1b")
    assert len(pipe.variants) == 2


class Reads(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.body = nn.Linear(4, 4), nn.Linear(4, 4), body

    def forward(self, x: Tensor, n: Tensor, m: Tensor) -> Tensor:
        return self.second(self.body(self.first(x), n) * m.float().mean()).square().mean()


def changed_after_use(x: Tensor, n: Tensor) -> Tensor:
    index = torch.tensor([k for k in n.tolist() for _ in range(k)])
    one = x.detach()[index]
    index += 1
    return one * 2 + x[index]


def filled(x: Tensor, n: Tensor) -> Tensor:
    count = int(n[0])
    blank = torch.zeros(count, 4)
    view = blank[1:]
    view[:] = x[: count - 1]
    mask = torch.zeros(4, dtype=torch.bool)
    mask[n] = True
    return blank.sum(0) + x[:, mask].sum() + torch.repeat_interleave(x[:2], n, 0).sum(0)


def decided(x: Tensor, n: Tensor) -> Tensor:
    ones = torch.ones(n.max().item(), 4)
    if ones.sum() > 8:
        x = x * 3
    return x * ones.sum()


@pytest.mark.parametrize("body", [changed_after_use, filled, decided])
def test_real_and_traced_tensors(body: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    values = torch.tensor([3, 1])
    batch = [{"x": torch.randn(5, 4), "n": values, "m": torch.randint(1, 5, (3,))} for _ in "ab"]
    pipe = against_eager(Reads(body), batch, schedule="1f1b")
    assert list(pipe.captured.values) == ["n"]


def test_reading_floats(capfd: pytest.CaptureFixture[str]) -> None:
    """Values that training changes cannot repeat: the refusal names the line."""

    def chosen(x: Tensor, n: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x

    mb = {"x": torch.randn(5, 4), "n": torch.tensor([1]), "m": torch.tensor([1])}
    with pytest.raises(CaptureError, match=r"reading a value at .*test_concrete.py:\d+"):
        capture(Reads(chosen), mb)
    assert capfd.readouterr().err == ""


def test_contents_in_any_layout() -> None:
    """A constant of one element may be strided in any way."""
    one = torch.ones(1, dtype=torch.long)
    assert contents(one.as_strided((1, 1), (0, 0))) == contents(one)
    assert contents(one.expand(3)) == contents(torch.ones(3, dtype=torch.long))


def test_writing_to_what_is_read() -> None:
    def scratch(x: Tensor, n: Tensor) -> Tensor:
        n.add_(1)
        return x[: n.tolist()[0]]

    mb = {"x": torch.randn(5, 4), "n": torch.tensor([1]), "m": torch.tensor([1])}
    with pytest.raises(CaptureError, match="argument n is changed by forward"):
        capture(Reads(scratch), mb)
    assert int(mb["n"]) == 1
