"""In-place writes become values: no node of the result changes a tensor that another one reads.

before  s = select(x, 1, 0); fill_(s, 0); y = add(x, 1)
after   s = select(x, 1, 0); s2 = fill(s, 0); x2 = select_scatter(x, s2, 1, 0); y = add(x2, 1)

A stage may then end between a write and a later read of the same storage.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.dataflow import CUTS_GRADIENT, alias_of, arguments, aten, function, is_in_place, path
from fxpipe.errors import CaptureError
from fxpipe.passes.inline_no_grad import NO_GRAD


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
        if source is not None:
            self.parent[node] = source
            self.seen[node] = self.version.get(self._root(node), 0)

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
            made.target = _counterpart(node)
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
        target = node.args[0]
        if not isinstance(target, fx.Node):
            raise CaptureError(_refusal(node, "it writes to several tensors at once"))
        target = self.same.get(target, target)
        value = self._value(node, target)
        if node.meta.get(NO_GRAD):
            value_of = target.meta["val"]
            floating = value_of.is_floating_point() or value_of.is_complex()
            if floating and self._is_tracked(target):
                why = "under no_grad it changes a value that has a gradient; use x = x.detach()"
                raise CaptureError(_refusal(node, why))
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
        value = self._call(_counterpart(node), args, node, kwargs)
        dtypes = {n.meta["val"].dtype for n in node.all_input_nodes if _is_tensor(n)}
        if len(dtypes) > 1:
            value = self._call(aten.to.dtype, (value, target.meta["val"].dtype), node)
        return value

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
            parent = self.same.get(self.parent[target], self.parent[target])
            self._store(parent, self._scatter(target, parent, value, write), write)
        else:
            self.version[root] = self.version.get(root, 0) + 1
        self.env[target] = value
        self.seen[target] = self.version[root]

    def _scatter(self, view: fx.Node, parent: fx.Node, value: fx.Node, write: fx.Node) -> fx.Node:
        """The parent's value with the part that `view` shows replaced."""
        rule = _SCATTER.get(view.target)
        if view.target is aten.detach.default and not self._is_tracked(parent):
            rule = _itself
        if rule is None:
            why = f"it writes through {view.target}, and fxpipe cannot write its result back"
            raise CaptureError(_refusal(write, why))
        result = self._call(*rule(view, self.read(parent), value, self.read), write)
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


def _counterpart(node: fx.Node) -> Callable[..., Any]:
    """The operator that makes a new tensor, or a view, of what `node` does in place."""
    name = function(node).overloadpacket.__name__.removesuffix("_")
    packet = getattr(aten, name, None) if function(node).namespace == "aten" else None
    overload: Any = getattr(packet, function(node)._overloadname, None)
    if overload is None or overload._schema.is_mutable or name in ("resize", "set"):
        raise CaptureError(_refusal(node, "it has no counterpart that makes a new tensor"))
    return overload  # type: ignore[no-any-return]


def _refusal(node: fx.Node, why: str) -> str:
    lines = str(node.meta.get("stack_trace", "")).strip().splitlines()
    where = " ".join(line.strip() for line in lines[-2:]) or node.format_node()
    return (
        f"module {path(node) or '(the model itself)'}: the in-place operator {node.target} "
        f"({where}) cannot become a value: {why}. Write it out of place: y = x * 2 for x.mul_(2), "
        "torch.where for a masked write"
    )


Call = tuple[Callable[..., Any], tuple[Any, ...]]
Reader = Callable[[fx.Node], fx.Node]


def _rest(view: fx.Node, read: Reader) -> tuple[Any, ...]:
    rest: tuple[Any, ...] = fx.node.map_arg(tuple(view.args[1:]), read)
    return rest


def _by(scatter: Callable[..., Any]) -> Callable[..., Call]:
    """The scatter operator that takes the view's own arguments."""
    return lambda view, base, value, read: (scatter, (base, value, *_rest(view, read)))


def _same_order(view: fx.Node, base: fx.Node, value: fx.Node, read: Reader) -> Call:
    return aten.reshape_as.default, (value, base)


def _itself(view: fx.Node, base: fx.Node, value: fx.Node, read: Reader) -> Call:
    return aten.alias.default, (value,)


def _swapped(view: fx.Node, base: fx.Node, value: fx.Node, read: Reader) -> Call:
    return function(view), (value, *_rest(view, read))


def _permuted(view: fx.Node, base: fx.Node, value: fx.Node, read: Reader) -> Call:
    dims = arguments(view)[1]
    count = len(dims)
    order = [dim % count for dim in dims]
    return aten.permute.default, (value, [order.index(dim) for dim in range(count)])


_SCATTER: Mapping[Any, Callable[..., Call]] = {
    aten.slice.Tensor: _by(aten.slice_scatter.default),
    aten.select.int: _by(aten.select_scatter.default),
    aten.diagonal.default: _by(aten.diagonal_scatter.default),
    **dict.fromkeys(
        [
            aten.view.default,
            aten.reshape.default,
            aten.flatten.using_ints,
            aten.unflatten.int,
            aten.unsqueeze.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.view_as.default,
            aten.unsqueeze_.default,
            aten.squeeze_.default,
            aten.squeeze_.dim,
        ],
        _same_order,
    ),
    **dict.fromkeys(
        [
            aten.alias.default,
            aten.contiguous.default,
            aten.to.dtype,
            aten.to.dtype_layout,
            aten.to.device,
            aten.to.other,
            aten.type_as.default,
            aten.dropout.default,
        ],
        _itself,
    ),
    **dict.fromkeys([aten.transpose.int, aten.t.default], _swapped),
    aten.permute.default: _permuted,
}
