"""Buffers that forward assigns anew, where it does not write into the tensor that was there."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fxpipe.errors import CaptureError


def write_back(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Trace the assignment of a new tensor to a buffer as a copy into the one that it was before.

    Raises CaptureError where the new one is of another kind."""
    after = dict(model.named_buffers())
    for name in dict.fromkeys([*before, *after]):
        if after.get(name) is not before.get(name):
            _write_back(model, name, before.get(name), after.get(name))


def _write_back(model: nn.Module, name: str, old: Tensor | None, new: Tensor | None) -> None:
    check_replaced(name, old, new)
    assert old is not None and new is not None
    with torch.no_grad():
        old.copy_(new)
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, old)


def check_replaced(name: str, old: Tensor | None, new: Tensor | None) -> None:
    """Raises CaptureError if a buffer has become a tensor of another kind."""
    if old is None or new is None or (old.shape, old.dtype) != (new.shape, new.dtype):
        raise CaptureError(
            f"buffer {name} is replaced by forward: {_kind(old)} becomes {_kind(new)}. The ranks "
            "can only hand on a tensor of one shape and dtype: register it like that, or keep it "
            "out of forward"
        )


def _kind(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
