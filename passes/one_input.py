"""One input for each tensor of the model, however many names it has.

    tied(module, labels)   of the inputs for one tensor, only the first is read
    tidy(module, labels)   only the first is there, under a readable name

Between the two come the passes that match inputs with labels, one by one. labels: of each input,
the name of its tensor, and whether that is the model's own.
"""

import re
from collections.abc import Sequence

import torch
from torch import fx

_ASSERT_METADATA = torch.ops.aten._assert_tensor_metadata.default
Label = tuple[str, bool]


def tied(module: fx.GraphModule, labels: Sequence[Label]) -> fx.GraphModule:
    """A copy, since nodes of an exported graph do not know all their users where torch has cut out
    a part without gradients, and nothing can be replaced in it."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    first: dict[str, fx.Node] = {}
    names = iter(labels)
    for node in module.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        if node.op == "placeholder":
            name, is_state = next(names)
            if is_state:
                env[node] = first.setdefault(name, env[node])
    return fx.GraphModule(module, graph)


def tidy(module: fx.GraphModule, labels: Sequence[Label]) -> tuple[fx.GraphModule, dict[str, str]]:
    """The graph without asserts on metadata; and the tensor of the model that each input is."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    first: dict[str, fx.Node] = {}
    names = iter(labels)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            name, is_state = next(names)
            if is_state and name in first:
                env[node] = first[name]
                continue
            env[node] = graph.placeholder(input_name(f"p_{name}" if is_state else name))
            env[node].meta = dict(node.meta)
            if is_state:
                first[name] = env[node]
        elif node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], env.__getitem__))
        elif node.target is not _ASSERT_METADATA:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph), {node.name: name for name, node in first.items()}


def input_name(name: str) -> str:
    """What a graph calls an input."""
    return re.sub(r"\W+", "_", name)
