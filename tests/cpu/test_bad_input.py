"""Bad input gets one error that says what was found and what to do, and leaves no gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import errors
from tests import models


class Small(nn.Module):
    """Three blocks over float inputs, with something odd done to the hidden state."""

    def __init__(self, odd: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.odd = Odd(odd)

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return ((self.odd(x) - y) ** 2).mean() * scale


class Odd(nn.Module):
    """A module of its own, so that its name must appear in the error."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def batch(*shapes: tuple[int, int]) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    return [{"x": torch.randn(s), "y": torch.randn(s)} for s in shapes or [(4, 6)] * 3]


def no_gradient(model: nn.Module) -> bool:
    return all(p.grad is None for p in model.parameters())


def branching(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def casting(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x.T @ x


@pytest.mark.parametrize(
    ("odd", "error", "words"),
    [
        (casting, errors.CaptureError, r"module odd.*torch.autocast\('cpu'"),
        (branching, errors.CaptureError, "module odd .*test_bad_input.py.*torch.where"),
        (lambda x: x + x.new_tensor([float(x.sum())]), errors.CaptureError, "module odd"),
    ],
    ids=["autocast", "branch", "item"],
)
def test_untraceable(odd: Any, error: type[Exception], words: str) -> None:
    model = Small(odd)
    with pytest.raises(error, match=words):
        fxpipe.compile(model, batch()[0], ranks=2)
    assert no_gradient(model)


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_backward_hooks_of_modules(register: str) -> None:
    model = Small()
    getattr(model.layers[0], register)(lambda *args: None)
    with pytest.raises(errors.CaptureError, match=r"layers.0 has a hook on its gradient"):
        fxpipe.compile(model, batch()[0], ranks=2)


@pytest.mark.parametrize(
    ("wrap", "loss_fn", "words"),
    [
        (lambda x: {"loss": x.mean()}, None, r'returned dict without.*outputs: outputs\["loss"\]'),
        (lambda x: (x.mean(), x), None, r"returned tuple without.*lambda outputs: outputs\[0\]"),
        (lambda x: (x, x), None, r"returned tuple without.*lambda outputs: \.\.\."),
        (lambda x: x, None, r"the loss has shape \(4, 6\), not \(\)"),
        (lambda x: {"loss": x}, lambda out: out["loss"].mean(1), r"shape \(4,\)"),
        (
            lambda x: x,
            lambda out: 3.0,
            r"loss_fn returned a float for .*a tensor of shape \(4, 6\)",
        ),
    ],
)
def test_no_scalar_loss(wrap: Any, loss_fn: Any, words: str) -> None:
    class Outputs(Small):
        def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Any:
            return wrap(super().forward(x, y) + x)

    with pytest.raises(errors.CaptureError, match=words):
        fxpipe.compile(Outputs(), batch()[0], loss_fn=loss_fn)


def test_outputs_by_name_of_a_model_without_names() -> None:
    pipe = fxpipe.compile(Small(), batch()[0])
    with pytest.raises(
        errors.BatchError, match=r"'logits', but .*tensor of shape \(\) and no names"
    ):
        pipe.evaluate(batch(), outputs=["logits"])


@pytest.mark.parametrize(
    ("microbatch", "options", "error", "words"),
    [
        (
            {"x": torch.ones(4, 6), "z": 1},
            {},
            errors.BatchError,
            r"Small.forward\(x: .*: missing.*y",
        ),
        ({"x": torch.ones(4, 6)}, {}, errors.BatchError, "missing a required argument: 'y'"),
        ({1: torch.ones(4, 6)}, {}, errors.BatchError, r"keys \[1\]; use argument names"),
        (
            {"x": torch.ones(4, 6), "y": torch.ones(4, 6), "scale": torch.Generator()},
            {},
            errors.BatchError,
            "scale is a Generator.*draw the noise outside",
        ),
        (
            {"x": torch.ones(4, 6).numpy(), "y": torch.ones(4, 6)},
            {},
            errors.BatchError,
            r"x is a ndarray.*pass torch.as_tensor\(x\)",
        ),
        (
            {"x": torch.ones(4, 6), "y": torch.ones(4, 6)},
            {"loss_fn": lambda out: out["loss"][0]["text"]},
            errors.CaptureError,
            "loss_fn raised IndexError.*pass what the loss needs",
        ),
        (
            {"x": torch.ones(4, 5), "y": torch.ones(4, 5)},
            {},
            errors.CaptureError,
            "See first that the model alone runs on this microbatch",
        ),
    ],
)
def test_a_first_call_that_is_wrong(
    microbatch: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        fxpipe.compile(Small(), microbatch, ranks=2, **options)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"x": torch.randn(4, 6)}, r"microbatch 1: .*missing a required argument: 'y'"),
        (
            {"x": torch.randn(4, 6), "y": torch.randn(4, 6), "z": 1},
            r"microbatch 1: .*unexpected keyword argument 'z'",
        ),
        ({"x": torch.randn(4, 6).double(), "y": torch.randn(4, 6)}, "x has dtype torch.float64"),
        ([1, 2], "microbatch is a dict"),
    ],
)
def test_microbatch_that_does_not_fit(second: Any, words: str) -> None:
    model = Small()
    pipe = fxpipe.compile(model, batch()[0], ranks=2)
    with pytest.raises(errors.BatchError, match=words):
        pipe.step([batch()[0], second])
    assert no_gradient(model)


@pytest.mark.parametrize(
    ("whole", "microbatches", "words"),
    [
        ({"x": torch.randn(8, 6), "y": torch.randn(8, 6)}, None, "microbatches=N"),
        ({"x": torch.randn(9, 6), "y": torch.randn(9, 6)}, 2, "9 samples.*2 equal"),
        ({"x": torch.randn(8, 6), "y": torch.randn(10, 6)}, 2, "x: 8, y: 10"),
        ({"x": torch.randn(8, 6), "y": torch.tensor(1.0)}, 2, "y: None"),
        ([], 2, "no microbatch"),
        (7, 2, "found int"),
    ],
)
def test_batch_that_cannot_be_cut(whole: Any, microbatches: int | None, words: str) -> None:
    pipe = fxpipe.compile(Small(), microbatches=microbatches, ranks=2)
    with pytest.raises(errors.BatchError, match=words):
        pipe.step(whole)


def test_weights_of_another_length() -> None:
    model = Small()
    pipe = fxpipe.compile(model, batch()[0])
    with pytest.raises(errors.BatchError, match=r"weights has shape \(2,\).*3"):
        pipe.step(batch(), weights=[1.0, 2.0])
    assert no_gradient(model)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"ranks": 99}, errors.StageError, "99 stages.*parts.*at most"),
        ({"ranks": 0}, errors.BackendError, "ranks=0"),
        ({"schedule": "nested/2f2b"}, errors.ScheduleError, "nested/2f2b.*a base of gpipe, .*1f1b"),
        (
            {"schedule": "sideways/1f1b"},
            errors.ScheduleError,
            "sideways/1f1b.*placement of stage, .*nested",
        ),
        ({"schedule": "table.txt"}, errors.ScheduleError, "no file 'table.txt'"),
        ({"schedule": "1f1b", "chunks": 5}, errors.ScheduleError, "chunks=5.* 1 on each"),
        ({"ranks": "2"}, errors.BackendError, "ranks='2'; expected an integer"),
        ({"recompute": "vision"}, errors.ScheduleError, r"recompute .*expected names: \('vision',"),
        ({"live": {"vision": 2}}, errors.ScheduleError, r"live names \['vision'\]; expected moda"),
        ({"owners": "slac"}, errors.ScheduleError, "'slac' is unknown; there are .*slack"),
        ({"owners": {"vision": "slac"}}, errors.ScheduleError, "'slac' is unknown"),
        ({"costs": {"llm": 1}}, errors.ScheduleError, r"costs is a dict; expected .*Device\("),
        ({"backend": "mpi"}, errors.BackendError, "mpi"),
        ({"backend": "gloo"}, errors.BackendError, "torchrun"),
        ({"engine": "tpu"}, errors.BackendError, "tpu.*aten.*inductor"),
        ({"microbatches": 0}, errors.BatchError, "microbatches=0"),
        ({"regions": {"encoder": ["nowhere"]}}, errors.RegionError, "nowhere.*layers"),
    ],
)
def test_options(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fxpipe.compile(Small(), batch()[0], **options)


def test_levels_before_anything_is_traced() -> None:
    pipe = fxpipe.compile(Small(), ranks=2)
    with pytest.raises(errors.BatchError, match="pass example="):
        print(pipe.table)
    with pytest.raises(errors.FxpipeError, match=r"first step\(\)"):
        print(pipe.timeline)
    with pytest.raises(errors.ScheduleError, match=r"no option chunk; did you mean chunks\?"):
        pipe.reschedule("1f1b", chunk=2)
    with pytest.raises(errors.ScheduleError, match=r"no option x; expected one of chunks, owners,"):
        pipe.reschedule("1f1b", x=2)


def test_a_failing_op_leaves_no_gradient() -> None:
    case = models.CASES["three"]
    model = case.build(torch.float64)
    mbs = case.batch(False, torch.float64)
    pipe = fxpipe.compile(model, mbs[0], ranks=2, loss_fn=case.loss_fn)
    mbs[2]["labels"][0, 0] = 99
    with pytest.raises(errors.RankError, match=r"rank 1 .*llm1.F2"):
        pipe.step(mbs)
    assert no_gradient(model)
    mbs[2]["labels"][0, 0] = 1
    pipe.step(mbs)
    reference = case.build(torch.float64)
    models.eager(case, reference, mbs)
    assert models.worst(model, reference) < 1e-10
