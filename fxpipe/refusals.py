"""What no graph could do as eager does: said before anything is run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from fxpipe.dataflow import CUTS_GRADIENT
from fxpipe.errors import CaptureError
from fxpipe.outsiders import UNOWNED
from fxpipe.passes.inline_no_grad import NO_GRAD

if TYPE_CHECKING:
    from fxpipe.capture import Captured


def check_loss(model: nn.Module, loss_fn: object) -> None:
    """Raises CaptureError if a loss that is a module trains parameters which the model has not."""
    own = set(map(id, model.parameters()))
    for name, parameter in loss_fn.named_parameters() if isinstance(loss_fn, nn.Module) else ():
        if parameter.requires_grad and id(parameter) not in own:
            raise CaptureError(
                f"loss_fn's parameter {name} requires a gradient and is no parameter of the model: "
                "it would get none. Make loss_fn a part of the model, which then returns its loss"
            )


def refuse_outside(captured: "Captured") -> None:
    """Raises CaptureError if forward reads a tensor that wants a gradient and is no parameter of
    the model: nobody would write it."""
    for holder in captured.graph.graph.nodes:
        constant = captured.constants.get(captured.state.get(holder.name, ""))
        if constant is None or not constant.requires_grad:
            continue
        for node in holder.users:
            if node.target not in CUTS_GRADIENT and NO_GRAD not in node.meta:
                what = f"{node.name} ({holder.name}, of shape {tuple(constant.shape)})"
                raise CaptureError(f"{what} {UNOWNED}")


def refuse_hooks(seen: Sequence[str]) -> None:
    """Raises CaptureError if there is a hook on a gradient, where no gradient passes by it."""
    if seen:
        raise CaptureError(
            f"{seen[0]} has a hook on its gradient, which would never run. Scale or clip "
            "gradients after step(), or write the change of a gradient as an operator with "
            "torch.library.custom_op and register_autograd"
        )
