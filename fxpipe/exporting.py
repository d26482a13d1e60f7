"""The export ladder: how much of a microbatch's sizes a trace leaves open.

    export(whole, tensors) -> ExportedProgram

Each policy frees fewer dimensions than the one before; the first that traces is taken.
"""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fxpipe.errors import CaptureError
from fxpipe.inputs import rebuild

LossFn = Callable[[Any], Tensor]
WRITES = (
    "in every microbatch. Batch normalisation: call .eval() on that module, or use "
    "track_running_stats=False, GroupNorm or LayerNorm; otherwise update it after the step"
)


class WithLoss(nn.Module):
    """The model and its loss, as a function of the microbatch's tensors alone."""

    def __init__(
        self,
        model: nn.Module,
        structure: Any,
        fixed: tuple[tuple[str, object], ...],
        loss_fn: LossFn | None,
    ) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self.rebuild = (structure, fixed)
        self.loss_fn = loss_fn

    def forward(self, *tensors: Tensor) -> Tensor:
        args, kwargs = rebuild(tensors, *self.rebuild)
        before = dict(self.model.named_buffers())
        loss = pick_loss(self.model(*args, **kwargs), self.loss_fn)
        changed = [n for n, b in self.model.named_buffers() if b is not before.get(n)]
        if changed:
            raise CaptureError(f"buffer {changed[0]} is assigned by forward, {WRITES}")
        return loss


def pick_loss(output: Any, loss_fn: LossFn | None) -> Tensor:
    """The scalar loss in what a model returned. Raises CaptureError when there is none."""
    loss = loss_fn(output) if loss_fn is not None else getattr(output, "loss", output)
    if not isinstance(loss, Tensor):
        raise CaptureError(
            f"the model returned {type(output).__name__} without a loss tensor in `.loss` "
            f"(found {type(loss).__name__}); pass the labels, or loss_fn=lambda outputs: ..."
        )
    if loss.dim() != 0:
        raise CaptureError(
            f"the loss has shape {tuple(loss.shape)}, not (): reduce it to a scalar in the model "
            "or in loss_fn, for example with .mean()"
        )
    return loss


def export(whole: WithLoss, tensors: Sequence[Tensor]) -> ExportedProgram:
    """Export with as many symbolic dimensions as the model allows."""
    failures: list[Exception] = []
    for policy in (_all_dims, _integer_dims, _first_dims, _no_dims):
        shapes = (tuple(policy(tensor) for tensor in tensors),)
        try:
            return torch.export.export(whole, tuple(tensors), dynamic_shapes=shapes, strict=False)
        except CaptureError:
            raise
        except Exception as error:
            failures.append(error)
    raise CaptureError(_explain(whole.model, failures[-1])) from failures[-1]


def _all_dims(tensor: Tensor) -> dict[int, Any]:
    return dict.fromkeys(range(tensor.dim()), Dim.AUTO)


def _integer_dims(tensor: Tensor) -> dict[int, Any]:
    return _first_dims(tensor) if tensor.is_floating_point() else _all_dims(tensor)


def _first_dims(tensor: Tensor) -> dict[int, Any]:
    return {0: Dim.AUTO} if tensor.dim() else {}


def _no_dims(tensor: Tensor) -> dict[int, Any]:
    return {}


def _explain(model: nn.Module, error: Exception) -> str:
    """Where in the model tracing stopped, and what to change."""
    names = {id(module): name for name, module in model.named_modules()}
    where = "the model"
    for frame, line in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if id(owner) in names:
            module = names[id(owner)] or "(the model itself)"
            code = frame.f_code
            where = f"module {module} ({type(owner).__name__}), {code.co_filename}:{line}"
    cause = " ".join(str(error).split())[:300]
    return (
        f"cannot trace {where}: {type(error).__name__}: {cause}. Python control flow on tensor "
        "values (if x.sum() > 0, .item(), .tolist(), loops over tensors) cannot be part of a "
        "graph: use torch.where or tensor operations there, or move it out of forward"
    )
