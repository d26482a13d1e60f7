"""The torch names of tracing modes that are not public API, each behind one function.

Tried on torch 2.13.0. See torch_internals.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._export.non_strict_utils import _NonStrictTorchFunctionHandler
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

DATA_ERRORS = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
)


@contextmanager
def untraced() -> Iterator[None]:
    """Operators run for real inside this context, whatever traces around it."""
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch._C._DisablePythonDispatcher(),
    ):
        yield


@contextmanager
def without_tracing() -> Iterator[None]:
    """Operators run for real inside this context, and function modes stay as they are."""
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        yield


def without_function_modes() -> AbstractContextManager[None]:
    """No mode sees calls inside this context."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


@contextmanager
def seen_as_exported() -> Iterator[None]:
    """Models see inside this context that they are exported, as they do in a trace."""
    flags = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = flags


def fake_like(mode: Any, tensor: Tensor) -> Tensor:
    """A tensor of the same shape, dtype and device in a fake-tensor mode, with no symbols."""
    fake: Tensor = mode.from_tensor(tensor, static_shapes=True)
    return fake


@contextmanager
def sizes_without_a_greatest() -> Iterator[None]:
    """Inside, new sizes that depend on data have no upper bound in place of the greatest integer:
    torch divides that as a float, where a size equals a multiple of another, and then takes the
    quotient for too great."""
    known = symbolic_shapes._constrain_range_for_size

    def constrain(a: Any, min: int | None = None, max: int | None = None) -> None:
        known(a, min, None if max == sys.maxsize - 1 else max)

    symbolic_shapes._constrain_range_for_size = constrain
    try:
        yield
    finally:
        symbolic_shapes._constrain_range_for_size = known


def new_fake_mode() -> AbstractContextManager[Any]:
    """A mode in which tensors have no numbers; real ones may be mixed with them."""
    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def export_mode() -> Any:
    """A mode like that of torch.export: a number that code reads out of a tensor is a symbol."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True, export=True)


@contextmanager
def run_as_exported(mode: AbstractContextManager[Any]) -> Iterator[None]:
    """Code runs inside as torch.export runs it, and nothing is recorded."""
    with seen_as_exported(), mode, enable_python_dispatcher(), _NonStrictTorchFunctionHandler():
        yield
