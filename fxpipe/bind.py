"""A microbatch checked against a captured graph, and bound to it: sizes, shapes, tensors.

Every rank has the microbatch, or at least its sizes, and evaluates the shape of whatever it will
receive from them alone: no shape is ever exchanged. Whatever tracing assumed of its example is
checked here, before anything is sent.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch
from torch import Tensor

from fxpipe.capture import Captured
from fxpipe.chance import Draw
from fxpipe.cut import Kind, Seam
from fxpipe.dry import with_own
from fxpipe.errors import BatchError
from fxpipe.inputs import Leaf, Microbatch, flatten
from fxpipe.packed import layout_refusal, memory_order
from fxpipe.solving import broken, misfit, solved
from fxpipe.trees import same_value

if TYPE_CHECKING:
    from fxpipe.joint import StageGraphs
    from fxpipe.lower import Lowered

# How many combinations of data-dependent sizes are remembered for one set of shapes.
LIMIT = 256
Spec = tuple[tuple[int, ...], torch.dtype]


def mismatch(captured: Captured, microbatch: Microbatch) -> str | None:
    """Why a microbatch has not the structure that was captured; None if it has."""
    tensors, fixed, structure = flatten(microbatch)
    if structure != captured.structure:
        found = ", ".join(name for name, _ in [*tensors, *fixed])
        names = [leaf.name for leaf in captured.leaves] + [name for name, _ in captured.fixed]
        expected = ", ".join(names)
        return f"its arguments are ({found}); the example had ({expected})"
    for leaf, (name, tensor) in zip(captured.leaves, tensors, strict=True):
        if tensor.dim() != len(leaf.shape):
            return f"{name} has {tensor.dim()} dimensions; the example had {len(leaf.shape)}"
        if tensor.dtype != leaf.dtype:
            return f"{name} has dtype {tensor.dtype}; the example had {leaf.dtype}"
    return None


def other_float(leaves: Sequence[Leaf], microbatch: Microbatch) -> str | None:
    """A float of a microbatch that has another dtype than in the variants that are known: a mistake
    that tracing does not see, but running does."""
    known = {leaf.name: leaf.dtype for leaf in leaves}
    for name, tensor in flatten(microbatch)[0]:
        had, has = known.get(name, tensor.dtype), tensor.dtype
        if had != has and (had.is_floating_point or has.is_floating_point):
            return f"{name} has dtype {has}; the example had {had}. Convert it before step()"
    return None


def unfit(captured: Captured, microbatch: Microbatch, guards: Sequence[sympy.Basic]) -> str | None:
    """Which assumption of this variant a microbatch of the right structure breaks, if any.

    guards: conditions on the symbols that tracing has assumed.
    """
    tensors, fixed, _ = flatten(microbatch)
    changed = _changed(captured, tensors, fixed) or _lying(captured, tensors)
    if changed:
        return changed
    symbols, sizes = solved(captured, [tensor for _, tensor in tensors])
    return misfit(captured.ranges, symbols, sizes, guards)


def _changed(
    captured: Captured,
    tensors: Sequence[tuple[str, Tensor]],
    fixed: Sequence[tuple[str, object]],
) -> str | None:
    """Which value that tracing has read, of an argument or inside a tensor, is another one."""
    for (name, wanted), (_, value) in zip(captured.fixed, fixed, strict=True):
        if not same_value(value, wanted):
            return f"{name} is {value!r}; this graph was traced with {wanted!r}"
    for name, tensor in tensors:
        if name in captured.values and not torch.equal(tensor, captured.values[name].to(tensor)):
            return f"{name} has other values than this graph was traced with, and Python reads them"
    return None


def _lying(captured: Captured, tensors: Sequence[tuple[str, Tensor]]) -> str | None:
    """Which tensor lies in memory as this graph cannot have it, if any."""
    for leaf, (name, tensor) in zip(captured.leaves, tensors, strict=True):
        if captured.draws and memory_order(tensor) != leaf.order:
            return f"{name} lies in memory in another order, in which random numbers are drawn"
    return layout_refusal(captured.layout, tensors)


def with_data(
    lowered: "Lowered",
    sizes: "Sizes",
    tensors: Sequence[Tensor],
    where: tuple[torch.device, Mapping[str, Tensor]],
    what: str,
) -> "Sizes":
    """The sizes of a microbatch with those that follow from its data, all of them checked.

    where: the device that runs, and the model's tensors by name. Raises BatchError, which begins
    with `what`, if the microbatch breaks what the model asserts or tracing assumed.
    """
    captured, (device, state) = lowered.captured, where
    if not captured.data.symbols or device.type == "meta":  # where nothing runs, nothing is known
        return sizes
    moved = (tensor.to(device) for tensor in tensors)
    holders = {leaf.placeholder: t for leaf, t in zip(captured.leaves, moved, strict=True)}
    needed = captured.data.inputs
    inputs = {n: holders[n] if n in holders else state[captured.state[n]] for n in needed}
    try:
        found = sizes.joined(captured.data.values(inputs, sizes.symbols))
    except BatchError as error:
        raise BatchError(f"{what} breaks what the model's code assumes: {error}") from None
    reason = broken(lowered.parts.guards, found.symbols)
    if reason:
        raise BatchError(f"{what} cannot run: {reason}")
    return found


class Sizes:
    """The symbols of a variant for one set of shapes, and every size that follows from them."""

    def __init__(self, captured: Captured, tensors: Sequence[Tensor]) -> None:
        self.symbols: Mapping[sympy.Symbol, sympy.Integer] = solved(captured, tensors)[0]
        self._with: dict[tuple[sympy.Integer, ...], Sizes] = {}
        self._known: dict[sympy.Expr, int] = {}
        self._specs: dict[tuple[str, str, Kind], tuple[Spec, ...]] = {}
        self._stats: dict[str, tuple[tuple[str, Spec], ...]] = {}

    def joined(self, data: Mapping[sympy.Symbol, sympy.Integer]) -> "Sizes":
        """These sizes and those that depend on a microbatch's data."""
        key = tuple(data.values())
        if key not in self._with:
            if len(self._with) == LIMIT:
                self._with.clear()
            found = self._with[key] = copy(self)
            found.symbols = {**self.symbols, **data}
            found._known, found._specs, found._stats = {}, {}, {}
        return self._with[key]

    def __call__(self, expr: sympy.Expr) -> int:
        """A size in numbers."""
        found = self._known.get(expr)
        if found is None:
            found = self._known[expr] = int(expr.xreplace(self.symbols))
        return found

    def specs(self, lowered: "Lowered", seam: tuple[str, str], kind: Kind) -> tuple[Spec, ...]:
        """Shapes and dtypes of the values (F) or the gradients (B) that cross a seam; nothing
        crosses one that the variant has not."""
        found = self._specs.get((*seam, kind))
        if found is None:
            crossing = lowered.seam.get(seam, Seam(*seam, (), ()))
            names = crossing.values if kind is Kind.F else crossing.grads
            values = [lowered.stages.values[name] for name in names]
            found = tuple((tuple(map(self, value.shape)), value.dtype) for value in values)
            self._specs[(*seam, kind)] = found
        return found

    def stats(self, lowered: "Lowered", stage: str) -> tuple[tuple[str, Spec], ...]:
        """Names, shapes and dtypes of what a stage makes for updates of buffers."""
        found = self._stats.get(stage)
        if found is None:
            made = lowered.stages.stages.get(stage)
            named = [(name, lowered.stages.values[name]) for name in (made.stats if made else ())]
            found = tuple((name, (tuple(map(self, v.shape)), v.dtype)) for name, v in named)
            self._stats[stage] = found
        return found


class Fit(NamedTuple):
    """A microbatch's variant, the sizes that follow from its shapes, and its tensors."""

    number: int
    sizes: Sizes
    tensors: list[Tensor]


class Bound:
    """One microbatch of a step, bound to the variant of the program that it runs.

    index: its number in the step; variant: the number of `lowered`; weight: 0-dim tensor on the
    device that runs, the factor of its loss.
    """

    def __init__(
        self,
        index: int,
        variant: int,
        lowered: "Lowered",
        sizes: Sizes,
        tensors: Sequence[Tensor],
        weight: Tensor,
    ) -> None:
        self.index = index
        self.variant = variant
        self.weight = weight.to(lowered.captured.loss_dtype)
        self.captured = lowered.captured
        self.size = sizes
        self.updates = self.captured.updates
        # The state of the generator for an operator that draws; whoever runs the step gives it.
        self.chance: Callable[[str], Tensor] | None = None
        self._lowered = lowered
        self._feeds: dict[str, tuple[Tensor | int, ...]] = {}
        leaves = lowered.captured.leaves
        self._tensors = {leaf.placeholder: t for leaf, t in zip(leaves, tensors, strict=True)}

    def feed(self, graphs: "StageGraphs") -> tuple[Tensor | int, ...]:
        """What a stage reads of the microbatch: tensors on its device, then sizes."""
        found = self._feeds.get(graphs.stage)
        if found is None:
            tensors = (self._field(name, packed=not graphs.opaque) for name in graphs.fields)
            found = self._feeds[graphs.stage] = (*tensors, *map(self.size, graphs.sizes))
        return found

    def _field(self, placeholder: str, *, packed: bool) -> Tensor:
        if placeholder not in self._tensors and self.chance is not None:
            return self.chance(placeholder)
        tensor = self._tensors[placeholder].to(self.weight.device, non_blocking=True)
        self._tensors[placeholder] = tensor
        return tensor.contiguous() if packed else tensor

    @property
    def returns(self) -> bool:
        """Whether it gives more than a loss."""
        return self.captured.returned.count > 0

    @property
    def wants(self) -> bool:
        """Whether anything beside the loss is wanted of it, if only None or a number."""
        return self.captured.returned.tree is not None

    def output(self, tensors: Sequence[Tensor]) -> Any:
        """What was wanted of the model's output, with these tensors in it."""
        return self.captured.returned.output(tensors, self.size)

    def spec(self, source: str, target: str, kind: Kind) -> tuple[Spec, ...]:
        """Shapes and dtypes of what crosses a seam: its values (F) or its gradients (B)."""
        return self.size.specs(self._lowered, (source, target), kind)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the microbatch."""
        return list(self._tensors.values())

    @property
    def draws(self) -> Sequence[Draw]:
        """The operators of the model that draw random numbers, in eager's order."""
        return with_own(self.captured.prefix, self.captured.draws, self.tensors)

    def fields(self, stages: Collection[str]) -> frozenset[str]:
        """Placeholders of what these stages read of the microbatch."""
        graphs = self._lowered.graphs
        return frozenset(name for s in stages if s in graphs for name in graphs[s].fields)

    def runs(self, stage: str) -> bool:
        """Whether its variant has a stage."""
        return stage in self._lowered.graphs

    @property
    def reads(self) -> frozenset[str]:
        """The parameters, buffers and constants that any stage reads."""
        return self._lowered.reads

    def stats(self, stage: str) -> tuple[tuple[str, Spec], ...]:
        """What a stage makes for updates of buffers: name, shape and dtype of each."""
        return self.size.stats(self._lowered, stage)
