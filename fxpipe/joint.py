"""Differentiation: each stage's forward becomes three graphs, F, B and W.

    F(state, feed, received)             -> (sent, losses, kept)
    B(state, feed, kept, wanted, weight) -> (returned, kept_w)
    W(state, feed, kept, wanted, weight) -> gradients of the trained parameters

B computes only what other stages wait for, the gradients of the stage's inputs; W all the rest,
at any later time (zero-bubble splitting, without a notion of layers). Where no input needs a
gradient there is no B, and W does it all.
"""

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import sympy
from torch import Tensor, fx

from fxpipe.capture import Captured
from fxpipe.copying import Ends, Joint, Parts
from fxpipe.cut import Kind
from fxpipe.dataflow import CUTS_GRADIENT, differentiable
from fxpipe.opaque_joint import is_opaque, opaque_joint
from fxpipe.partition import partition
from fxpipe.passes.draws import check_seeded
from fxpipe.pieces import cut_into_pieces
from fxpipe.split import Stage, Stages
from fxpipe.stitching import Pair, StageTrace
from fxpipe.torch_internals import fake_mode, guarding, guards
from fxpipe.tracing import Tracer


@dataclass(frozen=True)
class StageGraphs:
    """F, B and W of one stage, and exactly what they take and keep.

    state: names of the tensors passed as `state`, in order; trained: the parameters of which W
    gives the gradients, in order; fields and sizes: what `feed` holds of the microbatch;
    kept_b, kept_w: the values that F keeps for B, and B (or F, without B) for W
    ends: the stages that the bundles come from and go to
    others: which of the values that the model returns beside its loss follow F's losses
    stats: what F computes for updates of buffers; moving: names of the buffers in `state` whose
    value changes with the microbatch, by their places
    opaque: whether it runs the model's own code, which reads fields as they lie in memory
    """

    stage: str
    state: tuple[str, ...]
    trained: tuple[str, ...]
    fields: tuple[str, ...]
    sizes: tuple[sympy.Expr, ...]
    kept_b: tuple[str, ...]
    kept_w: tuple[str, ...]
    kinds: tuple[Kind, ...]
    F: fx.GraphModule
    B: fx.GraphModule
    W: fx.GraphModule
    ends: Ends
    others: tuple[int, ...] = ()
    stats: tuple[str, ...] = ()
    moving: tuple[tuple[int, str], ...] = ()
    opaque: bool = False


@dataclass(frozen=True)
class Differentiated:
    """All stages' graphs, and for each link the values whose gradient comes back across it.

    guards: what tracing the model and its backward has assumed of the symbols
    traced: each stage's joint graph, and what its three graphs take and give
    """

    graphs: Mapping[str, StageGraphs]
    grads: Mapping[Pair, tuple[str, ...]]
    guards: tuple[sympy.Basic, ...]
    traced: Mapping[str, tuple[Joint, Parts]]


def differentiate(
    captured: Captured, stages: Stages, recompute: Collection[str] = ()
) -> Differentiated:
    """F, B and W of every stage. recompute: regions that compute their forward again.

    Gates are exact and per value: a first walk downstream finds which crossing values depend on a
    trained parameter, a second one upstream which of them get a gradient at all.
    """
    grads: dict[Pair, tuple[str, ...]] = {}
    traced: dict[str, tuple[Joint, Parts]] = {}
    mode = fake_mode([n.meta["val"] for n in captured.graph.graph.nodes if n.op == "placeholder"])
    pieces, tracer = cut_into_pieces(stages), Tracer(mode)
    with guarding(mode):
        needs = _needs_gradient(captured, stages)
        for name in reversed(list(stages)):
            wanted = [
                (value, pair[1])
                for pair, values in grads.items()
                if pair[0] == name
                for value in values
            ]
            if is_opaque(stages[name]):
                joint, returned = opaque_joint(captured, stages[name], wanted, mode), set[str]()
            else:
                trace = StageTrace(captured, stages, name, pieces[name], wanted, needs, tracer)
                joint = trace.joint()
                check_seeded(joint.graph.graph, f"stage {name}")
                returned = trace.returned(joint)
            for pair in stages.links:
                if pair[1] == name:
                    grads[pair] = tuple(v for v in stages.links[pair] if v in returned)
            traced[name] = joint, parts_of(captured, stages, name, grads, joint)
    ordered = {name: traced[name] for name in stages}
    graphs = _graphs(captured, ordered, recompute)
    return Differentiated(graphs, grads, tuple(guards(mode)), ordered)


def repartition(
    captured: Captured, found: Differentiated, recompute: Collection[str]
) -> Differentiated:
    """The same stages with other regions that recompute; nothing is traced again."""
    return replace(found, graphs=_graphs(captured, found.traced, recompute))


def _needs_gradient(captured: Captured, stages: Stages) -> frozenset[str]:
    """The crossing values that depend on a trained parameter through differentiable operators.

    It may name a value too many, where an operator that is not in the list cuts the gradient; the
    trace of the stage that makes it then finds that nothing wants its gradient.
    """
    needs: set[fx.Node] = set()
    for node in captured.graph.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and captured.state.get(node.name) in captured.trained:
            needs.add(node)
        elif "prefix" in node.meta and node.target is operator.getitem:
            number, prefix = node.args[1], node.meta["prefix"]
            needs |= {node} if prefix.reach[number] else set()
        elif node.op == "call_function" and node.target not in CUTS_GRADIENT:
            floats = not isinstance(value, Tensor) or differentiable(value)
            if floats and any(source in needs for source in node.all_input_nodes):
                needs.add(node)
    return frozenset(node.name for node in needs if node.name in stages.values)


def parts_of(
    captured: Captured,
    stages: Stages,
    name: str,
    grads: Mapping[Pair, tuple[str, ...]],
    joint: Joint,
) -> Parts:
    """What the three graphs of a stage take and give. grads: the values of each seam whose gradient
    comes back; none in a forward alone."""
    stage = stages[name]
    into = [pair for pair in stages.links if pair[1] == name]
    out = [pair for pair in stages.links if pair[0] == name]
    position = dict(zip(stage.sent, joint.sent, strict=True))
    return Parts(
        stage=stage,
        received=[stages.links[pair] for pair in into],
        sent=[[position[value] for value in stages.links[pair]] for pair in out],
        wanted=[[f"d_{v}_{pair[1]}" for v in grads[pair]] for pair in out if grads.get(pair)],
        returned=[[joint.gradients[v] for v in grads[pair]] for pair in into if grads.get(pair)],
        weights=list(_trained(captured, stage, joint).values()),
        ends=Ends(
            received=tuple(source for source, _ in into),
            sent=tuple(target for _, target in out),
            returned=tuple(pair[0] for pair in into if grads.get(pair)),
            wanted=tuple(pair[1] for pair in out if grads.get(pair)),
        ),
    )


def _trained(captured: Captured, stage: Stage, joint: Joint) -> dict[str, fx.Node]:
    """The parameters that get a gradient in a stage."""
    return {
        captured.state[holder]: gradient
        for holder, gradient in joint.gradients.items()
        if holder in stage.state and gradient is not None
    }


def _graphs(
    captured: Captured, traced: Mapping[str, tuple[Joint, Parts]], recompute: Collection[str]
) -> dict[str, StageGraphs]:
    """The three graphs of every stage. recompute: regions that compute their forward again."""
    return {
        name: _stage_graphs(captured, joint, parts, parts.stage.region in recompute)
        for name, (joint, parts) in traced.items()
    }


def _stage_graphs(captured: Captured, joint: Joint, parts: Parts, recompute: bool) -> StageGraphs:
    stage, graphs = parts.stage, partition(joint, parts, recompute)
    trained = _trained(captured, stage, joint)
    kinds = [Kind.F] + [Kind.B] * bool(parts.returned) + [Kind.W] * bool(trained)
    return StageGraphs(
        stage=stage.name,
        state=tuple(captured.state[holder] for holder in stage.state),
        trained=tuple(trained),
        fields=stage.fields,
        sizes=graphs.sizes,
        kept_b=graphs.kept_b,
        kept_w=graphs.kept_w,
        kinds=tuple(kinds),
        F=graphs.F,
        B=graphs.B,
        W=graphs.W,
        ends=parts.ends,
        others=others(captured, stage),
        stats=stage.stats,
        moving=moving(captured, stage),
        opaque=is_opaque(stage),
    )


def others(captured: Captured, stage: Stage) -> tuple[int, ...]:
    """Which of the values that the model returns beside its loss are made in a stage."""
    first = len(captured.terms)
    return tuple(index - first for index in stage.terms if index >= first)


def moving(captured: Captured, stage: Stage) -> tuple[tuple[int, str], ...]:
    """The buffers of a stage's state that change with the microbatch, by their places."""
    places = enumerate(stage.state)
    return tuple((at, captured.state[holder]) for at, holder in places if holder in stage.moving)
