"""Differentiation: each stage's forward becomes three graphs, F, B and W.

    F(state, feed, received)             -> (sent, losses, kept)
    B(state, feed, kept, wanted, weight) -> (returned, kept_w)
    W(state, feed, kept, wanted, weight) -> gradients of the trained parameters

B computes only what other stages wait for, the gradients of the stage's inputs; W all the rest,
at any later time (zero-bubble splitting, without a notion of layers). Where no input needs a
gradient there is no B, and W does it all.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.capture import Captured
from fxpipe.copying import Joint, Parts
from fxpipe.cut import Kind
from fxpipe.dataflow import CUTS_GRADIENT, arguments, is_in_place
from fxpipe.errors import CaptureError
from fxpipe.partition import ThreeGraphs, partition
from fxpipe.passes.functionalise import functionalise
from fxpipe.split import Stage, Stages
from fxpipe.torch_internals import fake_mode, guarding, guards

Pair = tuple[str, str]


@dataclass(frozen=True)
class StageGraphs:
    """F, B and W of one stage, and exactly what they take and keep.

    state: names of the tensors passed as `state`, in order; trained: the parameters of which W
    gives the gradients, in order; fields and sizes: what `feed` holds of the microbatch;
    kept_b, kept_w: the values that F keeps for B, and B (or F, without B) for W
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


@dataclass(frozen=True)
class Differentiated:
    """All stages' graphs, and for each link the values whose gradient comes back across it.

    guards: what tracing the model and its backward has assumed of the symbols
    """

    graphs: Mapping[str, StageGraphs]
    grads: Mapping[Pair, tuple[str, ...]]
    guards: tuple[sympy.Basic, ...]


def differentiate(
    captured: Captured, stages: Stages, recompute: Collection[str] = ()
) -> Differentiated:
    """F, B and W of every stage. recompute: regions that compute their forward again.

    Gates are exact and per value: a first walk downstream finds which crossing values depend on a
    trained parameter, a second one upstream which of them get a gradient at all.
    """
    grads: dict[Pair, tuple[str, ...]] = {}
    graphs: dict[str, StageGraphs] = {}
    mode = fake_mode([n.meta["val"] for n in captured.graph.graph.nodes if n.op == "placeholder"])
    with guarding(mode):
        needs = _needs_gradient(captured, stages)
        for name in reversed(list(stages)):
            traced = _Trace(captured, stages, name, needs, grads, mode)
            joint = traced.joint()
            returned = traced.returned(joint)
            for pair in stages.links:
                if pair[1] == name:
                    grads[pair] = tuple(v for v in stages.links[pair] if v in returned)
            parts = _parts(captured, stages, name, grads, joint)
            three = partition(joint, parts, stages[name].region in recompute)
            graphs[name] = _stage_graphs(captured, parts, joint, three)
    ordered = {name: graphs[name] for name in stages}
    return Differentiated(ordered, grads, tuple(guards(mode)))


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
        elif node.op == "call_function" and node.target not in CUTS_GRADIENT:
            floats = (
                not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()
            )
            if floats and any(source in needs for source in node.all_input_nodes):
                needs.add(node)
    return frozenset(node.name for node in needs if node.name in stages.values)


def _fake_inputs(
    captured: Captured, stage: Stage, needs: set[str] | frozenset[str], mode: Any
) -> list[Any]:
    """Fake values of a stage's inputs: crossing values are contiguous, as they arrive."""
    values = []
    with mode:
        for node in stage.graph.graph.nodes:
            if node.op != "placeholder":
                break
            value = node.meta["val"]
            if node.name in stage.received:
                value = torch.empty(value.shape, dtype=value.dtype, device=value.device)
            if isinstance(value, Tensor):
                wanted = node.name in needs or captured.state.get(node.name) in captured.trained
                real = value.dtype.is_floating_point or value.dtype.is_complex
                value = value.detach().requires_grad_(wanted and real)
            values.append(value)
    return values


class _Trace:
    """One stage's forward and backward, traced together."""

    def __init__(
        self,
        captured: Captured,
        stages: Stages,
        name: str,
        needs: frozenset[str],
        grads: Mapping[Pair, tuple[str, ...]],
        mode: Any,
    ) -> None:
        self.stage = stages[name]
        self.mode = mode
        self.captured = captured
        self.inputs = _fake_inputs(captured, self.stage, needs, mode)
        self.names = [n.name for n in self.stage.graph.graph.nodes if n.op == "placeholder"]
        self.wanted = [
            (value, to)
            for (by, to), values in grads.items()
            if by == name
            for value in stages.links[by, to]
            if value in values
        ]
        self.targets = [
            n
            for n, value in zip(self.names, self.inputs, strict=True)
            if isinstance(value, Tensor) and value.requires_grad
        ]

    def joint(self) -> Joint:
        """Trace (inputs, wanted gradients, weight) -> (sent, losses, gradients of targets)."""
        with self.mode:
            sent = {n: self._crossing(n) for n in self.stage.sent}
            wanted = [torch.empty_like(sent[value]) for value, _ in self.wanted]
            weight = torch.empty((), dtype=self._loss_dtype())
        plain = [v.detach() if isinstance(v, Tensor) else v for v in self.inputs]

        def run(plain: list[Any], wanted: list[Tensor], weight: Tensor) -> Any:
            return self._run(plain, wanted, weight)

        traced = make_fx(run, tracing_mode="symbolic")(plain, wanted, weight)
        if any(map(is_in_place, traced.graph.nodes)):
            # Some formulas of autograd write in place: the parts must not depend on the order.
            traced = functionalise(traced)
        holders = [n for n in traced.graph.nodes if n.op == "placeholder"]
        labels = [*self.names, *(f"d_{value}_{to}" for value, to in self.wanted), "weight"]
        outputs = arguments(traced.graph.output_node())[0]
        first, last = len(self.stage.sent), len(outputs) - len(self.targets)
        gradients = dict(zip(self.targets, outputs[last:], strict=True))
        inputs = dict(zip(labels, holders, strict=True))
        return Joint(traced, inputs, outputs[:first], outputs[first:last], gradients)

    def returned(self, joint: Joint) -> set[str]:
        """The received values that get a gradient."""
        return {n for n in self.stage.received if joint.gradients.get(n) is not None}

    def _crossing(self, name: str) -> Tensor:
        node = next(n for n in self.stage.graph.graph.nodes if n.name == name)
        value = node.meta["val"]
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)

    def _loss_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.captured.terms[0].meta["val"].dtype
        return dtype

    def _run(self, plain: list[Any], wanted: list[Tensor], weight: Tensor) -> Any:
        leaves = [
            value.detach().requires_grad_(name in self.targets)
            if isinstance(value, Tensor)
            else value
            for name, value in zip(self.names, plain, strict=True)
        ]
        with torch.enable_grad():
            sent, losses = fx.Interpreter(self.stage.graph).run(*leaves)
        by_name = dict(zip(self.stage.sent, sent, strict=True))
        tangents: dict[str, Tensor] = {}
        for (value, _), tangent in zip(self.wanted, wanted, strict=True):
            tangents[value] = tangents[value] + tangent if value in tangents else tangent
        ends = [(by_name[name], tangent) for name, tangent in tangents.items()]
        ends += [(loss, weight.to(loss.dtype)) for loss in losses]
        made = [value for value, _ in ends if value.requires_grad]
        given = [tangent for value, tangent in ends if value.requires_grad]
        targets = [
            leaf for name, leaf in zip(self.names, leaves, strict=True) if name in self.targets
        ]
        return [
            *(value.detach().contiguous() for value in sent),
            *(loss.detach() for loss in losses),
            *_gradients(made, targets, given),
        ]


def _gradients(
    made: list[Tensor], targets: list[Tensor], given: list[Tensor]
) -> list[Tensor | None]:
    """Gradients of the targets, contiguous; None for one that nothing made depends on."""
    if not made or not targets:
        return [None] * len(targets)
    found = torch.autograd.grad(made, targets, given, allow_unused=True)
    if any(gradient is not None and gradient.layout is not torch.strided for gradient in found):
        raise CaptureError(
            "a parameter has a sparse gradient, which cannot be kept and sent; use nn.Embedding "
            "without sparse=True"
        )
    return [None if gradient is None else gradient.contiguous() for gradient in found]


def _parts(
    captured: Captured,
    stages: Stages,
    name: str,
    grads: Mapping[Pair, tuple[str, ...]],
    joint: Joint,
) -> Parts:
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
    )


def _trained(captured: Captured, stage: Stage, joint: Joint) -> dict[str, fx.Node]:
    """The parameters that get a gradient in a stage."""
    return {
        captured.state[holder]: gradient
        for holder, gradient in joint.gradients.items()
        if holder in stage.state and gradient is not None
    }


def _stage_graphs(
    captured: Captured, parts: Parts, joint: Joint, graphs: ThreeGraphs
) -> StageGraphs:
    stage = parts.stage
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
    )
