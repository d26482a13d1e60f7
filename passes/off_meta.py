"""A model without memory (the meta device) is compiled as if it were on the CPU.

before  x = arange(n, device=meta)        after  x = arange(n, device=cpu)

Autograd has no formulas for some operators on the meta device, and no kernels are chosen there.
"""

from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.torch_internals import fake_mode, map_leaves

META, CPU = torch.device("meta"), torch.device("cpu")


def off_meta(module: fx.GraphModule) -> fx.GraphModule:
    """The same computation with every tensor of the meta device on the CPU."""
    holders = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    if not any(isinstance(value, Tensor) and value.device == META for value in holders):
        return module
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    with fake_mode(holders):
        for node in module.graph.nodes:
            env[node] = made = graph.node_copy(node, env.__getitem__)
            made.args = fx.node.map_aggregate(made.args, _device)
            made.kwargs = fx.node.map_aggregate(made.kwargs, _device)
            if "val" in node.meta:
                made.meta = {**node.meta, "val": map_leaves(_moved, node.meta["val"])}
    return fx.GraphModule(module, graph)


def _device(value: Any) -> Any:
    return CPU if isinstance(value, torch.device) and value == META else value


def _moved(value: Any) -> Any:
    if isinstance(value, Tensor) and value.device == META:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CPU)
    return value
