"""Chains of repeated blocks: what a model's `nn.ModuleList` of layers looks like in its graph.

A chain is the children `parent.0, parent.1, ...` of one module, each of which reads what the one
before has made. Names of models and of classes play no part.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from fxpipe.dataflow import calls, data_inputs, module_class, path, repetition, spread


@dataclass(frozen=True)
class Chain:
    """parent: the path of the list; blocks: the nodes of each block, in order of execution."""

    parent: str
    blocks: tuple[tuple[fx.Node, ...], ...]

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes of all blocks."""
        return [node for block in self.blocks for node in block]


def find_chains(graph: fx.Graph) -> list[Chain]:
    """The outermost chains of a graph, in order of execution; no node is in two of them."""
    lists = _numbered_children(graph)
    chains = {parent: _chain(graph, parent, found) for parent, found in lists.items()}
    serial = {p: c for p, c in chains.items() if len(c.blocks) > 1 and _is_serial(graph, c)}
    single = {p: c for p, c in chains.items() if len(c.blocks) == 1}
    accepted: dict[str, Chain] = {}
    for parent in sorted(serial, key=lambda p: p.count(".") + bool(p)):
        if not _inside(parent, accepted) and (
            _repeats(serial[parent]) or not _holds(parent, serial)
        ):
            accepted[parent] = serial[parent]
    for parent in sorted(single, key=len, reverse=True):
        if not _inside(parent, accepted) and not _holds(parent, accepted):
            accepted[parent] = single[parent]
    if not accepted:
        accepted = {chain.parent: chain for chain in _children(graph)}
    order = {node: index for index, node in enumerate(graph.nodes)}
    return sorted(accepted.values(), key=lambda chain: order[chain.blocks[0][0]])


def _numbered_children(graph: fx.Graph) -> Mapping[str, Mapping[str, list[fx.Node]]]:
    """parent path -> number -> nodes, for every numbered module at any depth.

    A module that runs again is another block each time: `0`, `1`, `0@1`.
    """
    lists: dict[str, dict[str, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
    for node in calls(graph):
        parts = path(node).split(".")
        for depth, part in enumerate(parts):
            if part.isdigit():
                block = part + repetition(node, ".".join(parts[: depth + 1]))
                lists[".".join(parts[:depth])][block].append(node)
    return lists


def _children(graph: fx.Graph) -> list[Chain]:
    """In a model without numbered blocks: the modules that run one after another, as blocks."""
    paths = [path(node).split(".") for node in calls(graph) if path(node)]
    depth = 0
    while paths and all(
        len(p) > depth + 1 and p[: depth + 1] == paths[0][: depth + 1] for p in paths
    ):
        depth += 1
    found: dict[str, list[fx.Node]] = defaultdict(list)
    for node in calls(graph):
        parts = path(node).split(".")
        if path(node) and len(parts) > depth:
            found[parts[depth]].append(node)
    chain = Chain(".".join(paths[0][:depth]) if paths else "", tuple(map(tuple, found.values())))
    return [chain] if len(chain.blocks) > 1 and _is_serial(graph, chain) else []


def _chain(graph: fx.Graph, parent: str, found: Mapping[str, list[fx.Node]]) -> Chain:
    """The blocks in order of execution; without those that run again beside the others."""
    whole = Chain(parent, tuple(map(tuple, found.values())))
    if _is_serial(graph, whole):
        return whole
    return Chain(parent, tuple(tuple(nodes) for name, nodes in found.items() if "@" not in name))


def _is_serial(graph: fx.Graph, chain: Chain) -> bool:
    own = {node: 1 << i for i, block in enumerate(chain.blocks) for node in block}
    bits = spread(graph, own)
    return all(
        any(bits[source] >> (i - 1) & 1 for node in chain.blocks[i] for source in data_inputs(node))
        for i in range(1, len(chain.blocks))
    )


def _repeats(chain: Chain) -> bool:
    """Whether two blocks are of one class or run the same operators."""
    classes = Counter(
        module_class(block[0], _child(chain.parent, block[0])) for block in chain.blocks
    )
    shapes = Counter(
        frozenset(Counter(str(node.target) for node in block).items()) for block in chain.blocks
    )
    return max(classes.values()) > 1 or max(shapes.values()) > 1


def _child(parent: str, node: fx.Node) -> str:
    depth = parent.count(".") + 1 if parent else 0
    return ".".join(path(node).split(".")[: depth + 1])


def _inside(parent: str, accepted: Mapping[str, Chain]) -> bool:
    return any(_is_under(parent, outer) for outer in accepted)


def _holds(parent: str, others: Mapping[str, Chain]) -> bool:
    return any(other != parent and _is_under(other, parent) for other in others)


def _is_under(inner: str, outer: str) -> bool:
    return inner == outer or outer == "" or inner.startswith(f"{outer}.")
