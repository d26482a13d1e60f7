"""The new graphs: each computes some nodes of a joint graph, from inputs and from kept values.

Which values are kept is decided in `fxpipe.partition`; here they only get their places: an input
is found in the bundles that a graph is called with, a size of the microbatch in `feed`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from fxpipe.bundles import bundled
from fxpipe.dataflow import aten, storages
from fxpipe.split import Stage
from fxpipe.torch_internals import expression, is_unbacked

IDENTITY = {aten.detach.default, aten.alias.default}
_BACKWARD = ("state", "feed", "kept", "wanted", "weight")


@dataclass(frozen=True)
class Joint:
    """A stage's forward and backward in one graph.

    holders: label of an input -> its placeholder (state, fields, sizes, received values,
    `d_VALUE_STAGE`, `weight`); sent, losses, stats: nodes; gradients: input label -> node or None
    """

    graph: fx.GraphModule
    holders: Mapping[str, fx.Node]
    sent: Sequence[fx.Node]
    losses: Sequence[fx.Node]
    gradients: Mapping[str, fx.Node | None]
    stats: Sequence[fx.Node] = ()


class Ends(NamedTuple):
    """The stages at the far ends of a stage's seams, in the order of the bundles.

    received, sent: of the values that F takes and gives; returned, wanted: of the gradients that B
    gives, and that the first op of the backward takes
    """

    received: tuple[str, ...]
    sent: tuple[str, ...]
    returned: tuple[str, ...]
    wanted: tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """What the three graphs take and give, in bundles, one for each seam."""

    stage: Stage
    received: Sequence[Sequence[str]]
    sent: Sequence[Sequence[fx.Node]]
    wanted: Sequence[Sequence[str]]
    returned: Sequence[Sequence[fx.Node | None]]
    weights: Sequence[fx.Node]
    ends: Ends


class Whole:
    """A joint graph as the three graphs read it.

    order: node -> position; label: placeholder -> the name of the input; source: node -> itself,
    or the node behind it where it only detaches or aliases; sizes: integer -> its place in `feed`
    """

    def __init__(self, joint: Joint, parts: Parts) -> None:
        self.joint, self.parts = joint, parts
        self.order = {node: i for i, node in enumerate(joint.graph.graph.nodes)}
        self.label = {node: name for name, node in joint.holders.items()}
        self.sizes: dict[sympy.Expr, int] = {}
        self.source: dict[fx.Node, fx.Node] = {}
        for node in self.order:
            source = node.args[0] if node.target in IDENTITY else node
            assert isinstance(source, fx.Node)
            self.source[node] = self.source.get(source, source)

    def name(self, node: fx.Node) -> str:
        """The label of an input, the name of a node."""
        return self.label.get(node, node.name)

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


def forward(
    whole: Whole,
    sent: Sequence[Sequence[fx.Node]],
    losses: Sequence[fx.Node],
    stats: Sequence[fx.Node],
    kept: Sequence[fx.Node],
    checks: Sequence[fx.Node],
) -> fx.GraphModule:
    """F(state, feed, received) -> (sent, losses, kept); it also runs the checks. Stats, if there
    are any, come last."""
    copy = _Copy(whole, ())
    copy.run([*flat(sent), *losses, *stats, *kept, *checks])
    result: tuple[Any, ...] = copy.bundles(sent), tuple(map(copy.get, losses))
    result = (*result, list(map(copy.get, kept)))
    if stats:
        result = (*result, tuple(map(copy.get, stats)))
    return copy.module(("state", "feed", "received"), result)


def backward(
    whole: Whole,
    returned: Sequence[Sequence[fx.Node]],
    kept: Sequence[fx.Node],
    for_w: Sequence[fx.Node],
) -> fx.GraphModule:
    """B(state, feed, kept, wanted, weight) -> (returned, kept_w)."""
    copy = _Copy(whole, kept)
    copy.run([*flat(returned), *for_w])
    result = (copy.bundles(returned), list(map(copy.get, for_w)))
    return copy.module(_BACKWARD, result, ("kept",))


def weights(whole: Whole, gradients: Sequence[fx.Node], kept: Sequence[fx.Node]) -> fx.GraphModule:
    """W(state, feed, kept, wanted, weight) -> gradients of the trained parameters."""
    copy = _Copy(whole, kept)
    copy.run(gradients)
    return copy.module(_BACKWARD, tuple(map(copy.get, gradients)), ("kept",))


class _Copy:
    """A new graph that computes some nodes of the joint graph from kept values and inputs."""

    def __init__(self, whole: Whole, kept: Sequence[fx.Node]) -> None:
        self.whole = whole
        self.kept = {node: f"kept[{i}]" for i, node in enumerate(kept)}
        self.graph = fx.Graph()
        self.where: dict[str, str] = {}
        self.env: dict[fx.Node, Any] = {}
        self.numbers: dict[sympy.Expr, fx.Node] = {}

    def run(self, ends: Iterable[fx.Node]) -> None:
        """Write what `ends` need: inputs first, then the nodes in their order."""
        nodes = sorted(self._needed(ends), key=self.whole.order.__getitem__)
        for node in nodes:
            if node in self.kept:
                self._input(node, self.kept[node])
            elif is_number(node):
                self._size(node)
            elif node.op == "placeholder":
                self._input(node, self.whole.place(node))
        for node in nodes:
            if node not in self.env:
                self.env[node] = self.graph.node_copy(
                    node, lambda n: self.env[self.whole.source[n]]
                )

    def _needed(self, ends: Iterable[fx.Node]) -> set[fx.Node]:
        """The ends and all that they need, down to kept values and inputs."""
        needed: set[fx.Node] = set()
        stack = list(ends)
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                if node not in self.kept and node.op != "placeholder" and not is_number(node):
                    stack.extend(self.whole.source[n] for n in node.all_input_nodes)
        return needed

    def _input(self, node: fx.Node, where: str) -> None:
        holder = self._holder(self.whole.name(node), node.meta["val"], where)
        holder.meta["storages"] = storages(node)
        self.env[node] = holder

    def _size(self, node: fx.Node) -> None:
        value = node.meta["val"]
        expr = expression(value)
        if expr.is_number:
            self.env[node] = int(expr)
            return
        if expr not in self.numbers:
            where = self.whole.size(expr)
            self.numbers[expr] = self._holder(f"size_{self.whole.sizes[expr]}", value, where)
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
        return bundled(self.whole.joint.graph, self.graph, bundles, self.where, consumed)


def flat(groups: Sequence[Sequence[fx.Node]]) -> list[fx.Node]:
    """The nodes of all groups, in order."""
    return [node for group in groups for node in group]


def is_number(node: fx.Node) -> bool:
    """Whether a node is an integer that follows from the microbatch's sizes."""
    value = node.meta.get("val")
    return isinstance(value, (int, torch.SymInt)) and not is_unbacked(value)
