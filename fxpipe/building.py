"""A graph copied node by node, with new nodes in between that know their traced values."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxpipe.torch_internals import fake_mode


class Builder:
    """The new graph, and the new node of every old one.

    Nodes that are added take module path and source line from the old node that they stand for.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        holders = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
        self.mode = fake_mode(holders)

    def read(self, node: fx.Node) -> Any:
        """What stands for an old node."""
        return self.env[node]

    def args(self, node: fx.Node) -> tuple[Any, ...]:
        """The arguments of an old node, as new ones."""
        found: tuple[Any, ...] = fx.node.map_arg(tuple(node.args), self.read)
        return found

    def copy(self, node: fx.Node) -> None:
        """Take over one old node."""
        if node.op == "output":
            self.graph.output(fx.node.map_arg(node.args[0], self.read))
            return
        self.env[node] = self.graph.node_copy(node, self.read)
        self.env[node].meta = dict(node.meta)

    def call(self, called: Callable[..., Any], origin: fx.Node, *args: Any, **kwargs: Any) -> Any:
        """A new node, with the value that it has under the trace's own fake tensors."""
        made = self.graph.call_function(called, args, kwargs)
        values, more = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
        with self.mode, torch.no_grad():
            made.meta = {**origin.meta, "val": called(*values, **more)}
        return made

    def finish(self) -> fx.GraphModule:
        """The module of the new graph."""
        self.graph.lint()
        return fx.GraphModule(self.module, self.graph)
