"""Costs from the stages' graphs: what each operator computes and moves, without running it.

    roofline(lowered)          -> Roofline   expressions of the symbols of a microbatch's sizes
    costs_of(steps, device)    -> Costs      numbers, one for each microbatch where they differ

An operator takes max(flops / peak, bytes / bandwidth) seconds (Mpipe, arXiv 2607.03229, section
4.3), alone: nothing is fused, a view takes none. Ops of a stage run one after the other.
"""

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import sympy
from torch import Tensor, fx

from fxpipe.costs import Amount, Costs
from fxpipe.cut import Kind
from fxpipe.dataflow import (
    UNKNOWN_SIZE,
    arguments,
    aten,
    flops,
    function,
    is_view,
    storages,
    tensors_of,
)
from fxpipe.device import Device
from fxpipe.inputs import Microbatch, flatten
from fxpipe.lower import Lowered
from fxpipe.solving import Symbols, solve
from fxpipe.split import Value
from fxpipe.torch_internals import expression

Exprs = Mapping[tuple[str, Kind], sympy.Expr]
_LOOKUPS = {
    aten.embedding.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_select.default,
}


class Effort(NamedTuple):
    """The floating-point operations of one operator, and the bytes that it reads and writes."""

    name: str
    flops: sympy.Expr
    bytes: sympy.Expr


@dataclass(frozen=True)
class Roofline:
    """What the stages of one variant take, as expressions of its symbols.

    efforts: the operators of each F, B and W. In bytes, as in `Costs`: sent by F and B to one rank
    (the most that any reader gets), kept by F and B, received by F; weights and trained: what a
    stage holds, and what of it gets a gradient.
    """

    efforts: Mapping[tuple[str, Kind], tuple[Effort, ...]]
    sent: Exprs
    kept: Exprs
    received: Mapping[str, sympy.Expr]
    weights: Mapping[str, sympy.Expr]
    trained: Mapping[str, sympy.Expr]

    @cached_property
    def flops(self) -> Exprs:
        """Floating-point operations of each F, B and W."""
        return {key: sympy.Add(*(x.flops for x in found)) for key, found in self.efforts.items()}

    def seconds(self, stage: str, kind: Kind, device: Device) -> sympy.Expr:
        """Seconds of one op, in closed form: a sum of Max(flops / peak, bytes / bandwidth)."""
        return sympy.Add(
            *(
                count * sympy.Max(work / device.peak_flops, moved / device.bandwidth)
                for (work, moved), count in self.kinds[stage, kind].items()
            )
        )

    @cached_property
    def kinds(self) -> Mapping[tuple[str, Kind], Counter[tuple[sympy.Expr, sympy.Expr]]]:
        """How many operators of an F, B or W compute and move the same."""
        return {
            key: Counter((x.flops, x.bytes) for x in found) for key, found in self.efforts.items()
        }


def roofline(lowered: Lowered) -> Roofline:
    """The flops and bytes of every stage of a variant."""
    efforts: dict[tuple[str, Kind], tuple[Effort, ...]] = {}
    kept: dict[tuple[str, Kind], sympy.Expr] = {}
    for name, graphs in lowered.graphs.items():
        parts = {Kind.F: graphs.F, Kind.B: graphs.B, Kind.W: graphs.W}
        efforts |= {(name, kind): _efforts(parts[kind]) for kind in graphs.kinds}
        kept |= {(name, kind): _kept(parts[kind]) for kind in graphs.kinds if kind is not Kind.W}
    forward, back, received = _crossing(lowered)
    sent = {(stage, Kind.F): size for stage, size in forward.items()}
    sent |= {(stage, Kind.B): size for stage, size in back.items()}
    weights, trained = {}, {}
    sizes = _state_sizes(lowered)
    for name, graphs in lowered.graphs.items():
        weights[name] = sympy.Add(*(sizes[x] for x in dict.fromkeys(graphs.state)))
        trained[name] = sympy.Add(*(sizes[x] for x in graphs.trained))
    return Roofline(efforts, sent, kept, received, weights, trained)


def symbols_of(lowered: Lowered, microbatch: Microbatch) -> Symbols:
    """The sizes of a microbatch, as the symbols of the variant that it fits."""
    return solve(lowered.captured.leaves, [tensor for _, tensor in flatten(microbatch)[0]])[0]


def costs_of(
    steps: Sequence[tuple[Lowered, Symbols]], device: Device, *, optimizer: float = 2.0
) -> Costs:
    """The costs of a step of these microbatches: of each, the variant that it runs and its sizes.

    device: in numbers. optimizer: how many times the size of a trained weight its state has, beside
    a gradient; what is resident is that of the largest variant. What is recomputed is in the graphs
    already, so that `Costs.recomputed` must not count it again.
    """
    known = {id(lowered): roofline(lowered) for lowered, _ in steps}
    made: dict[object, _Numbers] = {}
    found = []
    for lowered, symbols in steps:
        key = id(lowered), frozenset(symbols.items())
        if key not in made:
            made[key] = _numbers(known[id(lowered)], symbols, device)
        found.append(made[key])
    sizes = [
        {stage: x.weights[stage] + (1 + optimizer) * x.trained[stage] for stage in x.weights}
        for x in known.values()
    ]
    return Costs(
        seconds=_each([numbers.seconds for numbers in found]),
        latency=float(device.alpha),
        bandwidth=1 / float(device.beta) if device.beta else math.inf,
        bytes=_each([numbers.sent for numbers in found]),
        kept=_each([numbers.kept for numbers in found]),
        resident={
            stage: float(max(size.get(stage, 0) for size in sizes))
            for stage in dict.fromkeys(stage for size in sizes for stage in size)
        },
        received=_each([numbers.received for numbers in found]),
    )


class _Numbers(NamedTuple):
    """What the ops of one microbatch take."""

    seconds: dict[tuple[str, Kind], float]
    sent: dict[tuple[str, Kind], float]
    kept: dict[tuple[str, Kind], float]
    received: dict[str, float]


def _numbers(roof: Roofline, symbols: Symbols, device: Device) -> _Numbers:
    known: dict[sympy.Expr, float] = {}

    def number(expr: sympy.Expr) -> float:
        if expr not in known:
            known[expr] = float(expr.xreplace(symbols))
        return known[expr]

    peak, bandwidth = float(device.peak_flops), float(device.bandwidth)
    seconds = {
        key: math.fsum(
            count * max(number(work) / peak, number(moved) / bandwidth)
            for (work, moved), count in kinds.items()
        )
        for key, kinds in roof.kinds.items()
    }
    sent, kept = ({key: number(x) for key, x in sizes.items()} for sizes in (roof.sent, roof.kept))
    return _Numbers(seconds, sent, kept, {key: number(x) for key, x in roof.received.items()})


_Key = TypeVar("_Key")


def _each(found: Sequence[Mapping[_Key, float]]) -> dict[_Key, Amount]:
    """One number where all microbatches have the same, else one for each; none where a variant
    has not the stage."""
    keys = dict.fromkeys(key for numbers in found for key in numbers)
    values = {key: tuple(numbers.get(key, 0.0) for numbers in found) for key in keys}
    return {key: x if len(set(x)) > 1 else x[0] for key, x in values.items()}


def _efforts(part: fx.GraphModule) -> tuple[Effort, ...]:
    """Every operator of a graph that does anything."""
    found = []
    for node in part.graph.nodes:
        makes = node.op == "call_function" and function(node) is not operator.getitem
        if makes and tensors_of(node) and not is_view(node):
            found.append(Effort(node.name, sympy.sympify(flops(node, _shape)), _moved(node)))
    return tuple(found)


def _moved(node: fx.Node) -> sympy.Expr:
    """Bytes that an operator reads and writes; a look-up reads of its first input what it makes."""
    made = [_size(value) for value in tensors_of(node)]
    read = [_size(value) for source in node.all_input_nodes for value in tensors_of(source)]
    if function(node) in _LOOKUPS:
        read[0] = made[0]
    return sympy.Add(*made, *read)


def _size(value: Tensor) -> sympy.Expr:
    return math.prod(_shape(value)) * sympy.Integer(value.dtype.itemsize)


def _shape(value: Tensor) -> tuple[sympy.Expr, ...]:
    return tuple(map(_known, map(expression, value.shape)))


def _known(size: sympy.Expr) -> sympy.Expr:
    """A size without the symbols that depend on data, which no microbatch gives a number."""
    unknown = [symbol for symbol in size.free_symbols if str(symbol).startswith("u")]
    return size.xreplace(dict.fromkeys(unknown, sympy.Integer(UNKNOWN_SIZE))) if unknown else size


def _kept(part: fx.GraphModule) -> sympy.Expr:
    """Bytes of the distinct storages that F or B keeps: the last group of its outputs."""
    output = arguments(part.graph.output_node())[0]
    kept = [pair for n in output[-1] for pair in zip(storages(n), tensors_of(n), strict=True)]
    sizes = {memory: value.untyped_storage().nbytes() for memory, value in kept}
    return sympy.Add(*(sympy.expand(_known(expression(size))) for size in sizes.values()))


def _crossing(lowered: Lowered) -> tuple[dict[str, sympy.Expr], ...]:
    """Bytes that each stage's F and B send to one rank, and that its F receives."""
    values = lowered.stages.values
    forward: dict[str, list[sympy.Expr]] = defaultdict(list)
    back: dict[str, list[sympy.Expr]] = defaultdict(list)
    received: dict[str, list[sympy.Expr]] = defaultdict(list)
    for seam in lowered.cut.seams:
        sizes = {name: _bytes_of(values[name]) for name in seam.values}
        whole = sympy.Add(*sizes.values())
        forward[seam.source].append(whole)
        received[seam.target].append(whole)
        if seam.grads:
            back[seam.target].append(sympy.Add(*(sizes[name] for name in seam.grads)))
    return (
        {stage: sympy.Max(*set(sizes)) for stage, sizes in forward.items()},
        {stage: sympy.Max(*set(sizes)) for stage, sizes in back.items()},
        {stage: sympy.Add(*sizes) for stage, sizes in received.items()},
    )


def _bytes_of(value: Value) -> sympy.Expr:
    return math.prod(value.shape) * sympy.Integer(value.dtype.itemsize)


def _state_sizes(lowered: Lowered) -> dict[str, sympy.Expr]:
    """Bytes of each tensor of the model's state, by its name."""
    captured = lowered.captured
    return {
        captured.state[node.name]: _size(node.meta["val"])
        for node in captured.graph.graph.nodes
        if node.op == "placeholder" and node.name in captured.state
    }
