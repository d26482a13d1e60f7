"""Which nodes of a graph are numbers that follow from the sizes of the microbatch.

Every rank has these sizes, so no such number ever crosses: a size is an input of each stage that
reads it, and what is computed from sizes (a ratio) is computed in each.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from fxpipe.torch_internals import is_unbacked


def carries_tensor(node: fx.Node) -> bool:
    """Whether a node's value is a tensor, or a tuple of them, and no size."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) or (
        isinstance(value, (tuple, list)) and any(isinstance(item, Tensor) for item in value)
    )


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number that follows from the microbatch's sizes alone.

    `_local_scalar_dense` and the sizes of data-dependent results are numbers too, but only the
    rank that runs their tensors knows them.
    """
    cached: bool | None = node.meta.get("is_size")
    if cached is None:
        cached = node.meta["is_size"] = _is_size(node)
    return cached


def _is_size(node: fx.Node) -> bool:
    if node.op != "call_function" or carries_tensor(node):
        return False
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return not is_unbacked(value) and all(
            carries_tensor(source) or is_size(source) for source in node.all_input_nodes
        )
    return isinstance(value, int) and all(map(is_size, node.all_input_nodes))


def is_ratio(node: fx.Node) -> bool:
    """Whether a node is a number that is computed from sizes, and no size itself: `1 / length`."""
    if node.op != "call_function" or carries_tensor(node) or is_size(node):
        return False
    value = node.meta.get("val")
    numbers = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    known = isinstance(value, numbers) and not is_unbacked(value)
    return known and all(is_size(n) or is_ratio(n) for n in node.all_input_nodes)


def ratios_behind(graph: fx.Graph, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The ratios that nodes read, and those that these are computed from, in order."""
    wanted = {source for node in nodes for source in node.all_input_nodes}
    found = []
    for node in reversed(graph.nodes):
        if node in wanted and is_ratio(node):
            found.append(node)
            wanted.update(node.all_input_nodes)
    return found[::-1]
