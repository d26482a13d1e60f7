"""In-place writes become values: no node of the result changes a tensor that another one reads.

before  s = select(x, 1, 0); fill_(s, 0); y = add(x, 1)
after   s = select(x, 1, 0); s2 = fill(s, 0); x2 = select_scatter(x, s2, 1, 0); y = add(x2, 1)

A stage may then end between a write and a later read of the same storage.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.dataflow import (
    CUTS_GRADIENT,
    alias_of,
    arguments,
    aten,
    differentiable,
    function,
    is_in_place,
    is_item,
    storages,
)
from fxpipe.errors import CaptureError
from fxpipe.passes.inline_no_grad import NO_GRAD
from fxpipe.passes.scatters import (
    APART,
    SCATTER,
    counterpart,
    itself,
    refusal,
    rejoined,
    written_by,
)

# Operators that give truth values, which an in-place one writes as numbers.
_TO_BOOL = {
    aten.eq_, aten.ne_, aten.lt_, aten.le_, aten.gt_, aten.ge_,
    aten.logical_and_, aten.logical_or_, aten.logical_xor_, aten.logical_not_,
}  # fmt: skip


def functionalise(module: fx.GraphModule) -> fx.GraphModule:
    """The same computation without in-place operators. Raises CaptureError on a write that cannot
    be followed to the tensor that it changes."""
    writer = _Writer(module)
    for node in module.graph.nodes:
        writer.copy(node)
    writer.graph.eliminate_dead_code()
    return fx.GraphModule(module, writer.graph)


class _Writer:
    """The new graph, and for every old node the new one that holds its value by now.

    A view remembers the node that it is a view of. After a write to a tensor, all its views are
    stale: the next read of one makes it again from the tensor's new value.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.parent: dict[fx.Node, fx.Node] = {}
        self.same: dict[fx.Node, fx.Node] = {}
        self.version: dict[fx.Node, int] = {}
        self.seen: dict[fx.Node, int] = {}
        self.tracked: set[fx.Node] = set()
        self.results: dict[tuple[fx.Node, object], fx.Node] = {}

    def copy(self, node: fx.Node) -> None:
        """Take over one node of the old graph."""
        if node.op == "output":
            self.graph.output(fx.node.map_arg(node.args[0], self.read))
        elif is_in_place(node):
            self._write(node)
        else:
            self.env[node] = self._again(node)
            self.env[node].meta = dict(node.meta)
            self._note_view(node)
            if self._has_gradient(node):
                self.tracked.add(node)

    def _note_view(self, node: fx.Node) -> None:
        source = alias_of(node)
        if source is None:
            return
        if is_item(node) and self._has_apart(source):
            self.same[node] = self.results.setdefault((source, node.args[1]), node)
            return
        self.parent[node] = source
        self.seen[node] = self.version.get(self._root(node), 0)

    def _has_apart(self, maker: fx.Node) -> bool:
        """Whether the results of an operator (of `topk`) have each memory of its own."""
        places = storages(maker)
        return maker not in self.parent and len(set(places)) == len(places)

    def _has_gradient(self, node: fx.Node) -> bool:
        """Whether a node may depend on a trained parameter."""
        if node.op == "placeholder":
            return bool(getattr(node.meta.get("val"), "requires_grad", False))
        cuts = node.target in CUTS_GRADIENT or NO_GRAD in node.meta
        return not cuts and any(map(self._is_tracked, node.all_input_nodes))

    def _is_tracked(self, node: fx.Node) -> bool:
        return node in self.tracked or self._root(node) in self.tracked

    def _again(self, node: fx.Node) -> fx.Node:
        made = self.graph.node_copy(node, self.read)
        if torch.Tag.inplace_view in getattr(node.target, "tags", ()):
            made.target = counterpart(node)
        return made

    def _root(self, node: fx.Node) -> fx.Node:
        node = self.same.get(node, node)
        while node in self.parent:
            node = self.same.get(self.parent[node], self.parent[node])
        return node

    def read(self, node: fx.Node) -> fx.Node:
        """The new node with the value that an old node has by now."""
        node = self.same.get(node, node)
        version = self.version.get(self._root(node), 0)
        if node in self.parent and self.seen[node] < version:
            self.read(self.parent[node])
            self.env[node] = self._again(node)
            self.env[node].meta = dict(node.meta)
            self.seen[node] = version
        found: fx.Node = self.env[node]
        return found

    def _write(self, node: fx.Node) -> None:
        target = written_by(node)
        if not isinstance(target, fx.Node):
            raise CaptureError(refusal(node, "it writes to several tensors at once"))
        target = self.same.get(target, target)
        value = self._value(node, target)
        if node.meta.get(NO_GRAD):
            floating = differentiable(target.meta["val"])
            if floating and self._is_tracked(target):
                why = "under no_grad it changes a value that has a gradient; use x = x.detach()"
                raise CaptureError(refusal(node, why))
            value = self._call(aten.detach.default, (value,), node) if floating else value
        elif self._has_gradient(node):
            self.tracked.add(self._root(target))
        self._store(target, value, node)
        self.same[node] = target

    def _value(self, node: fx.Node, target: fx.Node) -> fx.Node:
        """The functional counterpart of an in-place operator."""
        args = fx.node.map_arg(tuple(node.args), self.read)
        kwargs = fx.node.map_arg(dict(node.kwargs), self.read)
        if node.target is aten.copy_.default:
            value = self._call(aten.to.dtype, (args[1], target.meta["val"].dtype), node)
            value = self._call(aten.expand_as.default, (value, args[0]), node)
            return self._over(target, value, node)
        if node.target is aten.zero_.default:
            value = self._call(aten.zeros_like.default, args, node)
            return self._over(target, value, node)
        if node.target is aten.fill_diagonal_.default:
            return self._diagonal(node, args)
        written = target.meta["val"]
        if node.kwargs.get("out") is not None:
            kwargs = {name: value for name, value in kwargs.items() if name != "out"}
            if node.meta["val"].shape != written.shape:
                raise CaptureError(refusal(node, "it gives its out= another shape"))
        value = self._call(counterpart(node), args, node, kwargs)
        dtypes = {n.meta["val"].dtype for n in node.all_input_nodes if _is_tensor(n)}
        if len(dtypes) > 1 or function(node).overloadpacket in _TO_BOOL:
            value = self._call(aten.to.dtype, (value, target.meta["val"].dtype), node)
        return value

    def _diagonal(self, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
        """A matrix with its diagonal filled; a tall one has none that goes on below."""
        if args[0].meta["val"].dim() != 2 or True in args[2:]:
            why = "it fills the diagonal of more than a matrix, or goes on below it"
            raise CaptureError(refusal(node, why))
        old = self._call(aten.diagonal.default, args[:1], node)
        new = self._call(aten.fill.Scalar, (old, args[1]), node)
        old.meta["val"] = new.meta["val"] = args[0].meta["val"].diagonal()
        return self._call(aten.diagonal_scatter.default, (args[0], new), node)

    def _over(self, target: fx.Node, value: fx.Node, node: fx.Node) -> fx.Node:
        """All of a tensor replaced: what it was gets a gradient of zeros, which is not None."""
        if NO_GRAD in node.meta or not self._is_tracked(target):
            return value
        zeros = self._call(aten.fill.Scalar, (self.read(target), 0), node)
        return self._call(aten.add.Tensor, (value, zeros), node)

    def _store(self, target: fx.Node, value: fx.Node, write: fx.Node) -> None:
        """Give `target` a new value, and with it everything that it is a view of."""
        root = self._root(target)
        if target in self.parent:
            parent = self._parent(target)
            if parent.target in APART:
                parts, parent = parent, self._parent(parent)
                call = rejoined(parts, int(arguments(target)[1]), value, self.read)
                whole = self._call(*call, write)
                whole.meta["val"] = parent.meta["val"]
            else:
                whole = self._scatter(target, parent, value, write)
            self._store(parent, whole, write)
        else:
            self.version[root] = self.version.get(root, 0) + 1
        self.env[target] = value
        self.seen[target] = self.version[root]

    def _parent(self, view: fx.Node) -> fx.Node:
        return self.same.get(self.parent[view], self.parent[view])

    def _scatter(self, view: fx.Node, parent: fx.Node, value: fx.Node, write: fx.Node) -> fx.Node:
        """The parent's value with the part that `view` shows replaced."""
        rule = SCATTER.get(view.target)
        if view.target is aten.detach.default and not self._is_tracked(parent):
            rule = itself
        call = None if rule is None else rule(view, self.read(parent), value, self.read)
        if call is None:
            why = f"it writes through {view.target}, and fxpipe cannot write its result back"
            raise CaptureError(refusal(write, why))
        result = self._call(*call, write)
        result.meta["val"] = parent.meta["val"]
        return result

    def _call(
        self,
        called: Callable[..., Any],
        args: tuple[Any, ...],
        origin: fx.Node,
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        made = self.graph.call_function(called, args, kwargs or {})
        made.meta = dict(origin.meta)
        return made


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)
