"""The torch names in use that are not public API, each behind one function.

Tried on torch 2.13.0. Everything else in fxpipe uses public names only.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.autograd import function
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree


def fake_mode(values: Sequence[object]) -> AbstractContextManager[Any]:
    """The fake-tensor mode that made these values, whose shape environment owns their symbols."""
    return next(value.fake_mode for value in values if hasattr(value, "fake_mode"))


def guards(mode: AbstractContextManager[Any]) -> list[sympy.Basic]:
    """What tracing has assumed of the symbols so far, as expressions that must be true."""
    env = getattr(mode, "shape_env", None)
    return [] if env is None else [guard.expr for guard in env.guards]


@contextmanager
def guarding(mode: AbstractContextManager[Any]) -> Iterator[None]:
    """Record new guards inside this context; torch.export leaves the environment frozen."""
    env = getattr(mode, "shape_env", None)
    frozen = env is not None and env.frozen
    if env is not None:
        env.frozen = False
    try:
        yield
    finally:
        if env is not None:
            env.frozen = frozen


def expression(size: int | torch.SymInt) -> sympy.Expr:
    """A size as a sympy expression of the input's symbols."""
    if isinstance(size, torch.SymInt):
        return size.node.expr
    return sympy.Integer(size)


def is_unbacked(size: object) -> bool:
    """Whether a number depends on the data of a tensor, not on the sizes of the inputs."""
    return bool(free_unbacked_symbols(size))


@contextmanager
def watching_autograd_functions(seen: list[str]) -> Iterator[None]:
    """Note every custom autograd.Function that is applied inside this context.

    torch.export records the forward of such a function and loses its backward, so a graph that
    contains one may have the right loss and the wrong gradients. Models keep `Function.apply` bound
    under names of their own, so what is watched is a function that every `apply` calls.
    """
    original: Callable[..., Any] = function._is_setup_context_defined

    def noting(setup_context: Callable[..., Any]) -> bool:
        apply = sys._getframe(1)
        caller = apply.f_back or apply
        cls = apply.f_locals["cls"]
        # The function behind a torch.library.custom_op: the graph holds the op, which keeps its
        # registered backward.
        if caller.f_globals.get("__name__") != "torch._library.autograd":
            seen.append(f"{cls.__qualname__} ({caller.f_code.co_filename}:{caller.f_lineno})")
        return bool(original(setup_context))

    function._is_setup_context_defined = noting
    try:
        yield
    finally:
        function._is_setup_context_defined = original


def flatten_leaves(value: object) -> tuple[list[Any], Any]:
    """Leaves of nested dicts, lists, tuples and dataclasses, and a hashable spec."""
    leaves, spec = pytree.tree_flatten(value)
    return leaves, spec


def key_paths(value: object) -> list[tuple[Any, ...]]:
    """The key path of each leaf; much slower than `flatten_leaves`."""
    named, _ = pytree.tree_flatten_with_path(value)
    return [path for path, _ in named]


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """What `flatten_named` took apart."""
    return pytree.tree_unflatten(leaves, spec)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function` applied to every leaf."""
    return pytree.tree_map(function, value)


def storage_of(tensor: Tensor) -> object:
    """The memory that a traced tensor lies in, to be compared and hashed."""
    storage: Callable[[object], object] = StorageWeakRef
    return storage(tensor.untyped_storage())


def share_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two traced tensors lie in the same memory."""
    return storage_of(a) == storage_of(b)


def has_hooks(tensor: Tensor) -> bool:
    """Whether a tensor's gradient passes through hooks of the user."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(tensor, name, None) for name in names)


@contextmanager
def watching_hooks(seen: list[str]) -> Iterator[None]:
    """Note every hook on a gradient that is registered inside this context: tracing loses it."""
    original: Any = Tensor.register_hook

    def noting(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        code = sys._getframe(1)
        seen.append(f"register_hook ({code.f_code.co_filename}:{code.f_lineno})")
        return original(tensor, hook)

    Tensor.register_hook = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.register_hook = original  # type: ignore[method-assign]
