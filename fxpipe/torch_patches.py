"""What of torch is replaced while a model is traced, since export records less than it does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from fxpipe.torch_internals import is_fake


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """Inside, `torch.inference_mode` is `torch.no_grad`: export records only the latter."""
    mode: Any = torch.inference_mode
    enter, leave = mode.__enter__, mode.__exit__

    def entering(self: Any) -> None:
        self._instead = torch.no_grad() if self.mode else nullcontext()
        self._instead.__enter__()

    mode.__enter__ = entering
    mode.__exit__ = lambda self, *error: self._instead.__exit__(*error)
    try:
        yield
    finally:
        mode.__enter__, mode.__exit__ = enter, leave


@contextmanager
def data_as_detach() -> Iterator[None]:
    """Inside, `tensor.data` of a traced tensor is `tensor.detach()`: export loses the former."""
    original: Any = torch._C.TensorBase.data

    def get(tensor: Tensor) -> Any:
        return tensor.detach() if is_fake(tensor) else original.__get__(tensor)

    def put(tensor: Tensor, value: Tensor) -> None:
        original.__set__(tensor, value)

    Tensor.data = property(get, put)  # type: ignore[assignment]
    try:
        yield
    finally:
        del Tensor.data


@contextmanager
def checkpoints_as_calls() -> Iterator[None]:
    """Inside, a reentrant checkpoint is a call of its function: what it keeps is decided later. As
    there, without an input that has a gradient nothing in it has one."""

    def call(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        wanted = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        with torch.set_grad_enabled(wanted and torch.is_grad_enabled()):
            return function(*args)

    CheckpointFunction.apply = staticmethod(call)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del CheckpointFunction.apply
