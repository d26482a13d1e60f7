"""Spans: nodes of a graph that follow one another, seen from the rest of it."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import fx

from fxpipe.dataflow import arguments, function

Nodes = tuple[fx.Node, ...]


def ends(nodes: Sequence[fx.Node]) -> tuple[Nodes, Nodes]:
    """What a span reads of the rest of the graph, and what of it is read there."""
    inside = set(nodes)
    read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
    inputs = tuple(node for node in read if node not in inside)
    return inputs, tuple(n for n in nodes if any(user not in inside for user in n.users))


def run_node(owner: fx.GraphModule, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
    """What one node gives. owner: the module that holds the graph's attributes."""
    if node.op == "get_attr":
        return attrgetter(str(node.target))(owner)
    args = fx.node.map_arg(arguments(node), env.__getitem__)
    kwargs = fx.node.map_arg(node.kwargs, env.__getitem__)
    return function(node)(*args, **kwargs)
