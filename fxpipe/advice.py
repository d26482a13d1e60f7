"""Why a model could not be traced: where tracing stopped, and what to change there."""

import traceback
from textwrap import shorten

from torch import nn

from fxpipe.concrete import NeedsValuesError
from fxpipe.frames import is_torch_code
from fxpipe.torch_internals import DataDependentError

DERIVATIVES = (
    "A derivative that forward itself takes (torch.func.grad, torch.func.vjp, torch.autograd.grad) "
    "cannot be part of a graph: write it as operators, or put it into the forward of a custom "
    "autograd.Function; torch.func.jvp and vmap are followed"
)
# How torch fails where a transform hides a tensor from the trace.
_OF_DERIVATIVES = ("functorch tensor", "has no attribute 'constant'", "program constant's list")


def explained(model: nn.Module, error: Exception) -> str:
    """Where in the model tracing stopped, and what to change."""
    names = {id(module): name for name, module in model.named_modules()}
    where = "the model"
    for frame, line in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if id(owner) in names and (where == "the model" or not is_torch_code(frame.f_code)):
            module = names[id(owner)] or "(the model itself)"
            where = f"module {module} ({type(owner).__name__}), {frame.f_code.co_filename}:{line}"
    if isinstance(error, NeedsValuesError):
        where += f", reading a value at {error.line}"
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    cause = shorten(str(error).split("(unhinted:")[0], 300, placeholder=" ...").rstrip(". ")
    return f"cannot trace {where}: {type(error).__name__}: {cause}. {_advice(model, error)}"


def _advice(model: nn.Module, error: Exception) -> str:
    """What to change, as far as the kind of the failure says it."""
    reads = (
        "Python control flow on tensor values (if x.sum() > 0, .item(), .tolist(), loops over "
        "tensors) can be part of a graph only where the values come from integer inputs alone: use "
        "torch.where or tensor operations there, or move it out of forward"
    )
    if isinstance(error, (DataDependentError, NeedsValuesError)):
        return reads
    found = str(error)
    if any(words in found for words in _OF_DERIVATIVES):
        return DERIVATIVES
    if "igher order operator" in found:
        return (
            "torch.cond, torch.while_loop and their like cannot be part of a graph here: compute "
            "both results and choose with torch.where, unroll the loop, or decide outside of "
            "forward and pass a plain argument"
        )
    kinds = sorted({str(p.dtype) for p in model.parameters()})
    if "dtype" in found:
        return (
            f"The model's parameters are of {' and '.join(kinds)}: give it float inputs of that "
            "dtype, or convert the model with model.to(dtype)"
        )
    return f"See first that the model alone runs on this microbatch. If it does: {reads}"
