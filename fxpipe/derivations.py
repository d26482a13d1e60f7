"""How a run of forward has come to its results: which operators, on what.

    derivations = Derivations(state); derivations.of(run, inputs) -> a number for each result

Two runs whose numbers are equal have computed alike, wherever a value of theirs was made: also one
that the first has kept and the second reads.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxpipe.frames import calling_line
from fxpipe.torch_internals import is_fake
from fxpipe.trees import SIMPLE, take_apart

# Operators whose result has of their later arguments the kind alone, or of all.
_OF_FIRST = ("to", "type_as", "expand_as", "view_as", "reshape_as")
_OF_NONE = ("_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
_CHANCE = ("rand", "normal", "bernoulli", "multinomial", "uniform", "dropout", "exponential_")


class Derivations(TorchFunctionMode):
    """Notes how each tensor was made, and whether it depends on the inputs, on the parameters or on
    chance. (Not on sizes: a mask or a table of positions is the same whoever makes it.) parting:
    the line at which a run first did other than the one before."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._state = state
        self._made: dict[int, tuple[Tensor, int, bool]] = {}
        self._steps: list[int] = []
        self._before: list[int] | None = None
        self.parting: str | None = None

    def of(self, run: Callable[[tuple[Tensor, ...]], object], inputs: tuple[Tensor, ...]) -> object:
        """How a run comes to what it returns, and to what the state becomes."""
        for name, tensor in self._state.items():
            self._made[id(tensor)] = tensor, hash(name), tensor.requires_grad
        for number, tensor in enumerate(inputs):
            self._made[id(tensor)] = tensor, number, True
        self._before, self._steps = self._steps or None, []
        with self:
            made = run(inputs)
        return [self._how(value) for value in (*take_apart(made)[0], *self._state.values())]

    def depends(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on anything; one that came from nowhere seen may."""
        known = self._made.get(id(tensor))
        return is_fake(tensor) if known is None else known[2]

    def _step(self, how: int) -> None:
        """Note an operator, and the line of the first one that differs from the run before."""
        number = len(self._steps)
        self._steps.append(how)
        if self._before and self.parting is None and self._before[number : number + 1] != [how]:
            self.parting = calling_line()

    def _how(self, value: object) -> object:
        """What is known of an argument."""
        if isinstance(value, Tensor):
            known = self._made.get(id(value))
            return (value.dtype, value.dim()) if known is None else known[1]
        return repr(value) if isinstance(value, SIMPLE) else type(value).__name__

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        given = take_apart((args, kwargs))[0]
        how = hash((name, *map(self._how, given)))
        self._step(how)
        read = args[:1] if name in _OF_FIRST else given
        depends = any(word in name for word in _CHANCE) or (
            not name.endswith(_OF_NONE)
            and any(isinstance(v, Tensor) and self.depends(v) for v in read)
        )
        made = func(*args, **(kwargs or {}))
        written = args[:1] if name == "__setitem__" else ()
        for number, value in enumerate(take_apart((made, written))[0]):
            if isinstance(value, Tensor):
                self._made[id(value)] = value, hash((how, number)), depends
        return made
