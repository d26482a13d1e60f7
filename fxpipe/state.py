"""The tensors of a model by the model's own names."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn


def named_state(model: nn.Module, *, ties: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, then every buffer; one that is tied under all of its names, or one."""
    yield from model.named_parameters(remove_duplicate=not ties)
    yield from model.named_buffers(remove_duplicate=not ties)


def stand_ins(model: nn.Module, make: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """What stands for the tensors of a model in `functional_call(..., tie_weights=False)`, one for
    each tensor. Each place that holds one has one name here, though its module may have several:
    in a place that torch meets twice it would leave the stand-in behind."""
    tables: dict[int, tuple[str, Mapping[str, Tensor | None]]] = {}
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            tables.setdefault(id(table), (prefix, table))  # copies of a module may share it
    made: dict[Tensor, Tensor] = {}
    found: dict[str, Tensor] = {}
    for prefix, table in tables.values():
        for key, tensor in table.items():
            if tensor is None:
                continue
            if tensor not in made:
                made[tensor] = make(tensor)
            found[f"{prefix}.{key}".lstrip(".")] = made[tensor]
    return found


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named_state(model)}


def grad_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of the gradient that autograd would accumulate for it."""
    found: torch.dtype | None = getattr(tensor, "grad_dtype", None)
    return found or tensor.dtype
