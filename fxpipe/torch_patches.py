"""What of torch is replaced while a model is traced, since export records less than it does."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from fxpipe.errors import CaptureError
from fxpipe.frames import calling_line, is_model_code, is_torch_code
from fxpipe.messages import in_message
from fxpipe.packed import memory_order
from fxpipe.torch_autograd import operators_alone
from fxpipe.torch_internals import is_fake
from fxpipe.torch_modes import untraced, without_function_modes

SEEDED = (
    "A graph draws from torch's default generator, in eager's order, and cannot seed it: seed "
    "before the step, or for each microbatch with step(seeds=...), or draw outside of the model "
    "and pass the numbers as an argument"
)
_SEEDING = ("manual_seed", "seed")
_OTHER = 0x5EED_F0F0_1234_5678  # a seed that nobody else takes


@contextmanager
def recorded() -> Iterator[None]:
    """A model's code as it is to be run by any trace."""
    calls = checkpoints_as_calls(), operators_alone(), batch_norms_as_run()
    with inference_as_no_grad(), data_as_detach(), sizes_as_text(), calls[0], calls[1], calls[2]:
        yield


@contextmanager
def sizes_as_text() -> Iterator[None]:
    """Inside, where a model's code writes a size down (`f"{x.shape[1]}"`), it gets the number, for
    which the trace then holds; torch's text of it is a symbol, the same for all numbers, and good
    enough for a message."""
    numbers: dict[Any, Callable[[Any], Any]] = {torch.SymInt: int, torch.SymFloat: float}
    before = {kind: kind.__repr__ for kind in numbers}

    def text(self: Any) -> str:
        frame = sys._getframe(1)
        if is_model_code(frame.f_code) and not in_message(frame):
            return repr(numbers[type(self)](self))
        return str(before[type(self)](self))

    for kind in numbers:
        kind.__repr__ = text
    try:
        yield
    finally:
        for kind, original in before.items():
            kind.__repr__ = original


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """Inside, `torch.inference_mode` is `torch.no_grad`: export records only the latter."""
    mode: Any = torch.inference_mode
    enter, leave = mode.__enter__, mode.__exit__

    def entering(self: Any) -> None:
        self._instead = torch.no_grad() if self.mode else nullcontext()
        self._instead.__enter__()

    mode.__enter__ = entering
    mode.__exit__ = lambda self, *error: self._instead.__exit__(*error)
    try:
        yield
    finally:
        mode.__enter__, mode.__exit__ = enter, leave


@contextmanager
def data_as_detach() -> Iterator[None]:
    """Inside, `tensor.data` of a traced tensor is `tensor.detach()`, and to set it is to write into
    the tensor: export loses both."""
    original: Any = torch._C.TensorBase.data

    def get(tensor: Tensor) -> Any:
        return tensor.detach() if is_fake(tensor) else original.__get__(tensor)

    def put(tensor: Tensor, value: Tensor) -> None:
        if not is_fake(tensor):
            original.__set__(tensor, value)
            return
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise CaptureError(
                f"{calling_line()} sets .data of a tensor of {tensor.dtype}, shape "
                f"{tuple(tensor.shape)}, to {value.dtype}, shape {tuple(value.shape)}: a graph can "
                "only write numbers into a tensor. Make a new tensor instead"
            )
        with torch.no_grad():
            tensor.copy_(value)

    Tensor.data = property(get, put)  # type: ignore[assignment]
    try:
        yield
    finally:
        del Tensor.data


@contextmanager
def batch_norms_as_run() -> Iterator[None]:
    """Inside, what a batch norm on a CPU makes lies in memory as its kernel has it, packed or with
    the channels last. Traces say that it lies as its input does, and random numbers for it, or for
    what is made of it, would go to other places than in eager."""
    original = torch.batch_norm

    def call(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = original(input, *args, **kwargs)
        if input.device.type != "cpu" or not is_fake(made):
            return made
        plain = tuple(range(input.dim()))
        last = (0, *plain[2:], 1) if input.dim() in (4, 5) else plain
        if memory_order(input) in (plain, last):
            return made
        with without_function_modes():
            return made.contiguous()

    torch.batch_norm = call
    try:
        yield
    finally:
        torch.batch_norm = original


@contextmanager
def checkpoints_as_calls() -> Iterator[None]:
    """Inside, a reentrant checkpoint is a call of its function: what it keeps is decided later. As
    there, without an input that has a gradient nothing in it has one."""

    def call(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        wanted = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        with torch.set_grad_enabled(wanted and torch.is_grad_enabled()):
            return function(*args)

    owner: Any = CheckpointFunction
    before = vars(owner).get("apply")
    owner.apply = staticmethod(call)
    try:
        yield
    finally:
        if before is None:
            del owner.apply
        else:
            owner.apply = before


class _Unseeded:
    """torch's generator, to be read and not to be set."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        return _refuse_seeding if name in _SEEDING else getattr(self._generator, name)

    def set_state(self, state: Tensor) -> None:
        """Put it into the state that it has, as torch's own compiler does. (Where the state is
        forked, what is drawn there would count outside as well.)"""
        with untraced():
            same = torch.equal(state, self._generator.get_state())
        if not same or any(c.co_name == "fork_rng" and is_torch_code(c) for c in _running()):
            _refuse_seeding()


@contextmanager
def no_seeding() -> Iterator[None]:
    """Inside, calls that seed torch's generator, or set its state, raise CaptureError."""
    functions: Any = torch.random
    generator = functions.default_generator
    functions.default_generator = _Unseeded(generator)
    try:
        yield
    finally:
        functions.default_generator = generator


@contextmanager
def no_state_set() -> Iterator[None]:
    """Raises CaptureError where code that is traced, and so draws nothing, has set the generator's
    state by whatever means. Outside it is where it was."""
    before = torch.get_rng_state()
    ours = torch.manual_seed(_OTHER).get_state()
    try:
        with no_seeding():
            yield
        moved = not torch.equal(torch.get_rng_state(), ours)
    finally:
        torch.set_rng_state(before)
    if moved:
        _refuse_seeding()


def _running() -> Iterator[CodeType]:
    return (frame.f_code for frame, _ in traceback.walk_stack(None))


def _refuse_seeding(*args: object, **kwargs: object) -> Any:
    raise CaptureError(f"{calling_line()} seeds torch's generator or sets its state. {SEEDED}")
