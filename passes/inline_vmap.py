"""What runs under `torch.vmap` becomes the batched operators that it comes to.

before  _vmap_increment_nesting(n); b = _add_batch_dim(x, 0, 1); y = add(b, 1)
        z = _remove_batch_dim(y, 1, n, 0); _vmap_decrement_nesting()
after   z = add(x, 1)

A trace holds the steps of vmap as calls that change a hidden state. Nothing may come between them,
and none may be left out, so they are traced once more, all together.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.dataflow import arguments
from fxpipe.spans import ends, run_node
from fxpipe.torch_functions import is_vmap_end, is_vmap_start


def inline_vmap(module: fx.GraphModule) -> fx.GraphModule:
    """The same computation without vmap, in the graph and in those of its blocks."""
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(module, name, inline_vmap(child))
    if not any(is_vmap_start(node.target) for node in module.graph.nodes):
        return module
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    span: list[fx.Node] = []
    depth = 0
    for node in module.graph.nodes:
        depth += is_vmap_start(node.target)
        if depth:
            span.append(node)
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
        depth -= is_vmap_end(node.target)
        if span and not depth:
            _batched(module, span, graph, env)
            span = []
    return fx.GraphModule(module, graph)


def _batched(
    module: fx.GraphModule, span: Sequence[fx.Node], graph: fx.Graph, env: dict[fx.Node, Any]
) -> None:
    """Write the operators that a span of nodes comes to."""
    inputs, outputs = ends(span)
    run = _runner(module, span, inputs, outputs)
    with torch.no_grad():
        traced = make_fx(run, tracing_mode="symbolic")([node.meta["val"] for node in inputs])
    holders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    local = {holder: env[node] for holder, node in zip(holders, inputs, strict=True)}
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            name = f"vmapped_{len(graph.nodes)}"
            setattr(module, name, attrgetter(str(node.target))(traced))
            local[node] = graph.get_attr(name)
        elif node.op == "call_function":
            local[node] = graph.node_copy(node, local.__getitem__)
        if node in local and node.op != "placeholder":
            local[node].meta = {**span[-1].meta, "val": node.meta.get("val")}
    results = arguments(traced.graph.output_node())[0]
    env.update(zip(outputs, map(local.__getitem__, results), strict=True))


def _runner(
    module: fx.GraphModule,
    span: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
) -> Callable[[list[Any]], list[Any]]:
    def run(values: list[Any]) -> list[Any]:
        made: dict[fx.Node, Any] = dict(zip(inputs, values, strict=True))
        for node in span:
            made[node] = run_node(module, node, made)
        return [made[node] for node in outputs]

    return run
