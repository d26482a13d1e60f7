"""Sizes that depend on data, but follow from the microbatch alone: every rank knows them.

A boolean index, `nonzero` or `item` gives a size that no shape tells. Where it is computed from
the inputs, and not from weights, activations or chance, each rank computes it for itself before a
step, from a small part of the graph; then it is a size like any other.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxpipe.dataflow import aten, function, is_random, path
from fxpipe.errors import BatchError
from fxpipe.torch_internals import (
    declare_found,
    expression,
    fake_mode,
    raw_expression,
    unbacked_in,
)

Numbers = dict[sympy.Symbol, sympy.Integer]

ASSERT = aten._assert_scalar.default
_RANGES = {
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}
# Operators whose result's shape depends on the values of all but their first operand, or of none.
_FIRST_BY_SHAPE = {
    aten.index.Tensor,
    aten.masked_select.default,
    aten.repeat_interleave.self_Tensor,
}
_ALL_BY_SHAPE = {
    aten.sym_size.int,
    aten.sym_numel.default,
    aten.sym_stride.int,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}


@dataclass(frozen=True)
class DataSizes:
    """What of a graph is run for the sizes that follow from a microbatch's data.

    symbols: the sizes; steps: nodes, in order, with the symbols that each defines; a node whose
    values are not known (an index into activations) runs on a tensor of the right shape
    """

    symbols: frozenset[sympy.Symbol] = frozenset()
    steps: tuple[tuple[fx.Node, tuple[sympy.Symbol, ...]], ...] = ()
    known: frozenset[fx.Node] = frozenset()

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The placeholders that are read."""
        return tuple(node.name for node, _ in self.steps if node.op == "placeholder")

    def values(self, inputs: Mapping[str, Tensor], symbols: Mapping[Any, Any]) -> Numbers:
        """The sizes, for one microbatch. Raises BatchError if it breaks what tracing assumed.

        inputs: placeholder -> tensor, of the microbatch and of the model's buffers and constants
        """
        run = _Run(self, inputs, dict(symbols))
        with torch.no_grad():
            for node, defined in self.steps:
                run.step(node, defined)
        return {symbol: run.symbols[symbol] for symbol in self.symbols}


class _Run:
    """The values of nodes so far."""

    def __init__(self, sizes: DataSizes, inputs: Mapping[str, Tensor], symbols: Numbers) -> None:
        self.sizes, self.inputs, self.symbols = sizes, inputs, symbols
        self.env: dict[fx.Node, Any] = {}

    def step(self, node: fx.Node, defined: tuple[sympy.Symbol, ...]) -> None:
        if node.op == "placeholder":
            self.env[node] = self.inputs[node.name]
            return
        args = fx.node.map_arg(node.args, self._value)
        kwargs = fx.node.map_arg(node.kwargs, self._value)
        if node.target is ASSERT:
            if not args[0]:
                raise BatchError(f"module {path(node) or '(the model itself)'}: {args[1]}")
            return
        made = function(node)(*args, **kwargs)
        if node in self.sizes.known:
            self.env[node] = made
        for symbol in defined:
            self._solve(node, made, symbol)

    def _value(self, node: fx.Node) -> Any:
        """A value that was computed, a size, or a tensor of which only the shape is right."""
        if node in self.env:
            return self.env[node]
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            return int(expression(value).xreplace(self.symbols))
        shape = [int(expression(size).xreplace(self.symbols)) for size in value.shape]
        return torch.zeros((), dtype=value.dtype, device=value.device).expand(shape)

    def _solve(self, node: fx.Node, made: Any, symbol: sympy.Symbol) -> None:
        for expr, number in _pairs(node.meta["val"], made):
            expr = expr.xreplace(self.symbols)
            if expr == symbol:
                self.symbols[symbol] = sympy.Integer(number)
            elif expr == sympy.Eq(symbol, 1):
                self.symbols[symbol] = sympy.Integer(bool(number))


def _pairs(value: Any, made: Any) -> Iterable[tuple[sympy.Basic, Any]]:
    """(expression, number) of each number in what a node gave."""
    if isinstance(value, Tensor):
        yield from zip(map(raw_expression, value.shape), made.shape, strict=True)
    elif isinstance(value, (tuple, list)):
        for one, other in zip(value, made, strict=True):
            yield from _pairs(one, other)
    elif isinstance(value, (torch.SymInt, torch.SymBool)):
        yield raw_expression(value), made


def find_data_sizes(
    module: fx.GraphModule, moving: Collection[str]
) -> tuple[fx.GraphModule, DataSizes]:
    """The graph without asserts on sizes that follow from a microbatch's data; and these sizes.

    moving: the placeholders of tensors that no rank knows before a step. The asserts
    are among the steps, and checked before anything runs.
    """
    search = _Search(moving)
    for node in module.graph.nodes:
        search.visit(node)
    if not search.symbols:
        return module, DataSizes()
    settled = {node for node in module.graph.nodes if search.is_settled(node)}
    needed = set(search.defines) | {node for node in settled if node.target is ASSERT}
    for node in reversed(module.graph.nodes):
        if node in needed:
            needed.update(source for source in node.all_input_nodes if source in search.known)
    steps = [(n, search.defines.get(n, ())) for n in module.graph.nodes if n in needed]
    found = DataSizes(frozenset(search.symbols), tuple(steps), frozenset(search.known))
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node not in settled:
            env[node] = graph.node_copy(node, env.__getitem__)
            env[node].meta.pop("is_size", None)
    graph.eliminate_dead_code(lambda node: node.is_impure() and not is_random(node))
    mode = fake_mode([node.meta.get("val") for node in graph.nodes])
    declare_found(mode, found.symbols)
    return fx.GraphModule(module, graph), found


class _Search:
    """Which nodes' values are known from the inputs, and which symbols they define."""

    def __init__(self, moving: Collection[str]) -> None:
        self.moving = moving
        self.known: set[fx.Node] = set()
        self.symbols: set[sympy.Symbol] = set()
        self.met: set[sympy.Symbol] = set()
        self.defines: dict[fx.Node, tuple[sympy.Symbol, ...]] = {}

    def visit(self, node: fx.Node) -> None:
        if node.op == "placeholder" and node.name not in self.moving:
            self.known.add(node)
        if node.op != "call_function" or is_random(node):
            return
        fresh = _unbacked(node) - self.met
        self.met |= fresh
        shapes = all(_unbacked(source) <= self.symbols for source in node.all_input_nodes)
        if shapes and self.known.issuperset(_read_by_value(node)):
            self._define(node, fresh)
            if node.target not in _FIRST_BY_SHAPE or self.known.issuperset(node.all_input_nodes):
                self.known.add(node)

    def _define(self, node: fx.Node, fresh: set[sympy.Symbol]) -> None:
        exprs = [expr for expr, _ in _pairs(node.meta["val"], node.meta["val"])]
        plain = tuple(s for s in fresh if s in exprs or sympy.Eq(s, 1) in exprs)
        if plain:
            self.defines[node] = plain
            self.symbols.update(plain)

    def is_settled(self, node: fx.Node) -> bool:
        """Whether a node checks nothing but numbers that are known before a step."""
        checks = node.target is ASSERT or node.target in _RANGES
        return checks and self.known.issuperset(node.all_input_nodes)


def _read_by_value(node: fx.Node) -> list[fx.Node]:
    """The operands whose values, and not only their shapes, decide what a node gives or its
    shape."""
    if node.target in _ALL_BY_SHAPE:
        return []
    read: list[fx.Node] = []
    start = 1 if node.target in _FIRST_BY_SHAPE else 0
    fx.node.map_arg((node.args[start:], node.kwargs), read.append)
    return read


def _unbacked(node: fx.Node) -> set[sympy.Symbol]:
    """The symbols in what a node gives that no shape of the inputs tells."""
    value = node.meta.get("val")
    return {s for expr, _ in _pairs(value, value) for s in unbacked_in(expr)}
