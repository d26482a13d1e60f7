"""A traced joint graph is cut into F, B and W with as little kept between them as can be.

Kept is what the backward reads of the forward, after three reductions: a view is made again from
its base, a size is computed from the microbatch, and a value that is a cheap function of kept
values, parameters or inputs is computed again instead of being kept beside them.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxpipe.bundles import bundled
from fxpipe.dataflow import is_random, is_view
from fxpipe.split import Stage
from fxpipe.torch_internals import expression, is_unbacked

aten = torch.ops.aten
_IDENTITY = {aten.detach.default, aten.alias.default}
_CHEAP = {
    aten.add, aten.sub, aten.mul, aten.neg, aten.div, aten.where, aten.masked_fill, aten.relu,
    aten.silu, aten.sigmoid, aten.clone, aten._to_copy, aten.lift_fresh_copy, aten.eq, aten.ne,
    aten.lt, aten.le, aten.gt, aten.ge, aten.bitwise_and, aten.bitwise_or, aten.bitwise_not,
    aten.logical_and, aten.logical_or, aten.logical_not, aten.full, aten.full_like, aten.zeros,
    aten.zeros_like, aten.ones, aten.ones_like, aten.new_ones, aten.new_zeros, aten.new_full,
    aten.arange, aten.scalar_tensor,
}  # fmt: skip


@dataclass(frozen=True)
class Joint:
    """A stage's forward and backward in one graph.

    holders: label of an input -> its placeholder (state, fields, sizes, received values,
    `d_VALUE_STAGE`, `weight`); sent, losses: nodes; gradients: input label -> node or None
    """

    graph: fx.GraphModule
    holders: Mapping[str, fx.Node]
    sent: Sequence[fx.Node]
    losses: Sequence[fx.Node]
    gradients: Mapping[str, fx.Node | None]


@dataclass(frozen=True)
class Parts:
    """What the three graphs take and give, in bundles, one for each seam."""

    stage: Stage
    received: Sequence[Sequence[str]]
    sent: Sequence[Sequence[fx.Node]]
    wanted: Sequence[Sequence[str]]
    returned: Sequence[Sequence[fx.Node | None]]
    weights: Sequence[fx.Node]


@dataclass(frozen=True)
class ThreeGraphs:
    """The result: graphs, the names of what they keep, and the sizes that `feed` must hold."""

    F: fx.GraphModule
    B: fx.GraphModule
    W: fx.GraphModule
    kept_b: tuple[str, ...]
    kept_w: tuple[str, ...]
    sizes: tuple[sympy.Expr, ...]


def partition(joint: Joint, parts: Parts) -> ThreeGraphs:
    """Cut the joint graph; see `fxpipe.joint` for what the three graphs take and give."""
    return _Partition(joint, parts).cut()


class _Partition:
    """The nodes of the joint graph, sorted into phases."""

    def __init__(self, joint: Joint, parts: Parts) -> None:
        self.joint, self.parts = joint, parts
        self.order = {node: i for i, node in enumerate(joint.graph.graph.nodes)}
        self.label = {node: name for name, node in joint.holders.items()}
        stage = parts.stage
        self.free = {joint.holders[name] for name in (*stage.state, *stage.fields, *stage.sizes)}
        self.sizes: dict[sympy.Expr, int] = {}
        self.source: dict[fx.Node, fx.Node] = {}
        for node in self.order:
            source = node.args[0] if node.target in _IDENTITY else node
            assert isinstance(source, fx.Node)
            self.source[node] = self.source.get(source, source)

    def cut(self) -> ThreeGraphs:
        parts = self.parts
        sent = [[self.source[n] for n in bundle] for bundle in parts.sent]
        losses = [self.source[n] for n in self.joint.losses]
        returned = [[self.source[n] for n in bundle if n] for bundle in parts.returned]
        weights = [self.source[n] for n in parts.weights]
        checks = [n for n in self.order if n.op == "call_function" and n.is_impure()]
        forward = _with_items(self._behind([*_flat(sent), *losses, *checks]))
        backward = _with_items(self._behind(_flat(returned)) - forward)
        deferred = self._behind(weights) - forward - backward
        reads = self._reads(deferred, weights, backward | forward)
        if returned:
            for_w = self._reduce(reads)
            from_forward = [n for n in for_w if n in forward or self._is_received(n)]
            reads = [*self._reads(backward, _flat(returned), forward), *from_forward]
        self.free |= {self.joint.holders[name] for name in self._tangents()}
        for_b = self._reduce(reads)
        if not returned:
            for_w = for_b
        return ThreeGraphs(
            F=self._forward(sent, losses, for_b, checks),
            B=self._backward(returned, for_b, for_w if returned else []),
            W=self._weights(weights, for_w),
            kept_b=tuple(self.name(n) for n in for_b),
            kept_w=tuple(self.name(n) for n in for_w) if returned else (),
            sizes=tuple(self.sizes),
        )

    def _tangents(self) -> list[str]:
        """Inputs that the first backward graph is called with, and that nothing has to keep."""
        return [name for group in self.parts.wanted for name in group] + ["weight"]

    def name(self, node: fx.Node) -> str:
        """The label of an input, the name of a node."""
        return self.label.get(node, node.name)

    def _inputs(self, node: fx.Node) -> list[fx.Node]:
        return [self.source[n] for n in node.all_input_nodes if not _is_size(n)]

    def _behind(self, ends: Iterable[fx.Node]) -> set[fx.Node]:
        """The computing nodes that `ends` need, themselves included."""
        seen: set[fx.Node] = set()
        stack = list(ends)
        while stack:
            node = stack.pop()
            if node not in seen and node.op != "placeholder" and not _is_size(node):
                seen.add(node)
                stack.extend(self._inputs(node))
        return seen

    def _is_received(self, node: fx.Node) -> bool:
        return self.label.get(node) in self.parts.stage.received

    def _reads(
        self, phase: set[fx.Node], outputs: Iterable[fx.Node], earlier: set[fx.Node]
    ) -> list[fx.Node]:
        """What a phase takes from earlier ones: their nodes, and inputs that are not at hand."""
        read = dict.fromkeys(n for node in phase for n in self._inputs(node) if n not in phase)
        read.update(dict.fromkeys(n for n in outputs if n not in phase))
        return [n for n in read if n in earlier or (n.op == "placeholder" and n not in self.free)]

    def _reduce(self, reads: Iterable[fx.Node]) -> list[fx.Node]:
        """The fewest values from which all that is read can be had at little cost."""
        kept: set[fx.Node] = set()
        for node in reads:
            kept.update(self._bases(node))
        for node in sorted(kept, key=self.order.__getitem__, reverse=True):
            if self._obtainable(node, kept - {node}):
                kept.discard(node)
        return sorted(kept, key=self.order.__getitem__)

    def _bases(self, node: fx.Node) -> list[fx.Node]:
        """A view's base; a value that is no view stands for itself."""
        if node in self.free:
            return []
        if is_view(node) or (_is_item(node) and is_view(self._inputs(node)[0])):
            return [base for source in self._inputs(node) for base in self._bases(source)]
        return [node]

    def _obtainable(self, node: fx.Node, kept: set[fx.Node], depth: int = 0) -> bool:
        if node in self.free or (node in kept and depth):
            return True
        again = node.op == "call_function" and (_is_cheap(node) or is_view(node))
        again = again or (_is_item(node) and is_view(self._inputs(node)[0]))
        return (
            again
            and depth < 8
            and all(self._obtainable(source, kept, depth + 1) for source in self._inputs(node))
        )

    def _forward(
        self,
        sent: Sequence[Sequence[fx.Node]],
        losses: Sequence[fx.Node],
        kept: Sequence[fx.Node],
        checks: Sequence[fx.Node],
    ) -> fx.GraphModule:
        copy = _Copy(self, {})
        for node in [*_flat(sent), *losses, *kept, *checks]:
            copy.need(node)
        copy.run()
        result = (copy.bundles(sent), tuple(map(copy.get, losses)), list(map(copy.get, kept)))
        return copy.module(("state", "feed", "received"), result)

    def _backward(
        self, returned: Sequence[Sequence[fx.Node]], kept: Sequence[fx.Node], for_w: list[fx.Node]
    ) -> fx.GraphModule:
        copy = _Copy(self, {node: f"kept[{i}]" for i, node in enumerate(kept)} if returned else {})
        for node in [*_flat(returned), *for_w]:
            copy.need(node)
        copy.run()
        result = (copy.bundles(returned), list(map(copy.get, for_w)))
        return copy.module(("state", "feed", "kept", "wanted", "weight"), result, ("kept",))

    def _weights(self, weights: Sequence[fx.Node], kept: Sequence[fx.Node]) -> fx.GraphModule:
        copy = _Copy(self, {node: f"kept[{i}]" for i, node in enumerate(kept)})
        for node in weights:
            copy.need(node)
        copy.run()
        result = tuple(map(copy.get, weights))
        return copy.module(("state", "feed", "kept", "wanted", "weight"), result, ("kept",))

    def place(self, node: fx.Node) -> str:
        """Where a placeholder's value is found in the bundles."""
        name, stage = self.label[node], self.parts.stage
        if name in stage.state:
            return f"state[{stage.state.index(name)}]"
        if name in stage.fields:
            return f"feed[{stage.fields.index(name)}]"
        for bundle, groups in (("received", self.parts.received), ("wanted", self.parts.wanted)):
            for i, group in enumerate(groups):
                if name in group:
                    return f"{bundle}[{i}][{list(group).index(name)}]"
        return "weight"

    def size(self, expr: sympy.Expr) -> str:
        """Where an integer of the microbatch is found in `feed`."""
        index = self.sizes.setdefault(expr, len(self.sizes))
        return f"feed[{len(self.parts.stage.fields) + index}]"


class _Copy:
    """A new graph that computes some nodes of the joint graph from kept values and inputs."""

    def __init__(self, cut: _Partition, kept: Mapping[fx.Node, str]) -> None:
        self.cut, self.kept = cut, kept
        self.graph = fx.Graph()
        self.where: dict[str, str] = {}
        self.env: dict[fx.Node, Any] = {}
        self.needed: set[fx.Node] = set()
        self.numbers: dict[sympy.Expr, fx.Node] = {}

    def need(self, node: fx.Node) -> None:
        """Mark a node and all that it needs, down to kept values and inputs."""
        stack = [node]
        while stack:
            node = stack.pop()
            if node not in self.needed:
                self.needed.add(node)
                if node not in self.kept and node.op != "placeholder" and not _is_size(node):
                    stack.extend(self.cut.source[n] for n in node.all_input_nodes)

    def run(self) -> None:
        """Write the graph: inputs first, then the nodes in their order."""
        nodes = sorted(self.needed, key=self.cut.order.__getitem__)
        for node in nodes:
            if node in self.kept:
                self._input(node, self.kept[node])
            elif _is_size(node):
                self._size(node)
            elif node.op == "placeholder":
                self._input(node, self.cut.place(node))
        for node in nodes:
            if node not in self.env:
                self.env[node] = self.graph.node_copy(node, lambda n: self.env[self.cut.source[n]])

    def _input(self, node: fx.Node, where: str) -> None:
        self.env[node] = self._holder(self.cut.name(node), node.meta["val"], where)

    def _size(self, node: fx.Node) -> None:
        value = node.meta["val"]
        expr = expression(value)
        if expr.is_number:
            self.env[node] = int(expr)
            return
        if expr not in self.numbers:
            where = self.cut.size(expr)
            self.numbers[expr] = self._holder(f"size_{self.cut.sizes[expr]}", value, where)
        self.env[node] = self.numbers[expr]

    def _holder(self, name: str, value: Any, where: str) -> fx.Node:
        holder = self.graph.placeholder(name)
        # Two inputs may be called alike, and generated code goes by targets: make them unique.
        holder.target = holder.name
        holder.meta = {"val": value}
        self.where[holder.name] = where
        return holder

    def get(self, node: fx.Node) -> Any:
        """The copy of a node."""
        return self.env[node]

    def bundles(self, groups: Sequence[Sequence[fx.Node]]) -> tuple[tuple[Any, ...], ...]:
        """The copies of nodes, in tuples of tuples."""
        return tuple(tuple(map(self.get, group)) for group in groups)

    def module(
        self, bundles: Sequence[str], result: Any, consumed: Sequence[str] = ()
    ) -> fx.GraphModule:
        """The finished graph as a module that is called with bundles."""
        self.graph.output(result)
        return bundled(self.cut.joint.graph, self.graph, bundles, self.where, consumed)


def _flat(groups: Sequence[Sequence[fx.Node]]) -> list[fx.Node]:
    return [node for group in groups for node in group]


def _with_items(nodes: set[fx.Node]) -> set[fx.Node]:
    """The parts of a tuple are taken where the tuple is made."""
    return nodes | {user for node in nodes for user in node.users if _is_item(user)}


def _is_size(node: fx.Node) -> bool:
    """Whether a node is an integer that follows from the microbatch's sizes."""
    value = node.meta.get("val")
    return isinstance(value, (int, torch.SymInt)) and not is_unbacked(value)


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _is_cheap(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    return packet in _CHEAP and not is_random(node) and isinstance(node.meta.get("val"), Tensor)
