"""What a model does before the call of one of its modules: run alone, and taken out of a trace.

    run_until(model, "decoder", args, kwargs)   -> what `decoder` would have been called with
    Suffix(model, ...)                          the rest, as a function of those tensors

The prefix may read any value in Python; it is never traced. The suffix takes what the prefix has
made through the arguments of the boundary alone: whatever else would cross is found, and refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxpipe.errors import CaptureError
from fxpipe.faithful import DRAWN, refuse_unseeded
from fxpipe.frames import calling_frames, calling_line
from fxpipe.inputs import rebuild
from fxpipe.libraries import as_exported, libraries_as_untraced
from fxpipe.packed import LayoutReads
from fxpipe.python_chance import python_has_drawn, python_left_alone, python_words
from fxpipe.readings import LeakError, Read
from fxpipe.replaced import same_parameters, write_back
from fxpipe.scout import unscouted
from fxpipe.torch_autograd import Toggles
from fxpipe.torch_internals import is_fake
from fxpipe.torch_modes import without_function_modes, without_tracing
from fxpipe.torch_patches import checkpoints_as_calls, no_seeding, recorded
from fxpipe.trees import map_leaves, take_apart
from fxpipe.unseeded import noting_unseeded
from fxpipe.wanted import Reader

_CHOICES = (Tensor.__bool__, Tensor.__float__, Tensor.item)
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Reached(NamedTuple):
    """What a boundary is called with; the flags and floats that code has read which is still
    running, and may decide by them what it does next; and whether any flag was read."""

    call: Call
    choices: tuple[object, ...]
    flags: bool


class _ReachedError(BaseException):
    """The boundary is called; no handler of the model's own may catch this."""

    def __init__(self, found: Reached) -> None:
        super().__init__()
        self.found = found


class _Choices(TorchFunctionMode):
    """Notes flags and floats that Python reads, with the frame of the code that does."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[FrameType, object]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, (bool, float)) and func in _CHOICES:
            self.found.append((calling_frames()[0], made))
        return made

    def open(self) -> tuple[object, ...]:
        """What was read by code that has not returned."""
        running = {id(frame) for frame in calling_frames()}
        return tuple(value for frame, value in self.found if id(frame) in running)


def run_until(
    model: nn.Module,
    boundary: str,
    args: Any,
    kwargs: Any,
    state: Mapping[str, Tensor] | None = None,
) -> Reached:
    """The arguments of the first call of a module. The model sees that it is exported, as it does
    in the trace of what follows, and a reentrant checkpoint, whose backward pays for all, is a call
    of its function. state: `stand_ins` for parameters and buffers."""

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        flags = any(isinstance(value, bool) for _, value in choices.found)
        raise _ReachedError(Reached((args, kwargs), choices.open(), flags))

    choices = _Choices()
    hook = model.get_submodule(boundary).register_forward_pre_hook(
        stop, with_kwargs=True, prepend=True
    )
    try:
        with as_exported(), checkpoints_as_calls(), choices:
            torch.func.functional_call(model, dict(state or {}), args, kwargs, tie_weights=False)
    except _ReachedError as reached:
        return reached.found
    finally:
        choices.found.clear()
        hook.remove()
    raise CaptureError(f"module {boundary} is not called for this microbatch, as it was before")


class Suffix(nn.Module):
    """The model from the call of a boundary on, with its loss, to be traced.

    forward(*leaves, *crossing): the tensors of the microbatch, then those tensors among the
    boundary's arguments that are none of them. real: the microbatch's tensors with their values.
    hooks: those on gradients, as they are noted; those of the prefix will run.
    """

    def __init__(
        self,
        model: nn.Module,
        boundary: str,
        rebuilt: tuple[Any, tuple[tuple[str, object], ...]],
        reader: Reader,
        real: Sequence[Tensor],
        hooks: list[str],
    ) -> None:
        super().__init__()
        self.model = model
        self.hooks = hooks
        self.unseen: Exception | None = None
        self.training = model.training
        self.boundary = boundary
        self.rebuild = rebuilt
        self.reader = reader
        self.leaves = list(real)
        self.state = _state(model)
        self.layout, self.toggles = LayoutReads(), Toggles()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The loss, and what else is wanted. Raises LeakError where more would cross."""
        count = len(self.leaves)
        border = _Border(self, tensors[:count], tensors[count:])
        args, kwargs = rebuild(self.leaves, *self.rebuild)
        buffers = dict(self.model.named_buffers())
        hook = self.model.get_submodule(self.boundary).register_forward_pre_hook(
            border.cross, with_kwargs=True, prepend=True
        )
        modes = border, libraries_as_untraced(), recorded(), self.layout, self.toggles
        quiet = python_left_alone(), no_seeding(), same_parameters(self.model)
        kept = unscouted(self.model, self.unseen)
        self.toggles.begin(self.model.parameters())
        with ExitStack() as stack:
            for context in (*quiet, *modes, kept):
                stack.enter_context(context)
            border.unseeded = stack.enter_context(noting_unseeded())
            try:
                border.start()
                values = self.reader(self.model(*args, **kwargs))
                if border.crossed and python_has_drawn(border.chance):
                    raise CaptureError(DRAWN)
                refuse_unseeded(border.unseeded)
            finally:
                border.prefix.close()
                hook.remove()
        if not border.crossed:
            raise CaptureError(f"module {self.boundary} is not called")
        write_back(self.model, buffers)
        return values


class _Border(TorchFunctionMode):
    """Calls run for real until the boundary is reached, and are traced from then on."""

    def __init__(
        self, suffix: Suffix, traced: Sequence[Tensor], crossing: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self.prefix = ExitStack()
        self.crossed = False
        self.chance = python_words()
        self.unseeded: list[str] = []
        self._suffix = suffix
        self._crossing = crossing
        # Real tensor -> its stand-in, or None for one that the prefix has made for itself.
        self._known: dict[int, tuple[Tensor, Tensor | None]] = {
            id(real): (real, stand) for real, stand in zip(suffix.leaves, traced, strict=True)
        }
        modules = suffix.model.modules()
        constants = [v for m in modules for v in vars(m).values() if isinstance(v, Tensor)]
        self._known.update((id(value), (value, value)) for value in constants)
        for (module, kind, name), real in suffix.state.items():
            self._known[id(real)] = real, getattr(module, kind)[name]

    def start(self) -> None:
        """From here on for real."""
        self.prefix.enter_context(_swapped(self._suffix.state))
        self.prefix.enter_context(without_tracing())
        self.prefix.enter_context(torch.no_grad())

    def cross(self, module: nn.Module, args: Any, kwargs: Any) -> Call | None:
        """The boundary is called: from here on with what is traced."""
        if self.crossed:
            return None
        self.prefix.close()
        self.crossed = True
        self.chance = python_words()
        self.unseeded.clear()
        self._suffix.hooks.clear()
        self._suffix.layout.begin(_state(self._suffix.model).values())
        leaves, tree = take_apart((args, kwargs))
        stands = iter(self._crossing)
        for number, value in enumerate(leaves):
            if isinstance(value, Tensor):
                stand = self._known.get(id(value), (value, None))[1]
                if stand is None or not any(value is leaf for leaf in self._suffix.leaves):
                    stand = next(stands)
                self._known[id(value)] = value, stand
                leaves[number] = stand
            elif isinstance(value, Read):
                leaves[number] = int(value)
        call: Call = tree.together(leaves)
        return call

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """One call of the model's code."""
        kwargs = dict(kwargs or {})
        if self.crossed:
            return func(*map_leaves(self._stand, args), **map_leaves(self._stand, kwargs))
        with without_function_modes():
            made = func(*map_leaves(_plain, args), **map_leaves(_plain, kwargs))
        if isinstance(made, torch.Size):
            return torch.Size([Read(size, self) for size in made])
        return map_leaves(self._noted, made)

    def _noted(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._known.setdefault(id(value), (value, None))
        if type(value) is int and not self.crossed:
            return Read(value, self)
        return value

    def _stand(self, value: Any) -> Any:
        if isinstance(value, Read):
            value.refuse()
        if not isinstance(value, Tensor) or is_fake(value):
            return value
        stand = self._known.get(id(value), (value, None))[1]
        if stand is None:
            raise LeakError(
                f"{calling_line()} reads a tensor of shape {tuple(value.shape)} that was made "
                "before the boundary and is none of its arguments"
            )
        return stand


def _plain(value: Any) -> Any:
    return int.__index__(value) if isinstance(value, Read) else value


def _state(model: nn.Module) -> dict[tuple[nn.Module, str, str], Tensor]:
    """Every parameter and buffer by the place that holds it."""
    return {
        (module, kind, name): tensor
        for module in model.modules()
        for kind in ("_parameters", "_buffers")
        for name, tensor in getattr(module, kind).items()
        if tensor is not None
    }


@contextmanager
def _swapped(state: Mapping[tuple[nn.Module, str, str], Tensor]) -> Iterator[None]:
    """These tensors in their places, whatever stands for them while a model is traced."""
    stands = {place: getattr(place[0], place[1])[place[2]] for place in state}
    for (module, kind, name), tensor in state.items():
        getattr(module, kind)[name] = tensor
    try:
        yield
    finally:
        for (module, kind, name), tensor in stands.items():
            getattr(module, kind)[name] = tensor
