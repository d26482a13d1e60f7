"""The tensors of a model by the model's own names."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def named_state(model: nn.Module, *, ties: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, then every buffer; one that is tied under all of its names, or one."""
    yield from model.named_parameters(remove_duplicate=not ties)
    yield from model.named_buffers(remove_duplicate=not ties)


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named_state(model)}


def grad_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of the gradient that autograd would accumulate for it."""
    found: torch.dtype | None = getattr(tensor, "grad_dtype", None)
    return found or tensor.dtype
