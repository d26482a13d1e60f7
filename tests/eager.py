"""A step of a pipe beside the same steps in eager."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.inputs import Microbatch
from tests.models import worst


def loss_of(model: nn.Module, microbatch: Microbatch) -> Tensor:
    """What eager makes of a microbatch."""
    named = isinstance(microbatch, Mapping)
    loss: Tensor = model(**microbatch) if named else model(*microbatch)
    return loss


def step_alike(
    pipe: fxpipe.Pipe, batch: Sequence[Microbatch], reference: nn.Module, within: float
) -> None:
    """A step has the losses and the gradients of eager. reference: the model as it was."""
    pipe.model.zero_grad()
    reference.zero_grad()
    expected = [loss_of(reference, mb) for mb in batch]
    (torch.stack(expected).sum() / len(batch)).backward()
    losses = pipe.step(list(batch)).losses
    assert torch.allclose(losses, torch.stack(expected).to(losses.dtype), rtol=within, atol=0)
    assert worst(pipe.model, reference) < within


def trained_alike(
    model: nn.Module, batch: Sequence[Microbatch], within: float, **how: Any
) -> fxpipe.Pipe:
    """A new pipe whose first step is as eager's; the first microbatch is the example."""
    reference = copy.deepcopy(model)
    pipe = fxpipe.compile(model, batch[0], backend="local", **how)
    step_alike(pipe, batch, reference, within)
    return pipe
