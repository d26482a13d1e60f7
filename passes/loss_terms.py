"""The scalar loss is split into the terms that it is a sum of.

before  return (add(text, mul(image, 0.5)),)        after  return (text, mul(image, 0.5))

Each term then starts its own backward in the stage where it is made: no stage waits for the
value of another one's loss. The gradient of a sum is the same for each of its terms.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxpipe.dataflow import arguments, aten, function, is_random


def loss_terms(module: fx.GraphModule, others: int = 0) -> fx.GraphModule:
    """The graph with one output per additive term; a loss that is no sum stays one term.

    others: how many values follow the loss, if there is one; each becomes a detached node.
    """
    graph = fx.Graph()
    outputs: Any = graph.graph_copy(module.graph, {})
    first = len(outputs) - others
    terms = [term for loss in outputs[:first] for term in _terms(graph, loss)]
    output = graph.output((*terms, *outputs[first:]))
    # Unused random operators count as impure, attention without dropout among them.
    graph.eliminate_dead_code(lambda node: node.is_impure() and not is_random(node))
    with graph.inserting_before(output):
        ends = arguments(output)[0]
        born = [_born(graph, term) for term in ends[: len(terms)]]
        output.args = ((*born, *(_detached(graph, value) for value in ends[len(terms) :])),)
    graph.lint()
    return fx.GraphModule(module, graph)


def _born(graph: fx.Graph, term: fx.Node) -> fx.Node:
    """A node that is the term alone: a parameter, an input, or a value that is used elsewhere too
    may be in several stages, and a loss must be made in one."""
    if term.op != "placeholder" and len(term.users) == 1:
        return term
    own = graph.call_function(aten.mul.Tensor, (term, 1))
    own.meta = dict(term.meta)
    return own


def _detached(graph: fx.Graph, value: fx.Node) -> fx.Node:
    own = graph.call_function(aten.detach.default, (value,))
    own.meta = dict(value.meta)
    return own


def _terms(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    match node.target, node.args:
        case (aten.add.Tensor, (fx.Node() as a, fx.Node() as b)) if _scalars(node, a, b):
            return [_as(graph, node, term) for part in (a, b) for term in _terms(graph, part)]
        case (aten.mul.Tensor, (fx.Node() as a, int() | float() as c)) if _additive(node, a):
            return _scaled(graph, node, a, lambda term: (term, c))
        case (aten.mul.Tensor, (int() | float() as c, fx.Node() as a)) if _additive(node, a):
            return _scaled(graph, node, a, lambda term: (c, term))
        case (aten.div.Tensor, (fx.Node() as a, int() | float() as c)) if _additive(node, a):
            return _scaled(graph, node, a, lambda term: (term, c))
    return [node]


def _scalars(node: fx.Node, *operands: fx.Node) -> bool:
    """Whether splitting changes no shape (a scalar plus a scalar)."""
    values = [operand.meta["val"] for operand in operands]
    return not node.kwargs and all(isinstance(v, torch.Tensor) and v.dim() == 0 for v in values)


def _additive(node: fx.Node, operand: fx.Node) -> bool:
    """Whether splitting changes no dtype and no shape (a scalar times a number)."""
    if not _scalars(node, operand):
        return False
    same: bool = operand.meta["val"].dtype == node.meta["val"].dtype
    return same


def _as(graph: fx.Graph, whole: fx.Node, term: fx.Node) -> fx.Node:
    """The term in the dtype of the sum, which a text loss in float32 beside one in bfloat16 has."""
    dtype = whole.meta["val"].dtype
    if term.meta["val"].dtype == dtype:
        return term
    with graph.inserting_before(whole):
        cast = graph.call_function(aten.to.dtype, (term, dtype))
    cast.meta = dict(whole.meta)
    return cast


def _scaled(
    graph: fx.Graph,
    node: fx.Node,
    inner: fx.Node,
    args: Callable[[fx.Node], tuple[fx.Node | float, ...]],
) -> list[fx.Node]:
    terms = _terms(graph, inner)
    if len(terms) == 1:
        return [node]
    scaled = []
    for term in terms:
        with graph.inserting_after(node):
            copy = graph.call_function(function(node), args(term))
        copy.meta = dict(node.meta)
        scaled.append(copy)
    return scaled
