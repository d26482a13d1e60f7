"""Parameters and buffers that forward assigns anew, where it does not write into those that were
there."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fxpipe.errors import CaptureError

Place = tuple[nn.Module, str, str, nn.Parameter]


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


@contextmanager
def same_parameters(model: nn.Module) -> Iterator[None]:
    """Raises CaptureError if code that runs inside leaves other parameters in the model, or another
    requires_grad; the model gets its own back."""
    before = list(_parameters(model))
    wanted = [tensor.requires_grad for *_, tensor in before]
    try:
        yield
    finally:
        after = list(_parameters(model))
        for module, _, key, _ in after:
            module._parameters.pop(key, None)  # copies of a module may share the dict
        for module, _, key, tensor in before:
            module._parameters[key] = tensor
        ends = [tensor.requires_grad for *_, tensor in before]
        for (*_, tensor), own, end in zip(before, wanted, ends, strict=True):
            if own != end:
                tensor.requires_grad_(own)
    _check_same(before, after)
    for (_, name, _, _), own, end in zip(before, wanted, ends, strict=True):
        if own != end:
            raise CaptureError(
                f"forward leaves parameter {name} with requires_grad={end}, and found it with "
                f"{own}: the next microbatch would have other gradients. Put it back at the end of "
                "forward, or set it outside of the model"
            )


def _check_same(before: list[Place], after: list[Place]) -> None:
    now = {name: tensor for _, name, _, tensor in after}
    was = {name: tensor for _, name, _, tensor in before}
    for name in dict.fromkeys([*was, *now]):
        if now.get(name) is not was.get(name):
            raise CaptureError(
                f"parameter {name} is assigned, made or deleted by forward: an optimizer would go "
                "on with the one that it has. Do that before compile, or between two steps"
            )


def _parameters(model: nn.Module) -> Iterator[Place]:
    """Each place of a parameter: its module, its full name, its key, and what is there."""
    for path, module in model.named_modules():
        for key, tensor in module._parameters.items():
            if tensor is not None:
                yield module, f"{path}.{key}".lstrip("."), key, tensor


def _kind(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
