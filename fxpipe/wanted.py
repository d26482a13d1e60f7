"""What is wanted of a model's output: its loss, and other values that go back to the caller.

A trace returns tensors only. What they are in the output, and what stands beside them there, is
noted while it is traced, so that the output can be put together again from the tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor

from fxpipe.errors import BatchError, CaptureError
from fxpipe.torch_chance import hints
from fxpipe.torch_internals import expression
from fxpipe.trees import PLAIN, Tree, take_apart

Metrics = Mapping[str, Tensor]
LossFn = Callable[[Any], Tensor | tuple[Tensor, Metrics]]
Outputs = bool | tuple[str, ...] | Callable[[Any], Any]


@dataclass(frozen=True)
class Place:
    """A leaf of an output that is a tensor: which of the trace's other values it is."""

    index: int


@dataclass(frozen=True)
class Returned:
    """What a trace returned: a loss or none and why, then `count` other tensors.

    leaves: of the output: a Place, a size in symbols, or the value itself
    """

    no_loss: str | None = None
    count: int = 0
    tree: Tree | None = None
    leaves: tuple[object, ...] = ()

    def output(self, tensors: Sequence[Tensor], size: Callable[[sympy.Expr], int]) -> Any:
        """The output with these tensors in it."""
        assert self.tree is not None
        return self.tree.together([_value(leaf, tensors, size) for leaf in self.leaves])


def _value(leaf: object, tensors: Sequence[Tensor], size: Callable[[sympy.Expr], int]) -> object:
    if isinstance(leaf, Place):
        return tensors[leaf.index]
    return size(leaf) if isinstance(leaf, sympy.Expr) else leaf


LOSS_ONLY = Returned()


class Reader:
    """Called with the model's output inside a trace: its tensors, the loss first.

    outputs: everything (True), values by name, or what a function makes of the output; where any
    are wanted, there need not be a loss. Where nothing is wanted, the metrics that loss_fn returns
    beside the loss are the other values. returned: what the last call has found.
    """

    def __init__(self, loss_fn: LossFn | None, outputs: Outputs = False) -> None:
        self.loss_fn = loss_fn
        self.outputs = outputs
        self.returned = LOSS_ONLY

    def __call__(self, output: Any) -> tuple[Tensor, ...]:
        """The loss, if there is one, and the other tensors that are wanted."""
        why: str | None = None
        if self.outputs:
            loss, why = self._loss(output)
            picked = self._picked(output)
        else:
            loss, picked = pick_loss(output, self.loss_fn)
        if picked is None and not self.outputs:
            self.returned = LOSS_ONLY
            return () if loss is None else (loss,)
        leaves, tree = take_apart(picked)
        distinct = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        place = {key: Place(index) for index, key in enumerate(distinct)}
        names = tree.paths()
        found = [place.get(id(v)) or _constant(n, v) for n, v in zip(names, leaves, strict=True)]
        self.returned = Returned(why, len(distinct), tree, tuple(found))
        return (*([] if loss is None else [loss]), *distinct.values())

    def _loss(self, output: Any) -> tuple[Tensor | None, str | None]:
        """The loss, or why there is none. A loss function may well fail where labels are absent."""
        try:
            return pick_loss(output, self.loss_fn)[0], None
        except CaptureError as error:
            return None, str(error)

    def _picked(self, output: Any) -> Any:
        if callable(self.outputs):
            return self.outputs(output)
        if isinstance(self.outputs, tuple):
            return {name: _named(output, name) for name in self.outputs}
        return output


def pick_loss(output: Any, loss_fn: LossFn | None) -> tuple[Tensor, Metrics | None]:
    """The scalar loss in what a model returned, and the scalars that loss_fn returns beside it.
    Raises CaptureError when there is no loss."""
    loss, metrics = _called(output, loss_fn)
    _check_loss(output, loss, given=loss_fn is not None)
    for name, value in (metrics or {}).items():
        if not isinstance(value, Tensor) or value.dim():
            raise CaptureError(
                f"metric {name!r} of loss_fn is {_described(value)}, no tensor of shape (); reduce "
                "it, or ask for it with pipe.evaluate(outputs=...)"
            )
    return loss, metrics


def _called(output: Any, loss_fn: LossFn | None) -> tuple[Any, Metrics | None]:
    try:
        loss = loss_fn(output) if loss_fn is not None else getattr(output, "loss", output)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise CaptureError(
            f"loss_fn raised {type(error).__name__}: {error}, on what the model returned, "
            f"{_described(output)}; pass what the loss needs (labels), or mend loss_fn"
        ) from error
    match loss:
        case (first, Mapping() as metrics) if loss_fn is not None:
            return first, metrics
    return loss, None


def _check_loss(output: Any, loss: Any, *, given: bool) -> None:
    if not isinstance(loss, Tensor) and given:
        raise CaptureError(
            f"loss_fn returned {_described(loss)} for what the model returned, "
            f"{_described(output)}; pass what the loss needs (labels), and return a "
            "tensor of shape (), or that and a dict of metrics"
        )
    if not isinstance(loss, Tensor):
        raise CaptureError(
            f"the model returned {type(output).__name__} without a loss tensor in `.loss` "
            f"(found {type(loss).__name__}); pass the labels, or "
            f"loss_fn=lambda outputs: {_where_a_loss_may_be(output)}"
        )
    if loss.dim() != 0:
        shape = tuple(hints(loss.shape) or loss.shape)
        raise CaptureError(
            f"the loss has shape {shape}, not (): reduce it to a scalar in the model or in "
            "loss_fn, for example with .mean()"
        )


def _where_a_loss_may_be(output: Any) -> str:
    match output:
        case Mapping() if "loss" in output:
            return 'outputs["loss"]'
        case (Tensor() as first, *_) if first.dim() == 0:
            return "outputs[0]"
    return "..."


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(hints(output.shape) or output.shape)}"
    names = list(output) if isinstance(output, Mapping) else list(getattr(output, "__dict__", ()))
    inside = f" with {', '.join(map(str, names))}" if names else ""
    return f"a {type(output).__name__}{inside}"


def _named(output: Any, name: str) -> Any:
    if isinstance(output, Mapping) and name in output:
        return output[name]
    if isinstance(output, Tensor):
        raise BatchError(
            f"outputs names {name!r}, but the model returns {_described(output)} and no names; "
            "write outputs=True, or a function of it"
        )
    if isinstance(output, Mapping) or not hasattr(output, name):
        known = (
            list(output) if isinstance(output, Mapping) else list(getattr(output, "__dict__", ()))
        )
        raise BatchError(
            f"outputs names {name!r}, which the model's {type(output).__name__} has not; it has "
            f"{', '.join(map(str, known)) or 'no names'}"
        )
    return getattr(output, name)


def _constant(name: str, value: Any) -> object:
    """A leaf that is no tensor: it follows from the sizes, or is the same for every microbatch."""
    if isinstance(value, torch.SymInt):
        return expression(value)
    if isinstance(value, PLAIN):
        return value
    raise CaptureError(
        f"the model's output holds a {type(value).__name__} at output{name}, which cannot be taken "
        "apart: ask for less, outputs=['logits'] or outputs=lambda out: ..., or register its class "
        "with torch.utils._pytree.register_pytree_node or torch.export.register_dataclass"
    )
