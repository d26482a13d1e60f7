"""A model's code run ahead of a trace: on tensors without numbers, of known sizes, unrecorded.

    scout(whole, tensors)

Tracing stops at the first value that it lacks, and starts anew. A run like this stops there too,
and takes a tenth of the time, as no size is a symbol.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from fxpipe.concrete import NeedsValuesError
from fxpipe.errors import ReadError, RememberedError
from fxpipe.faithful import nothing_put_away
from fxpipe.readings import LeakError
from fxpipe.remembered import Scouted, check_forgetful, leaves_anything
from fxpipe.state import named_state
from fxpipe.torch_internals import DataDependentError, quiet_failure
from fxpipe.torch_modes import export_mode, fake_like, run_as_exported
from fxpipe.undone import undone

T = TypeVar("T")
DECISIVE = (NeedsValuesError, DataDependentError, ReadError, LeakError, RememberedError)


def scout(whole: nn.Module, tensors: Sequence[Tensor]) -> None:
    """Run a module around a `model` without a trace of it. Raises what `DECISIVE` says where a
    trace would stop at a value, or if forward remembers; whatever else goes wrong, the trace will
    tell."""
    try:
        if _run(whole, tensors, leaves_anything):
            _run(whole, tensors, check_forgetful)
    except DECISIVE:
        raise
    except Exception:
        return


def _run(whole: nn.Module, tensors: Sequence[Tensor], check: Callable[[Scouted], T]) -> T:
    """What a check says of a module around a `model`, which is as before afterwards."""
    model, mode = whole.get_submodule("model"), export_mode()
    state = {name: fake_like(mode, tensor) for name, tensor in named_state(whole)}
    with quiet_failure(), undone(model), nothing_put_away(model), run_as_exported(mode):
        return check(
            Scouted(
                model,
                state,
                lambda: tuple(fake_like(mode, tensor) for tensor in tensors),
                lambda fakes: torch.func.functional_call(whole, state, fakes),
            )
        )
