"""In-place writes become values: no node of the result changes a tensor that another one reads.

before  s = select(x, 1, 0); fill_(s, 0); y = add(x, 1)
after   s = select(x, 1, 0); s2 = fill(s, 0); x2 = select_scatter(x, s2, 1, 0); y = add(x2, 1)

A stage may then end between a write and a later read of the same storage.
"""

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from fxpipe.errors import CaptureError
from fxpipe.torch_internals import fake_mode, guarding

_HARMLESS = {torch.ops.aten.detach_.default: torch.ops.aten.detach.default}


def functionalise(module: fx.GraphModule) -> fx.GraphModule:
    """The same computation without in-place operators; names of origin are kept."""
    graph = fx.Graph()
    output = graph.graph_copy(module.graph, {})
    graph.output(output)
    for node in graph.nodes:
        node.target = _HARMLESS.get(node.target, node.target)
    plain = fx.GraphModule(module, graph)
    return _retraced(plain) if any(map(_writes, graph.nodes)) else plain


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _retraced(module: fx.GraphModule) -> fx.GraphModule:
    holders = [node for node in module.graph.nodes if node.op == "placeholder"]
    values = [node.meta["val"] for node in holders]
    mode = fake_mode(values)

    def run(*args: Any) -> Any:
        return fx.Interpreter(module).run(*args)

    functional = torch.func.functionalize(run)
    try:
        with guarding(mode), preserve_node_meta():
            traced = make_fx(functional, tracing_mode="symbolic", pre_dispatch=True)(*values)
    except Exception as error:
        raise CaptureError(_explain(module, error)) from error
    for old, new in zip(holders, traced.graph.nodes, strict=False):
        new.name, new.target = old.name, old.target
    traced.recompile()
    return traced


def _explain(module: fx.GraphModule, error: Exception) -> str:
    written = next(node for node in module.graph.nodes if _writes(node))
    lines = str(written.meta.get("stack_trace", "")).strip().splitlines()
    where = " ".join(line.strip() for line in lines[-2:]) or written.format_node()
    cause = str(error).splitlines()[0]
    return (
        f"the in-place operator {written.target} ({where}) cannot be turned into a value: {cause}. "
        "Write it out of place: y = x * 2 for x.mul_(2), torch.where for a masked write"
    )
