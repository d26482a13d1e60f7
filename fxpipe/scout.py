"""A model's code run ahead of a trace: on tensors without numbers, of known sizes, unrecorded.

    scout(whole, tensors)

Tracing stops at the first value that it lacks, and starts anew. A run like this stops there too,
and takes a tenth of the time, as no size is a symbol.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from fxpipe.concrete import NeedsValuesError
from fxpipe.errors import ReadError, RememberedError
from fxpipe.faithful import nothing_put_away
from fxpipe.readings import LeakError
from fxpipe.remembered import INSTEAD, Places, Scouted, check_forgetful, differing, may_differ
from fxpipe.state import stand_ins
from fxpipe.torch_internals import DataDependentError, quiet_failure
from fxpipe.torch_modes import export_mode, fake_like, run_as_exported
from fxpipe.undone import undone

T = TypeVar("T")
DECISIVE = (NeedsValuesError, DataDependentError, ReadError, LeakError, RememberedError)


def scout(whole: nn.Module, tensors: Sequence[Tensor]) -> Exception | None:
    """Run a module around a `model` without a trace of it. Raises what `DECISIVE` says where a
    trace would stop at a value, or if forward remembers. Whatever else goes wrong is returned: the
    trace will tell, and is then to run as `unscouted`."""
    try:
        if _run(whole, tensors, may_differ):
            _run(whole, tensors, check_forgetful)
    except DECISIVE:
        raise
    except Exception as error:
        return error
    return None


@contextmanager
def unscouted(model: nn.Module, failure: Exception | None) -> Iterator[None]:
    """A run that is traced. Raises RememberedError if it leaves anything behind, where the run
    ahead of it, which tells whether the next microbatch reads that, has failed."""
    places = None if failure is None else Places(model)
    before = places.taken() if places else {}
    yield
    moved = differing(before, places.taken()) if places else []
    if moved:
        raise RememberedError(
            f"{moved[0]} is set by forward, and whether the next microbatch reads it cannot be "
            f"told, as a run without numbers fails: {type(failure).__name__}: {failure}. {INSTEAD}"
        )


def _run(whole: nn.Module, tensors: Sequence[Tensor], check: Callable[[Scouted], T]) -> T:
    """What a check says of a module around a `model`, which is as before afterwards."""
    model, mode = whole.get_submodule("model"), export_mode()
    state = stand_ins(whole, partial(fake_like, mode))
    with quiet_failure(), undone(model), nothing_put_away(model), run_as_exported(mode):
        return check(
            Scouted(
                model,
                state,
                lambda: tuple(fake_like(mode, tensor) for tensor in tensors),
                lambda fakes: torch.func.functional_call(whole, state, fakes, tie_weights=False),
            )
        )
