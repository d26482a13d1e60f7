"""The torch names in use that are not public API, each behind one function.

Tried on torch 2.13.0. Beside it, only the modules called torch_... use such names.
"""

import io
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
import torch.distributed as dist
import torch.nn.modules.module as _modules
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle


def fake_mode(values: Sequence[object]) -> AbstractContextManager[Any]:
    """The fake-tensor mode that made these values, whose shape environment owns their symbols."""
    return next(value.fake_mode for value in values if hasattr(value, "fake_mode"))


@contextmanager
def trying(mode: AbstractContextManager[Any]) -> Iterator[None]:
    """Run operators on fake tensors as `make_fx` does, so that strides come out alike; symbols of
    sizes that depend on data come to nothing."""
    env = getattr(mode, "shape_env", None)
    fresh = nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()
    with mode, enable_python_dispatcher(), fresh:
        yield


def guards(mode: AbstractContextManager[Any]) -> list[sympy.Basic]:
    """What tracing has assumed of the symbols so far, as expressions that must be true."""
    env = getattr(mode, "shape_env", None)
    if env is None:
        return []
    deferred = [check.expr for found in env.deferred_runtime_asserts.values() for check in found]
    return [*(guard.expr for guard in env.guards), *deferred]


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


def raw_expression(number: int | torch.SymInt | torch.SymBool) -> sympy.Basic:
    """A number as it was made, before tracing learned that it equals another one."""
    node = getattr(number, "node", None)
    return sympy.sympify(number) if node is None else node._expr


def unbacked_in(expr: sympy.Basic) -> set[sympy.Symbol]:
    """The symbols of an expression that no shape of the inputs tells."""
    return set(free_unbacked_symbols(expr))


def replace_symbol(number: torch.SymInt | torch.SymBool, new: sympy.Basic, old: Any) -> None:
    """Tell the tracer that made a number that a symbol in it is equal to an older expression."""
    number.node.shape_env._set_replacement(new, old, "the same operator ran before")


# Symbols of sizes that depend on data, and that every rank finds before a step, by their owner.
_FOUND: WeakKeyDictionary[Any, set[sympy.Symbol]] = WeakKeyDictionary()


def declare_found(mode: AbstractContextManager[Any], symbols: Iterable[sympy.Symbol]) -> None:
    """From now on these symbols count as sizes of the microbatch, for `is_unbacked` as well."""
    env = getattr(mode, "shape_env", None)
    if env is not None:
        _FOUND.setdefault(env, set()).update(symbols)


def is_unbacked(size: Any) -> bool:
    """Whether a number depends on the data of a tensor, and no rank can know it before a step."""
    found = free_unbacked_symbols(size)
    return bool(found) and not found <= _FOUND.get(size.node.shape_env, set())


def children_of(value: object) -> tuple[tuple[str, ...], list[Any], Any] | None:
    """Names, values and a hashable structure of what a container that torch knows holds; None for
    anything else."""

    def inside(part: object) -> bool:
        return part is not value

    children, spec = pytree.tree_flatten(value, is_leaf=inside)
    if len(children) == 1 and children[0] is value:
        return None
    if spec not in _CHILD_NAMES:
        try:
            paths = [path for path, _ in pytree.tree_flatten_with_path(value, is_leaf=inside)[0]]
            _CHILD_NAMES[spec] = tuple("".join(map(str, path)) for path in paths)
        except ValueError:  # registered without names
            _CHILD_NAMES[spec] = tuple(f"[{index}]" for index in range(len(children)))
    return _CHILD_NAMES[spec], children, spec


_CHILD_NAMES: dict[Any, tuple[str, ...]] = {}  # finding them takes much longer than the children


def from_children(values: list[Any], spec: Any) -> Any:
    """What `children_of` took apart."""
    return pytree.tree_unflatten(values, spec)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function` applied to every leaf, as torch takes a call's arguments apart."""
    return pytree.tree_map(function, value)


@dataclass(frozen=True)
class _Unknown:
    """Memory that cannot be looked at, to be compared with that which can."""

    cdata: int


def storage_of(tensor: Tensor) -> object:
    """The memory that a traced tensor lies in, to be compared and hashed."""
    storage: Callable[[object], object] = StorageWeakRef
    try:
        return storage(tensor.untyped_storage())
    except NotImplementedError:  # sparse, or seen one sample at a time: nothing tells
        return _Unknown(-id(tensor))


def share_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two traced tensors lie in the same memory."""
    return storage_of(a) == storage_of(b)


# The attributes in which a module keeps its parameters, buffers and children.
MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# What a trace takes a parameter to be, and the hooks on its gradient.
tensor_kind: Callable[[Tensor], tuple[Any, ...]] = attrgetter(
    "requires_grad", "dtype", "device", "shape", *_HOOKS
)
# A number that grows when a tensor is written to.
written: Callable[[Tensor], int] = attrgetter("_version")


def has_hooks(owner: Tensor | nn.Module) -> bool:
    """Whether the gradient of a tensor, or those of a module, pass through hooks of the user."""
    return any(getattr(owner, name, None) for name in (*_HOOKS, "_backward_pre_hooks"))


def settings() -> tuple[object, ...]:
    """What torch itself is set to that decides what a model's code does."""
    hooks = (_modules._global_forward_pre_hooks, _modules._global_forward_hooks)
    own = (function for table in hooks for function in table.values())
    return torch.get_default_dtype(), torch.get_default_device(), *own, *gradient_hooks()


def gradient_hooks() -> list[object]:
    """The hooks on the gradients of all modules there are."""
    tables = (_modules._global_backward_pre_hooks, _modules._global_backward_hooks)
    return [function for table in tables for function in table.values()]


@contextmanager
def watching_hooks(seen: list[str]) -> Iterator[None]:
    """Note every hook on a gradient that is registered inside this context: tracing loses it."""
    with hooks_at_rest():
        at_rest: Any = Tensor.register_hook

        def noting(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
            code = sys._getframe(1)
            seen.append(f"register_hook ({code.f_code.co_filename}:{code.f_lineno})")
            return at_rest(tensor, hook)

        Tensor.register_hook = noting  # type: ignore[method-assign]
        yield


@contextmanager
def hooks_at_rest() -> Iterator[None]:
    """Inside, code that is run without gradients may put hooks on them, as with gradients."""
    original: Any = Tensor.register_hook

    def register(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        if not tensor.requires_grad and not torch.is_grad_enabled():
            return RemovableHandle(OrderedDict())
        return original(tensor, hook)

    Tensor.register_hook = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.register_hook = original  # type: ignore[method-assign]


DataDependentError = GuardOnDataDependentSymNode


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no numbers."""
    return isinstance(tensor, FakeTensor)


def constant_of(tensor: Tensor) -> Tensor | None:
    """The values of a traced tensor made of Python's numbers, if nothing has changed it."""
    found: Tensor | None = getattr(tensor, "constant", None)
    return found


def is_mapped() -> bool:
    """Whether code runs inside vmap or another transform, whose tensors hide real ones."""
    return torch._C._functorch.maybe_current_level() is not None


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a transform (torch.func) or to a trace, and has no values."""
    return is_fake(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


@contextmanager
def quiet_failure() -> Iterator[None]:
    """torch.export writes neither the whole graph to stderr when it fails, nor which sizes it has
    fixed: its error, and the shapes of what was captured, say so."""
    said = io.StringIO()
    names = ("torch.fx.experimental.symbolic_shapes", "torch._export.non_strict_utils")
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(said):
            yield
        sys.stderr.write(said.getvalue())
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def unbacked_symbols(value: object) -> set[sympy.Symbol]:
    """The numbers in a value that depend on the data of a tensor."""
    if isinstance(value, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return set(free_unbacked_symbols(value))
    return set()


def keep_signature(graph: fx.Graph, new: fx.Graph) -> None:
    """Write the code of a new graph as that of another one: with the same arguments."""
    new.set_codegen(graph._codegen)


def add_each(sums: list[Tensor], summands: list[Tensor]) -> None:
    """Add to each tensor another one, in place, in one call."""
    torch._foreach_add_(sums, summands)


def forget_world() -> None:
    """Let go of the group of all processes: a module of torch that every export loads keeps the one
    that it found as a default of its functions, whatever is destroyed."""
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(module).values() if module else ():
        kept = getattr(function, "__defaults__", None) or ()
        if any(isinstance(value, dist.ProcessGroup) for value in kept):
            function.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value for value in kept
            )
