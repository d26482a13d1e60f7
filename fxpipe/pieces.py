"""The stages' forward graphs in pieces: their blocks, and what stands between blocks.

Blocks of a model are much alike. Two pieces with one text run the same operators on the same
arguments, so that one trace serves both (`fxpipe.tracing`).
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.dataflow import path, repetition
from fxpipe.spans import ends, run_node
from fxpipe.split import Stages
from fxpipe.symbols import same_unbacked, unbacked_sizes
from fxpipe.torch_internals import is_unbacked

SMALL = 24  # nodes of a block that is not worth to be cut further


@dataclass(frozen=True)
class Piece:
    """Nodes of a stage's graph that follow one another.

    inputs: what they read of the rest of the stage; outputs: what of them is read outside, by other
    pieces or by other stages; owner: the module that holds the graph's attributes
    """

    owner: fx.GraphModule
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @cached_property
    def text(self) -> Hashable:
        """Operators and arguments, nodes by position: what the piece computes of its inputs."""
        places = [*self.inputs, *self.nodes]
        place = {node: f"%{i}" for i, node in enumerate(places)}
        lines = [_line(self.owner, node, place) for node in self.nodes]
        return tuple(lines), len(self.inputs), tuple(place[node] for node in self.outputs)

    def run(self, values: Sequence[Any]) -> list[Any]:
        """The outputs for values of the inputs."""
        env = dict(zip(self.inputs, values, strict=True))
        for node in self.nodes:
            env[node] = run_node(self.owner, node, env)
            same_unbacked(node.meta.get("val"), env[node])
        return [env[node] for node in self.outputs]


def cut_into_pieces(stages: Stages) -> dict[str, list[Piece]]:
    """The pieces of every stage, in order.

    A piece is a numbered module, or what stands between two of them. One that is like no other of
    the model is cut again, at the numbered modules inside it.
    """
    runs = {name: _parted(_body(stages, name), 0) for name in stages}
    for depth in range(1, max((len(_numbered(n)) for n in _nodes(runs)), default=0)):
        found = {name: [_piece(stages, name, run) for run in runs[name]] for name in stages}
        known = Counter(piece.text for pieces in found.values() for piece in pieces)
        for name, pieces in found.items():
            deeper = [_parted(p.nodes, depth) if known[p.text] == 1 else [p.nodes] for p in pieces]
            runs[name] = [run for parts in deeper for run in parts]
    return {name: _legal(stages, name, runs[name]) for name in stages}


Run = Sequence[fx.Node]


def _body(stages: Stages, name: str) -> Run:
    graph = stages[name].graph.graph
    return tuple(n for n in graph.nodes if n.op not in ("placeholder", "output"))


def _nodes(runs: Mapping[str, Sequence[Run]]) -> Iterator[fx.Node]:
    return (node for found in runs.values() for run in found for node in run)


def _parted(nodes: Run, depth: int) -> list[Run]:
    """Runs of nodes that are in one numbered module of a depth, or in none."""
    if len(nodes) <= SMALL:
        return [nodes]
    runs: dict[int, list[fx.Node]] = defaultdict(list)
    before, count = "", 0
    for node in nodes:
        prefixes = _numbered(node)
        own = prefixes[depth] if depth < len(prefixes) else ""
        count += own != before
        before = own
        runs[count].append(node)
    return list(runs.values())


def _numbered(node: fx.Node) -> list[str]:
    """The numbered modules around a node, the outermost first; a second run is another one."""
    found: list[str] | None = node.meta.get("numbered")
    if found is None:
        parts = path(node).split(".")
        prefixes = [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]
        found = node.meta["numbered"] = [p + repetition(node, p) for p in prefixes]
    return found


def _legal(stages: Stages, name: str, runs: Sequence[Run]) -> list[Piece]:
    """The pieces, joined where something would cross between them that is no plain tensor."""
    body = _body(stages, name)
    order = {node: i for i, node in enumerate(body)}
    last: dict[int, int] = {}
    for node in body:
        if not _may_cross(node):
            last[order[node]] = max((order.get(u, len(body)) for u in node.users), default=0)
    joined: list[list[fx.Node]] = []
    open_until = -1
    for run in runs:
        if joined and order[run[0]] <= open_until:
            joined[-1].extend(run)
        else:
            joined.append(list(run))
        open_until = max([open_until, *(last.get(order[node], -1) for node in run)])
    return [_piece(stages, name, run) for run in joined]


def _may_cross(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not any(map(is_unbacked, value.shape))


def _piece(stages: Stages, name: str, nodes: Run) -> Piece:
    return Piece(stages[name].graph, tuple(nodes), *ends(nodes))


def _line(owner: fx.GraphModule, node: fx.Node, place: Mapping[fx.Node, str]) -> Hashable:
    if node.op == "get_attr":
        return "attribute", id(attrgetter(str(node.target))(owner))
    args = _text(node.args, place)
    unknown = tuple(map(str, unbacked_sizes(node.meta.get("val"))))
    return node.target, args, _text(tuple(sorted(node.kwargs.items())), place), unknown


def _text(value: Any, place: Mapping[fx.Node, str]) -> Hashable:
    """An argument, to be compared: 1, 1.0 and True are three arguments."""
    if isinstance(value, fx.Node):
        return place[value]
    if isinstance(value, (list, tuple)):
        return tuple(_text(item, place) for item in value)
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return value
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return type(value), repr(value)
    return "unlike any other", id(value)
