"""`with torch.no_grad():` blocks become plain nodes whose results are detached.

before  out = wrap_with_set_grad_enabled(False, submod, x)        after  y = linear(x, w)
        y = out[0]                                                       y_detached = detach(y)

A later pass may then put the two sides of such a block into different stages. A block that switches
autocast off is inlined as well; one that switches it on is refused.
"""

import operator
from typing import Any

import torch
from torch import fx

from fxpipe.dataflow import arguments, aten, differentiable, path
from fxpipe.errors import CaptureError

NO_GRAD = "no_grad"
WRAPPER = torch.ops.higher_order.wrap_with_set_grad_enabled
AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def inline_no_grad(module: fx.GraphModule) -> fx.GraphModule:
    """The same computation without wrapper nodes; nested blocks are inlined too."""
    if not any(node.target in (WRAPPER, AUTOCAST) for node in module.graph.nodes):
        return module
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.target in (WRAPPER, AUTOCAST):
            env[node] = _inline(module, node, graph, env)
        elif node.target is operator.getitem and isinstance(env.get(node.args[0]), tuple):
            env[node] = env[node.args[0]][node.args[1]]
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.eliminate_dead_code()
    return inline_no_grad(fx.GraphModule(module, graph))


def _inline(
    module: fx.GraphModule, node: fx.Node, graph: fx.Graph, env: dict[fx.Node, Any]
) -> tuple[Any, ...]:
    enabled, body, *operands = _block(node)
    inner = getattr(module, body.target)
    names = [n for n in inner.graph.nodes if n.op == "placeholder"]
    local = {name: env[operand] for name, operand in zip(names, operands, strict=True)}
    outputs = graph.graph_copy(inner.graph, local)
    if not enabled:
        for made_here in (local[n] for n in inner.graph.nodes if n.op == "call_function"):
            made_here.meta[NO_GRAD] = True
    for attribute in (n for n in inner.graph.nodes if n.op == "get_attr"):
        setattr(module, attribute.target, getattr(inner, attribute.target))
    made = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return tuple(value if enabled else _detached(graph, value) for value in made)


def _block(node: fx.Node) -> tuple[Any, ...]:
    """(with gradients, body, operands). Raises CaptureError where autocast is switched on."""
    if node.target is WRAPPER:
        return arguments(node)
    device, dtype, enabled, _, *rest = arguments(node)
    if enabled:
        raise CaptureError(
            f"module {path(node) or '(the model itself)'} runs under torch.autocast({device!r}, "
            f"{dtype}) inside forward, and its casts are no part of a graph. Cast by hand there, "
            "x.to(torch.bfloat16), or convert the model"
        )
    return True, *rest


def _detached(graph: fx.Graph, value: Any) -> Any:
    meta = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(meta, torch.Tensor) or not differentiable(meta):
        return value
    result = graph.call_function(aten.detach.default, (value,))
    result.meta = dict(value.meta)
    return result
