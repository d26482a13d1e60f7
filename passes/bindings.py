"""Operators of a graph are called by Python's own bindings, which take half as long to be called.

before  view = torch.ops.aten.reshape.default(mm, [8, 128])   after  view = mm.reshape([8, 128])
        t = torch.ops.aten.t.default(p_weight)                       mm_1 = torch.mm(view, p_weight)
        t_1 = torch.ops.aten.t.default(t)
        mm_1 = torch.ops.aten.mm.default(view, t_1)

A call of `torch.ops` goes by the operator's schema, value for value. The same kernels run, in the
same order, but for views that undo or repeat one another. Only what a binding is known to pass on
unchanged is rewritten; `tests/cpu/test_bindings.py` looks at each.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from fxpipe.dataflow import aten
from fxpipe.torch_internals import keep_signature

METHODS: Mapping[Any, str] = {
    aten.t.default: "t",
    aten.transpose.int: "transpose",
    aten.permute.default: "permute",
    aten.reshape.default: "reshape",
    aten.view.default: "view",
    aten.expand.default: "expand",
    aten.select.int: "select",
    aten.unsqueeze.default: "unsqueeze",
    aten.squeeze.dim: "squeeze",
    aten.split_with_sizes.default: "split_with_sizes",
    aten.masked_fill.Scalar: "masked_fill",
    aten.unbind.int: "unbind",
    aten.contiguous.default: "contiguous",
    aten.clone.default: "clone",
}
FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.addmm.default: torch.addmm,
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.neg.default: torch.neg,
    aten.exp.default: torch.exp,
    aten.cos.default: torch.cos,
    aten.sin.default: torch.sin,
    aten.relu.default: torch.relu,
    aten.rsqrt.default: torch.rsqrt,
    aten.sigmoid.default: torch.sigmoid,
    aten.tanh.default: torch.tanh,
    aten.where.self: torch.where,
    aten.cat.default: torch.cat,
    aten.stack.default: torch.stack,
    aten.sum.dim_IntList: torch.sum,
    aten.mean.dim: torch.mean,
    aten.embedding.default: torch.embedding,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.native_group_norm.default: torch.native_group_norm,
    aten.convolution.default: torch.convolution,
    aten.gelu.default: functional.gelu,
}

_REPEATED = (aten.t.default, aten.reshape.default)


def bindings(module: fx.GraphModule) -> fx.GraphModule:
    """The same computation, its operators called by their bindings where there are some."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        env[node] = _shorter(node, env) or graph.node_copy(node, env.__getitem__)
    for node in reversed(graph.nodes):
        if node.target in _REPEATED and not node.users:
            graph.erase_node(node)
    for node in graph.nodes:
        _bind(node)
    keep_signature(module.graph, graph)
    return fx.GraphModule(module, graph)


def _shorter(node: fx.Node, env: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """What does the same as a view of a view that nothing else reads; None for other nodes."""
    if node.target not in _REPEATED or not isinstance(node.args[0], fx.Node):
        return None
    before = node.args[0]
    if before.target is not node.target or not isinstance(before.args[0], fx.Node):
        return None
    base = env[before.args[0]]
    if node.target is aten.t.default:
        return base
    if len(before.users) > 1:  # it may be a copy, which is not to be made twice
        return None
    shape = fx.node.map_arg(node.args[1], env.__getitem__)
    made = base.graph.call_function(aten.reshape.default, (base, shape))
    made.meta = dict(node.meta)
    return made


def _bind(node: fx.Node) -> None:
    first = node.args[0] if node.args else None
    if node.op != "call_function" or not _of_tensors(first):
        return
    if node.target in METHODS:
        node.op, node.target = "call_method", METHODS[node.target]
    elif node.target in FUNCTIONS:
        node.target = FUNCTIONS[node.target]


def _of_tensors(argument: Any) -> bool:
    """Whether an argument is a tensor or a list of them: some bindings take numbers otherwise."""
    values = argument if isinstance(argument, (list, tuple)) else (argument,)
    return all(isinstance(v, fx.Node) and isinstance(v.meta.get("val"), Tensor) for v in values)
