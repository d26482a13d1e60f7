"""A stage's forward and its backward, traced together into one graph."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.capture import Captured
from fxpipe.copying import Joint
from fxpipe.dataflow import arguments, aten, is_in_place
from fxpipe.errors import CaptureError
from fxpipe.passes.functionalise import functionalise
from fxpipe.split import Stage, Stages

Pair = tuple[str, str]


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


class StageTrace:
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
        _reshape(traced.graph)
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
        return self.captured.loss_dtype

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


def _reshape(graph: fx.Graph) -> None:
    """Views may copy: some kernels lay their results out otherwise than their traces say."""
    for node in graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default


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
