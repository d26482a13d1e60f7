"""Tensors that forward reads, and not as attributes of its modules: from lists, closures, globals.

While a model is traced, other tensors stand for its parameters and buffers, in the places where
modules have them. Code that has one from elsewhere would read a constant, and its gradient would be
lost; so it is given what stands for it. One that is none of the model's has no place to get a
gradient in.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxpipe.errors import CaptureError
from fxpipe.frames import calling_line
from fxpipe.torch_internals import is_wrapped
from fxpipe.trees import map_leaves, take_apart

UNOWNED = (
    "reads a tensor that requires a gradient and is no parameter of the model: it would get none. "
    "Make it a parameter of the model (also where loss_fn has it: let the model compute its loss), "
    "or read it as x.detach()"
)


class Outsiders(TorchFunctionMode):
    """Gives code what stands for a tensor of the model.

    Raises CaptureError where a result would owe a gradient to another tensor with values.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stands: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, real: Iterable[Tensor], traced: Iterable[Tensor]) -> None:
        """From now on the second stand for the first."""
        self._stands = {id(r): (r, t) for r, t in zip(real, traced, strict=True) if r is not t}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        real = [leaf for leaf in take_apart((args, kwargs))[0] if _is_real(leaf)]
        if any(id(tensor) in self._stands for tensor in real):
            args, kwargs = map_leaves(self._stand, args), map_leaves(self._stand, kwargs)
        made = func(*args, **kwargs)
        foreign = [t for t in real if t.requires_grad and id(t) not in self._stands]
        if foreign and any(map(_wants_gradient, take_apart(made)[0])):
            raise CaptureError(f"{calling_line()}, at shape {tuple(foreign[0].shape)}, {UNOWNED}")
        return made

    def _stand(self, value: Any) -> Any:
        return self._stands.get(id(value), (value, value))[1]


def _is_real(value: object) -> bool:
    return isinstance(value, Tensor) and not is_wrapped(value)


def _wants_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
