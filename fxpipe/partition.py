"""A traced joint graph is cut into F, B and W with as little kept between them as can be.

Kept is what the backward reads of the forward, after three reductions: a view is made again from
its base, a size is computed from the microbatch, and a value that is a cheap function of kept
values, parameters or inputs is computed again instead of being kept beside them. A stage that
recomputes keeps only what it received and what chance has made.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import sympy
from torch import Tensor, fx

from fxpipe import copying
from fxpipe.copying import Joint, Parts, Whole, flat, is_number
from fxpipe.dataflow import aten, is_item, is_random, is_view

_CHEAP = {
    aten.add, aten.sub, aten.mul, aten.neg, aten.div, aten.where, aten.masked_fill, aten.relu,
    aten.silu, aten.sigmoid, aten.clone, aten._to_copy, aten.lift_fresh_copy, aten.eq, aten.ne,
    aten.lt, aten.le, aten.gt, aten.ge, aten.bitwise_and, aten.bitwise_or, aten.bitwise_not,
    aten.logical_and, aten.logical_or, aten.logical_not, aten.full, aten.full_like, aten.zeros,
    aten.zeros_like, aten.ones, aten.ones_like, aten.new_ones, aten.new_zeros, aten.new_full,
    aten.arange, aten.scalar_tensor,
}  # fmt: skip


@dataclass(frozen=True)
class ThreeGraphs:
    """The result: graphs, the names of what they keep, and the sizes that `feed` must hold."""

    F: fx.GraphModule
    B: fx.GraphModule
    W: fx.GraphModule
    kept_b: tuple[str, ...]
    kept_w: tuple[str, ...]
    sizes: tuple[sympy.Expr, ...]


def partition(joint: Joint, parts: Parts, recompute: bool = False) -> ThreeGraphs:
    """Cut the joint graph; see `fxpipe.joint` for what the three graphs take and give.

    recompute: the first graph of the backward computes again all that it reads of the forward.
    """
    return _Partition(joint, parts, recompute).cut()


class _Partition:
    """The nodes of the joint graph, sorted into phases."""

    def __init__(self, joint: Joint, parts: Parts, recompute: bool) -> None:
        self.joint, self.parts, self.recompute = joint, parts, recompute
        self.whole = Whole(joint, parts)
        self.order, self.source = self.whole.order, self.whole.source
        stage = parts.stage
        names = (*stage.state, *stage.fields, *stage.sizes)
        # A buffer that changes has another value by the time of the backward.
        self.free = {joint.holders[name] for name in names if name not in stage.moving}

    def cut(self) -> ThreeGraphs:
        parts = self.parts
        sent = [[self.source[n] for n in bundle] for bundle in parts.sent]
        losses = [self.source[n] for n in self.joint.losses]
        stats = [self.source[n] for n in self.joint.stats]
        returned = [[self.source[n] for n in bundle if n] for bundle in parts.returned]
        weights = [self.source[n] for n in parts.weights]
        checks = [n for n in self.order if n.op == "call_function" and n.is_impure()]
        checks = [n for n in checks if not is_random(n)]
        forward = _with_items(self._behind([*flat(sent), *losses, *stats, *checks]))
        backward = _with_items(self._behind(flat(returned)) - forward)
        deferred = self._behind(weights) - forward - backward
        reads = self._reads(deferred, weights, backward | forward)
        if returned:
            for_w = self._reduce(reads)
            from_forward = [n for n in for_w if n in forward or self._is_received(n)]
            reads = [*self._reads(backward, flat(returned), forward), *from_forward]
        self.free |= {self.joint.holders[name] for name in self._tangents()}
        for_b = self._origins(reads) if self.recompute else self._reduce(reads)
        if not returned:
            for_w = for_b
        return ThreeGraphs(
            F=copying.forward(self.whole, sent, losses, stats, for_b, checks),
            B=copying.backward(self.whole, returned, for_b, for_w if returned else []),
            W=copying.weights(self.whole, weights, for_w),
            kept_b=tuple(map(self.whole.name, for_b)),
            kept_w=tuple(map(self.whole.name, for_w)) if returned else (),
            sizes=tuple(self.whole.sizes),
        )

    def _tangents(self) -> list[str]:
        """Inputs that the first backward graph is called with, and that nothing has to keep."""
        return [name for group in self.parts.wanted for name in group] + ["weight"]

    def _inputs(self, node: fx.Node) -> list[fx.Node]:
        return [self.source[n] for n in node.all_input_nodes if not is_number(n)]

    def _behind(self, ends: Iterable[fx.Node]) -> set[fx.Node]:
        """The computing nodes that `ends` need, themselves included."""
        seen: set[fx.Node] = set()
        stack = list(ends)
        while stack:
            node = stack.pop()
            if node not in seen and node.op != "placeholder" and not is_number(node):
                seen.add(node)
                stack.extend(self._inputs(node))
        return seen

    def _is_received(self, node: fx.Node) -> bool:
        return self.whole.label.get(node) in self.parts.stage.received

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
            if self._obtainable(node, kept):
                kept.discard(node)
        return sorted(kept, key=self.order.__getitem__)

    def _origins(self, reads: Iterable[fx.Node]) -> list[fx.Node]:
        """The values from which all that is read can be computed again: what was received, and
        what chance has made, which must not be drawn twice."""
        kept: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        stack = list(reads)
        while stack:
            node = stack.pop()
            if node in seen or node in self.free:
                continue
            seen.add(node)
            maker = self._inputs(node)[0] if is_item(node) else node
            if node.op == "placeholder" or _draws(maker):
                kept.add(node)
            else:
                stack.extend(self._inputs(node))
        return sorted(kept, key=self.order.__getitem__)

    def _bases(self, node: fx.Node) -> list[fx.Node]:
        """A view's base; a value that is no view stands for itself."""
        if node in self.free:
            return []
        if is_view(node) or (is_item(node) and is_view(self._inputs(node)[0])):
            return [base for source in self._inputs(node) for base in self._bases(source)]
        return [node]

    def _obtainable(self, node: fx.Node, kept: set[fx.Node], depth: int = 0) -> bool:
        if node in self.free or (node in kept and depth):
            return True
        again = node.op == "call_function" and (_is_cheap(node) or is_view(node))
        again = again or (is_item(node) and is_view(self._inputs(node)[0]))
        return (
            again
            and depth < 8
            and all(self._obtainable(source, kept, depth + 1) for source in self._inputs(node))
        )


def _with_items(nodes: set[fx.Node]) -> set[fx.Node]:
    """The parts of a tuple are taken where the tuple is made."""
    return nodes | {user for node in nodes for user in node.users if is_item(user)}


def _is_cheap(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    return packet in _CHEAP and not is_random(node) and isinstance(node.meta.get("val"), Tensor)


def _draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers; attention may, and draws none without dropout."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if "dropout_p" not in names:
        return is_random(node)
    at = names.index("dropout_p")
    given = node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return is_random(node) and bool(given)
