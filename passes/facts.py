"""A captured graph, and what the search for its regions asks of it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, reduce
from operator import or_

import sympy
from torch import fx

from fxpipe.capture import Captured
from fxpipe.cut import Role
from fxpipe.dataflow import arguments, aten, behind, data_inputs, spread, work
from fxpipe.passes.anchors import Known, recognised
from fxpipe.passes.chains import find_chains


class Facts:
    """The graph and what every step of the search asks of it."""

    def __init__(
        self,
        captured: Captured,
        symbols: Mapping[sympy.Symbol, sympy.Integer],
        known: Known | None = None,
    ) -> None:
        self.captured = captured
        self.known = known or {}
        self.graph = captured.graph.graph
        self.symbols = symbols
        self.chains = find_chains(self.graph)
        self.opaque = [node for node in self.graph.nodes if "prefix" in node.meta]
        leaves = {leaf.placeholder: 1 << i for i, leaf in enumerate(captured.leaves)}
        self.leaves = spread(
            self.graph, {n: leaves[n.name] for n in self.graph.nodes if n.name in leaves}
        )
        kinds = [leaf.dtype.is_floating_point for leaf in captured.leaves]
        self.float_leaves = sum(1 << i for i, floating in enumerate(kinds) if floating)
        self.integer_leaves = sum(1 << i for i, floating in enumerate(kinds) if not floating)

    def work(self, nodes: Sequence[fx.Node]) -> float:
        return sum(work(node, self.symbols) for node in nodes)

    def is_parameter(self, node: fx.Node) -> bool:
        return self.captured.state.get(node.name) in self.captured.parameters

    def is_token_embedding(self, node: fx.Node) -> bool:
        """Whether a node looks up words: of all tables that are read by an integer input, the
        largest, beside which positions, tiles and classes are few."""
        return node in self._lookups and _rows(node) == self._words

    @cached_property
    def _lookups(self) -> set[fx.Node]:
        found = [node for node in self.graph.nodes if node.target is aten.embedding.default]
        return {n for n in found if self._is_given(arguments(n)[1])}

    def _is_given(self, index: fx.Node) -> bool:
        """Whether integers come from an input; where its values are held, from a constant."""
        if self.leaves[index] & self.integer_leaves:
            return True
        sources = {index, *behind([index], lambda _: False)} if self.captured.values else set()
        constants = self.captured.constants
        return any(self.captured.state.get(node.name) in constants for node in sources)

    @cached_property
    def _words(self) -> int:
        return max(map(_rows, self._lookups), default=0)

    def has_weights(self, node: fx.Node) -> bool:
        return any(self.is_parameter(source) for source in data_inputs(node))

    def encoded(self, nodes: Iterable[fx.Node]) -> int:
        """The float inputs that nodes are computed from, as bits."""
        return reduce(or_, (self.leaves[node] for node in nodes), 0) & self.float_leaves

    def parameters(self, nodes: Iterable[fx.Node]) -> frozenset[str]:
        """The names of the parameters that nodes read."""
        sources = {source for node in nodes for source in data_inputs(node)}
        return frozenset(self.captured.state[n.name] for n in sources if self.is_parameter(n))

    def recognised(
        self, role: Role, nodes: Iterable[fx.Node], taken: Collection[str] = ()
    ) -> str | None:
        """What another variant calls the region of these nodes."""
        return recognised(self.known, role, self.parameters(nodes), taken)


def _rows(lookup: fx.Node) -> int:
    return int(arguments(lookup)[0].meta["val"].shape[0])
