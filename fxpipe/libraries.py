"""What a library does otherwise while it is traced: done in here as it is outside of a trace.

transformers drops a bidirectional mask that is all true, and attention without a mask is causal in
modules that call themselves so: such a tower is causal without padding and bidirectional with it.
A trace keeps the mask, as no graph could say what is in it, and so would be bidirectional always.
In here such attention gets, of a mask that is all true, a causal one. Of a gated delta rule, it
solves the triangular system row by row while it is exported; in here, with one operator.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from fxpipe.torch_internals import storage_of
from fxpipe.torch_modes import seen_as_exported

_SDPA = "sdpa"
_DELTA_RULE, _EXPORTING = "torch_chunk_gated_delta_rule", "is_torchdynamo_exporting"


class Droppable(NamedTuple):
    """A mask that is left out where it hides nothing and no window does."""

    mask: Tensor
    window: int | None

    def seen(self, rows: int, columns: int, mask: Tensor) -> Tensor:
        """What is attended to: a causal mask where this one is left out, else the mask given."""
        if self.window is not None and columns >= self.window:
            return mask
        device = mask.device
        causal = torch.arange(rows, device=device)[:, None] >= torch.arange(columns, device=device)
        return torch.where(self.mask.all(), causal, mask)


@contextmanager
def as_exported() -> Iterator[None]:
    """A model sees that it is exported, as in a trace, and attends as when it is not."""
    with seen_as_exported(), libraries_as_untraced():
        yield


@contextmanager
def libraries_as_untraced() -> Iterator[None]:
    """Inside, a model that sees that it is exported computes what it does when it is not."""
    makers = _table("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS")
    attention = _table("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS")
    with ExitStack() as stack:
        if makers is not None and attention is not None:
            found: dict[object, Droppable] = {}  # by memory: views of a mask are passed on as well
            stack.enter_context(_instead(makers, _noting(makers[_SDPA], found)))
            stack.enter_context(_instead(attention, _attending(attention[_SDPA], found)))
        for name in [name for name in sys.modules if name.startswith("transformers.models.")]:
            module = sys.modules[name]
            if {_DELTA_RULE, _EXPORTING} <= vars(module).keys():
                stack.enter_context(patch.object(module, _EXPORTING, lambda: False))
        yield


def _table(module: str, name: str) -> Any:
    """One of the library's tables of functions; None where it is not in use, or has none."""
    found = getattr(sys.modules.get(module), name, None)
    return found if found is not None and _SDPA in found else None


@contextmanager
def _instead(table: Any, function: Callable[..., Any]) -> Iterator[None]:
    """A function in its place in one of the library's tables."""
    before = table[_SDPA]
    table.register(_SDPA, function)
    try:
        yield
    finally:
        table.register(_SDPA, before)


def _noting(make: Callable[..., Any], found: dict[object, Droppable]) -> Callable[..., Any]:
    """The library's maker of masks, which notes those that it may leave out."""

    def made(*args: Any, **kwargs: Any) -> Any:
        mask = make(*args, **kwargs)
        if kwargs.get("allow_is_bidirectional_skip") and isinstance(mask, Tensor):
            found[storage_of(mask)] = Droppable(mask, kwargs.get("local_size"))
        return mask

    return made


def _attending(attend: Callable[..., Any], found: dict[object, Droppable]) -> Callable[..., Any]:
    """The library's attention, with a mask that says what it would attend to without a trace."""

    def attended(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        known = found.get(storage_of(attention_mask)) if attention_mask is not None else None
        if known is not None and causal and query.shape[2] > 1:
            attention_mask = known.seen(query.shape[2], key.shape[2], attention_mask)
        given = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        return attend(module, query, key, value, attention_mask, **given)

    return attended
