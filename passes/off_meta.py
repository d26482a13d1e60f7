"""A model without memory (the meta device) is compiled as if it were on the CPU.

before  x = arange(n, device=meta)        after  x = arange(n, device=cpu)

Autograd has no formulas for some operators on the meta device, and no kernels are chosen there.
"""

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.torch_internals import expression, fake_mode, map_leaves

META, CPU = torch.device("meta"), torch.device("cpu")


def off_meta(module: fx.GraphModule) -> fx.GraphModule:
    """The same computation with every tensor of the meta device on the CPU."""
    holders = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    if not any(isinstance(value, Tensor) and value.device == META for value in holders):
        return module
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    known: dict[Hashable, Tensor] = {}
    with fake_mode(holders):
        for node in module.graph.nodes:
            env[node] = made = graph.node_copy(node, env.__getitem__)
            made.args = fx.node.map_aggregate(made.args, _device)
            made.kwargs = fx.node.map_aggregate(made.kwargs, _device)
            if "val" in node.meta:
                # Only inputs must have memory of their own.
                seen = {} if node.op == "placeholder" else known
                made.meta = {
                    **node.meta,
                    "val": map_leaves(partial(_moved, seen), node.meta["val"]),
                }
    return fx.GraphModule(module, graph)


def _device(value: Any) -> Any:
    return CPU if isinstance(value, torch.device) and value == META else value


def _moved(known: dict[Hashable, Tensor], value: Any) -> Any:
    if not (isinstance(value, Tensor) and value.device == META):
        return value
    sizes = tuple(map(expression, (*value.shape, *value.stride())))
    found = known.get((sizes, value.dtype))
    if found is None:
        found = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CPU)
        known[sizes, value.dtype] = found
    return found
