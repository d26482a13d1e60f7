"""What a graph is traced with beside its microbatch; when any of it changes, the graph is stale."""

import torch
from torch import Tensor, nn

from fxpipe.errors import CaptureError

Mode = tuple[object, ...]


def mode_of(model: nn.Module) -> Mode:
    """Plain attributes of every module (`training` is one), and the kind of every parameter.

    A number, a string or a tensor that a module holds as an attribute is a constant of its graph.
    Attributes of objects that are no modules, such as a configuration, are not looked at.
    """
    plain = tuple(
        (name, _identity(value))
        for module in model.modules()
        for name, value in vars(module).items()
        if value is None or isinstance(value, (bool, int, float, str, Tensor))
    )
    kinds = tuple((p.requires_grad, p.dtype, p.device) for p in model.parameters())
    return plain, kinds


def _identity(value: object) -> object:
    """A tensor changes when it is replaced or written to; other values when they are not equal."""
    if isinstance(value, Tensor):
        return id(value), value._version
    return type(value), value


def refuse_autocast() -> None:
    """Raises CaptureError inside `torch.autocast`, whose casts would not be part of a graph."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise CaptureError(
            "autocast is on around the pipeline: its casts would not be part of the graph. "
            "Convert the model instead, for example model.to(torch.bfloat16)"
        )
