"""Random numbers in eager's order, wherever and whenever an operator runs.

Eager draws from one generator: microbatch after microbatch, operator after operator. In a graph,
each operator that draws is given the state in which eager would find the generator (`seeded`).
Every rank finds these states by drawing the numbers of the whole model in that order (`Stream`);
it needs shapes for that, and no data.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.python_chance import PYTHON, python_state, set_python_state
from fxpipe.torch_internals import unbacked_in

DEF: Any = torch.library.Library("fxpipe", "FRAGMENT")  # type: ignore[no-untyped-call]
Size = Callable[[sympy.Expr], int]


@dataclass(frozen=True)
class Blank:
    """A tensor of which only the shape counts: contiguous once its dimensions stand in `order`."""

    shape: tuple[sympy.Expr, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    device: str

    def make(self, size: Size, device: torch.device) -> Tensor:
        """Such a tensor, of values that any operator may take."""
        shape = [size(self.shape[dim]) for dim in self.order]
        return torch.full(shape, 0.5, device=device).to(self.dtype).permute(inverse(self.order))


@dataclass(frozen=True)
class Draw:
    """An operator that draws, and what it is called with: blanks, sizes, and plain values.

    placeholder: where the graph takes the state; apart: how much it draws depends on data, so it
    has a generator of its own, for whose seed it draws one number. On the device PYTHON, target is
    called with the tensors of the microbatch, and draws as the model's code does. Without a target
    nothing is drawn: the state is for code whose operators come next. followed: code that draws
    alone with this state, and notes where it has left the generator.
    """

    placeholder: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: str
    apart: bool = False
    followed: bool = False


_ENDS: Any = WeakTensorKeyDictionary()  # state -> that in which what drew from it has ended


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes another one."""
    return [list(order).index(dim) for dim in range(len(order))]


def placed(
    draws: Sequence[Draw], holders: Sequence[str], known: Set[sympy.Symbol]
) -> tuple[Draw, ...]:
    """The same operators at the placeholders of a finished graph.

    known: the sizes that depend on data, and that every rank finds before a step. An operator with
    another one is drawn apart.
    """
    return tuple(
        replace(draw, placeholder=holder, apart=draw.apart or not _unknown(draw) <= known)
        for draw, holder in zip(draws, holders, strict=True)
    )


def _unknown(draw: Draw) -> set[sympy.Symbol]:
    """The sizes of what an operator takes that no shape of the microbatch tells."""
    found: set[sympy.Symbol] = set()

    def visit(value: Any) -> Any:
        sizes = value.shape if isinstance(value, Blank) else [value]
        found.update(*(unbacked_in(size) for size in sizes if isinstance(size, sympy.Expr)))
        return value

    fx.node.map_aggregate((draw.args, dict(draw.kwargs)), visit)
    return found


def seeded(target: Any) -> Any:
    """`fxpipe::NAME(state, ...)`: an operator, drawing from a generator in the state given."""
    name = f"{target.overloadpacket.__name__}_{target._overloadname}"
    if name not in _defined():
        _defined()[name] = None
        schema = str(target._schema).partition("(")[2]
        tags = (torch.Tag.nondeterministic_seeded,)
        DEF.define(f"{name}(Tensor state, {schema}", tags=tags)
        DEF.impl(name, partial(_run, target), "CompositeExplicitAutograd")
        torch.library.register_fake(f"fxpipe::{name}", partial(_run_fake, target), lib=DEF)
    return getattr(torch.ops.fxpipe, name).default


@cache
def _defined() -> dict[str, None]:
    return {}


def _run(target: Any, state: Tensor, *args: Any, **kwargs: Any) -> Any:
    tensors = [arg.device for arg in args if isinstance(arg, Tensor)]
    device = tensors[0] if tensors else torch.device(kwargs.get("device") or "cpu")
    with drawing_from(state, device):
        return target(*args, **kwargs)


def _run_fake(target: Any, state: Tensor, *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)


@contextmanager
def drawing_from(state: Tensor, device: torch.device) -> Iterator[None]:
    """The device's generator is in this state inside, and in its own again after."""
    before = state_of(device)
    set_state(state, device)
    try:
        yield
    finally:
        _ENDS[state] = state_of(device)
        set_state(before, device)


def state_of(device: torch.device | None) -> Tensor:
    """The state of a device's generator; of Python's where there is no device."""
    if device is None:
        return python_state()
    if device.type == "cpu":
        return torch.get_rng_state()
    found: Tensor = torch.get_device_module(device).get_rng_state(device)
    return found


def set_state(state: Tensor, device: torch.device | None) -> None:
    """Put a device's generator into a state; Python's where there is no device."""
    if device is None:
        set_python_state(state)
    elif device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@dataclass(frozen=True)
class Walk:
    """What one microbatch draws. kept: the placeholders that stages of this process have; tensors:
    those of the microbatch."""

    draws: Sequence[Draw]
    size: Size
    kept: Set[str]
    tensors: Sequence[Tensor] = ()


@dataclass
class Stream:
    """Eager's stream of random numbers in a step, walked as far as somebody asks.

    walks: by microbatch, in eager's order; device: what stands for the devices of the trace
    seeds: with what eager would seed before each microbatch; alone: all is drawn in this process,
    one after the other, so that what draws as much as its data says may draw from the stream
    """

    walks: Sequence[Walk]
    device: torch.device
    seeds: Sequence[int] | None = None
    alone: bool = False
    _now: dict[str, Tensor] = field(default_factory=dict)
    _states: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    _done: int = 0
    _at: int = 0  # how many draws of the next microbatch are done
    _open: Tensor | None = None  # the state in which one of them begins, which is being drawn

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of devices on which anything is drawn, or seeded."""
        seeded = {"cpu", self.device.type} if self.seeds is not None else set()
        return tuple(sorted(seeded.union(*({d.device for d in walk.draws} for walk in self.walks))))

    def start(self, agree: Callable[[Tensor], Tensor]) -> None:
        """Begin where the generators of the first rank are; `agree` tells what it has."""
        here = {kind: s for kind, s in self.here().items() if self.seeds is None or kind == PYTHON}
        if here:
            found = agree(torch.cat(list(map(_bytes, here.values()))))
            parts = torch.split(found, [len(_bytes(state)) for state in here.values()])
            states = (p.view(s.dtype) for p, s in zip(parts, here.values(), strict=True))
            self._now = dict(zip(here, states, strict=True)) if not self._now else self._now

    def here(self) -> dict[str, Tensor]:
        """The states that the generators of this process have."""
        return {kind: state_of(self._on(kind)) for kind in self.kinds}

    def state(self, mb: int, placeholder: str) -> Tensor:
        """The state in which eager would find the generator at this point of a microbatch."""
        while self._done <= mb and (mb, placeholder) not in self._states:
            self._walk(self._done)
        return self._states[mb, placeholder]

    def finish(self) -> None:
        """Leave the generators where eager would."""
        if not self.kinds:
            return
        while self._done < len(self.walks):
            self._walk(self._done)
        for kind, state in self._now.items():
            set_state(state, self._on(kind))

    def _on(self, kind: str) -> torch.device | None:
        if kind == PYTHON:
            return None
        return self.device if kind == self.device.type else torch.device(kind)

    def _walk(self, mb: int) -> None:
        """Go on in a microbatch: to its end, or to where only what is drawn tells how to go on."""
        walk = self.walks[mb]
        if self.seeds is not None and not self._at:
            devices = [(kind, self._on(kind)) for kind in self.kinds]
            self._now.update((k, _seeded_state(self.seeds[mb], d)) for k, d in devices if d)
        before = self.here()
        try:
            for kind, state in self._now.items():
                set_state(state, self._on(kind))
            while self._at < len(walk.draws):
                if not self._step(mb, walk.draws[self._at], walk):
                    break
                self._at += 1
            else:
                self._done, self._at = mb + 1, 0
            self._now = self.here()
        finally:
            for kind, state in before.items():
                set_state(state, self._on(kind))

    def _step(self, mb: int, draw: Draw, walk: Walk) -> bool:
        """Do one draw, and say whether to go on: code that is followed has the stream itself, and
        must have drawn first. Where somebody asks before it has, both have streams of their own."""
        device = self._on(draw.device)
        if not (self.alone and draw.followed) or device is None:
            self._draw(mb, draw, walk)
        elif self._open is None:
            self._open = self._states[mb, draw.placeholder] = state_of(device)
            return False
        else:
            end, self._open = _ENDS.get(self._open), None
            if end is None:
                seed = int(torch.randint(2**62, (), device=device))
                end = _seeded_state(seed, device)
            set_state(end, device)
        return True

    def _draw(self, mb: int, draw: Draw, walk: Walk) -> None:
        device, key = self._on(draw.device), (mb, draw.placeholder)
        if draw.apart and device is not None:
            seed = int(torch.randint(2**62, (), device=device))
            self._states[key] = _seeded_state(seed, device)
            return
        if draw.placeholder in walk.kept:
            self._states[key] = state_of(device)
        if device is None:
            draw.target(walk.tensors)
        if device is None or draw.target is None:
            return

        def made(value: Any) -> Any:
            if isinstance(value, Blank):
                return value.make(walk.size, self._on(value.device) or self.device)
            return walk.size(value) if isinstance(value, sympy.Expr) else value

        args, kwargs = fx.node.map_aggregate((draw.args, dict(draw.kwargs)), made)
        here = {"device": device} if "device" in kwargs else {}
        draw.target(*args, **{**kwargs, **here})


def _bytes(state: Tensor) -> Tensor:
    return state.view(torch.uint8)


def _seeded_state(seed: int, device: torch.device) -> Tensor:
    return torch.Generator(device).manual_seed(seed).get_state()
