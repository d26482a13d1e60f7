"""What forward asks of autograd itself, beside the gradient of its operators.

A graph has operators alone: hooks on the nodes of autograd's history, functions that change what is
saved for backward, and gradients that forward reads or makes would be left out without a word.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from fxpipe.errors import CaptureError
from fxpipe.frames import calling_line, is_model_code
from fxpipe.torch_internals import is_fake
from fxpipe.trees import map_leaves

_SETTERS = Tensor.requires_grad_, Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_HOOKS = ("register_hook", "register_prehook")
_AFTER_STEP = "Do it after step(), with what .grad then holds, or outside of the model"


@contextmanager
def operators_alone() -> Iterator[None]:
    """Inside, a model's code that asks more of autograd raises CaptureError."""
    with _no_functions_on_saved(), _no_hooks_on_nodes(), _no_gradients():
        yield


@contextmanager
def _no_functions_on_saved() -> Iterator[None]:
    enter = saved_tensors_hooks.__enter__

    def entering(self: Any) -> None:
        code = getattr(self.pack_hook, "__code__", None)
        if code is None or is_model_code(code):
            raise CaptureError(
                f"{calling_line()} changes what is saved for backward (saved_tensors_hooks), which "
                "no graph would do. Leave it out, or compute what it does as an autograd.Function"
            )
        enter(self)

    saved_tensors_hooks.__enter__ = entering  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]


class _Node:
    """A node of autograd's history, to be looked at."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in _HOOKS:
            raise CaptureError(
                f"{calling_line()} puts a hook on grad_fn, which would never run. Write the change "
                "of a gradient as an autograd.Function"
            )
        return getattr(self._node, name)


@contextmanager
def _no_hooks_on_nodes() -> Iterator[None]:
    original: Any = torch._C.TensorBase.grad_fn

    def get(tensor: Tensor) -> Any:
        node = original.__get__(tensor)
        ours = node is not None and is_fake(tensor) and is_model_code(sys._getframe(1).f_code)
        return _Node(node) if ours else node

    Tensor.grad_fn = property(get)  # type: ignore[assignment]
    try:
        yield
    finally:
        del Tensor.grad_fn


@contextmanager
def _no_gradients() -> Iterator[None]:
    original: Any = torch._C.TensorBase.grad
    backward: Any = torch.autograd.backward

    def get(tensor: Tensor) -> Any:
        _refuse("reads a tensor's .grad, which a step writes at its end")
        return original.__get__(tensor)

    def put(tensor: Tensor, value: Tensor | None) -> None:
        _refuse("writes a tensor's .grad, which a step does at its end")
        original.__set__(tensor, value)

    def refused(*args: Any, **kwargs: Any) -> None:
        raise CaptureError(
            f"{calling_line()} runs a backward of its own, and a graph has one for the whole loss. "
            "Add its loss to the one that forward returns"
        )

    Tensor.grad = property(get, put)  # type: ignore[assignment]
    torch.autograd.backward = refused
    try:
        yield
    finally:
        del Tensor.grad
        torch.autograd.backward = backward


def _refuse(what: str) -> None:
    if is_model_code(sys._getframe(2).f_code):
        raise CaptureError(f"{calling_line()} {what}. {_AFTER_STEP}")


class Toggles(TorchFunctionMode):
    """Follows `requires_grad` of parameters while forward turns it off and on again: where it is
    off, operators read a parameter as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self._trained: dict[int, Tensor] = {}
        self._off: set[int] = set()

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """A run of forward begins, with these parameters."""
        self._trained = {id(tensor): tensor for tensor in parameters if tensor.requires_grad}
        self._off = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _SETTERS:
            made = func(*args, **kwargs)
            self._note(args[0])
            return made
        if self._off:
            args, kwargs = map_leaves(self._read, args), map_leaves(self._read, kwargs)
        return func(*args, **kwargs)

    def _note(self, tensor: Tensor) -> None:
        if id(tensor) in self._trained and not tensor.requires_grad:
            self._off.add(id(tensor))
        else:
            self._off.discard(id(tensor))

    def _read(self, value: Any) -> Any:
        return value.detach() if id(value) in self._off else value
