"""How torch applies custom autograd functions: names that are not public API, as torch_internals.

Tried on torch 2.13.0.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._functorch import predispatch
from torch.autograd import function

Apply = Callable[[type, tuple[Any, ...], str], Any]


def is_vmap_start(called: object) -> bool:
    """Whether a traced call enters a level of vmap."""
    return called is predispatch._vmap_increment_nesting


def is_vmap_end(called: object) -> bool:
    """Whether a traced call leaves a level of vmap."""
    return called is predispatch._vmap_decrement_nesting


def plain_apply(cls: type, args: tuple[Any, ...]) -> Any:
    """What `cls.apply(*args)` of a custom autograd.Function does outside of transforms."""
    return super(function._SingleLevelFunction, cls).apply(*args)  # type: ignore[misc]


@contextmanager
def replacing_apply(instead: Apply, transformed: Apply) -> Iterator[None]:
    """Call `instead(cls, args, where)` for every custom autograd.Function that is applied here.

    torch.export records the forward of such a function and loses its backward, so a graph that
    contains one may have the right loss and the wrong gradients. Models keep `Function.apply` bound
    under names of their own, so what is replaced is the method that every `apply` ends in. One
    that is applied inside vmap or grad goes another way: `transformed` is told of it before.
    """
    internals: Any = function
    single, original = internals._SingleLevelFunction, internals.custom_function_call

    def apply(cls: type, *args: Any) -> Any:
        return instead(cls, args, _caller(sys._getframe(1)))

    def under_transforms(cls: type, *args: Any, **kwargs: Any) -> Any:
        transformed(cls, args, _caller(sys._getframe(1)))
        return original(cls, *args, **kwargs)

    single.apply = classmethod(apply)
    internals.custom_function_call = under_transforms
    try:
        yield
    finally:
        del single.apply
        internals.custom_function_call = original


def _caller(frame: Any) -> str:
    """The line that called `apply`, seen from inside of it; no line of a library's custom op."""
    while frame is not None and frame.f_globals.get("__name__") == function.__name__:
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") == "torch._library.autograd":
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
