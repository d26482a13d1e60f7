"""One forward graph per stage, and the seams: the values that a stage makes and another reads.

Seams are found from uses that cross, never declared: skip connections, DeepStack features and
trained biases that many layers read are ordinary seams, straight from maker to reader.
Sizes never cross: every stage gets the integers that it needs as inputs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxpipe.asides import place_asides
from fxpipe.capture import Captured
from fxpipe.dataflow import aside, calls, data_inputs, path
from fxpipe.errors import StageError, UnknownCrossingError
from fxpipe.passes.stages import Staging
from fxpipe.sizes import is_size, ratios_behind
from fxpipe.torch_internals import expression, is_unbacked


@dataclass(frozen=True)
class Value:
    """A tensor that crosses a seam: its symbolic shape and its dtype."""

    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Stage:
    """The forward of one stage.

    graph: (state, fields, sizes, received) -> (sent, terms, stats); each in the order given here
    state: placeholders of parameters, buffers and constants; fields: of the microbatch's tensors
    sizes: placeholder -> the integer, as an expression of the microbatch's symbols
    received, sent: values that cross seams; terms: which of the model's loss terms, and of the
    other values that it returns, are born here
    stats: what updates of buffers read; moving: those of `state` that change with the microbatch
    """

    name: str
    region: str
    graph: fx.GraphModule
    state: tuple[str, ...]
    fields: tuple[str, ...]
    sizes: Mapping[str, sympy.Expr]
    received: tuple[str, ...]
    sent: tuple[str, ...]
    terms: tuple[int, ...]
    stats: tuple[str, ...] = ()
    moving: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(calls(self.graph.graph))} nodes, reads {list(self.received)}, "
            f"makes {list(self.sent)}{' and a loss' * bool(self.terms)}"
        )


@dataclass(frozen=True)
class Stages:
    """All stages in topological order; links: (source, target) -> the values that cross.

    values: what crosses, and what stages compute for updates of buffers
    """

    stages: Mapping[str, Stage]
    links: Mapping[tuple[str, str], tuple[str, ...]]
    values: Mapping[str, Value]

    def __str__(self) -> str:
        return "\n".join(map(str, self.stages.values()))

    def __getitem__(self, name: str) -> Stage:
        return self.stages[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)


def split(captured: Captured, staging: Staging) -> Stages:
    """The stages' forward graphs. Raises StageError when a value cannot cross between stages."""
    links: dict[tuple[str, str], dict[fx.Node, None]] = {}
    staging, stats = place_asides(captured, staging)
    order = {stage: index for index, stage in enumerate(staging.region)}
    for node in _nodes(captured):
        for stage in staging.of[node]:
            for source in data_inputs(node):
                if source.op == "call_function" and stage not in staging.of[source]:
                    maker = staging.of[source][0]
                    _check_crossing(source, maker, stage, order)
                    links.setdefault((maker, stage), {})[source] = None
    stages = {
        name: _stage(captured, staging, name, links, stats.get(name, ())) for name in staging.region
    }
    crossing = {node for nodes in (*links.values(), *stats.values()) for node in nodes}
    values = {node.name: _value(node) for node in crossing}
    ordered = sorted(links, key=lambda pair: (order[pair[0]], order[pair[1]]))
    names = {pair: tuple(node.name for node in links[pair]) for pair in ordered}
    return Stages(stages, names, values)


def _nodes(captured: Captured) -> list[fx.Node]:
    """What the loss needs, and what stands aside, in order."""
    needed = set(calls(captured.graph.graph))
    return [node for node in captured.graph.graph.nodes if node in needed or aside(node)]


def _check_crossing(node: fx.Node, maker: str, reader: str, order: Mapping[str, int]) -> None:
    where = f"{node.name} (module {path(node) or 'root'})"
    if order[maker] > order[reader]:
        raise StageError(f"stage {reader} reads {where}, which the later stage {maker} makes")
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        raise StageError(
            f"{where} is a number read from a tensor, made in stage {maker} and used in {reader}; "
            "only tensors cross between stages: put both modules into one region with regions="
        )
    if value.layout is not torch.strided:
        raise StageError(
            f"{where} is a sparse tensor, made in stage {maker} and used in {reader}; only dense "
            "ones cross between stages: cross with x.to_dense()"
        )
    if any(map(is_unbacked, value.shape)):
        raise UnknownCrossingError(
            f"{where} crosses from stage {maker} to {reader} and its shape {list(value.shape)} "
            "depends on values that weights or activations decide: its reader cannot know the "
            "size. Keep both in one region with regions="
        )


def _value(node: fx.Node) -> Value:
    value = node.meta["val"]
    return Value(tuple(map(expression, value.shape)), value.dtype)


def _stage(
    captured: Captured,
    staging: Staging,
    name: str,
    links: Mapping[tuple[str, str], Mapping[fx.Node, None]],
    stats: tuple[fx.Node, ...],
) -> Stage:
    nodes = [node for node in _nodes(captured) if name in staging.of[node]]
    received = dict.fromkeys(n for (_, to), found in links.items() if to == name for n in found)
    sent = dict.fromkeys(n for (by, _), found in links.items() if by == name for n in found)
    ratios = ratios_behind(captured.graph.graph, nodes)
    inputs = (n for node in (*nodes, *ratios) for n in node.all_input_nodes)
    read = dict.fromkeys([*inputs, *stats])
    holders = [n for n in captured.graph.graph.nodes if n.op == "placeholder" and n in read]
    sizes = [n for n in read if is_size(n)]
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    holders.sort(key=lambda holder: holder.name not in captured.state)
    env.update((holder, graph.node_copy(holder)) for holder in holders)
    numbers = _number_inputs(graph, sizes, env)
    env.update((node, _arriving(graph, node)) for node in received)
    for node in (*ratios, *nodes):
        env[node] = graph.node_copy(node, env.__getitem__)
    terms = [i for i, term in enumerate(captured.ends) if staging.of[term] == (name,)]
    born = tuple(env[captured.ends[i]] for i in terms)
    graph.output((tuple(env[n] for n in sent), born, tuple(env[n] for n in stats)))
    graph.lint()
    return Stage(
        name,
        staging.region[name],
        fx.GraphModule(captured.graph, graph),
        tuple(h.name for h in holders if h.name in captured.state),
        tuple(h.name for h in holders if h.name not in captured.state),
        numbers,
        tuple(node.name for node in received),
        tuple(node.name for node in sent),
        tuple(terms),
        tuple(node.name for node in stats),
        tuple(h.name for h in holders if captured.moves(h.name)),
    )


def _arriving(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A placeholder for a value of another stage."""
    holder = graph.placeholder(node.name)
    holder.meta = {"val": node.meta["val"]}
    return holder


def _number_inputs(
    graph: fx.Graph, sizes: list[fx.Node], env: dict[fx.Node, Any]
) -> dict[str, sympy.Expr]:
    """One placeholder for each distinct symbolic size; a constant size is written out."""
    by_expr: dict[sympy.Expr, fx.Node] = {}
    for node in sizes:
        expr = expression(node.meta["val"])
        if expr.is_number:
            env[node] = int(expr)
            continue
        if expr not in by_expr:
            by_expr[expr] = graph.placeholder(f"size_{len(by_expr)}")
            by_expr[expr].meta = {"val": node.meta["val"]}
        env[node] = by_expr[expr]
    return {node.name: expr for expr, node in by_expr.items()}
