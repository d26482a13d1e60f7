"""The joint graph of a stage, stitched from the traces of its pieces.

Forwards stand in order, backwards in the reverse order. The gradients of a value that several
pieces read are added as autograd adds them: the last use first.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from fxpipe.capture import Captured
from fxpipe.copying import IDENTITY, Joint, is_number
from fxpipe.dataflow import arguments, aten, differentiable, storages
from fxpipe.pieces import Piece
from fxpipe.split import Stage, Stages
from fxpipe.strides import Layouts
from fxpipe.torch_internals import expression
from fxpipe.tracing import Traced, Tracer

Pair = tuple[str, str]


class StageTrace:
    """One stage: its pieces, fake values of all that crosses between them, and who wants what.

    wanted: (value, stage) for each gradient that comes back from another stage
    """

    def __init__(
        self,
        captured: Captured,
        stages: Stages,
        name: str,
        pieces: Sequence[Piece],
        wanted: Sequence[Pair],
        needs: frozenset[str],
        tracer: Tracer,
    ) -> None:
        self.stage = stages[name]
        self.pieces, self.wanted, self.tracer = pieces, wanted, tracer
        self.loss_dtype = captured.loss_dtype
        self.holders = [n for n in self.stage.graph.graph.nodes if n.op == "placeholder"]
        with tracer.mode:
            self.values = {n: _fake(captured, self.stage, n, needs) for n in self.holders}
        sent, losses, stats = arguments(self.stage.graph.graph.output_node())[0]
        self.sent: dict[str, fx.Node] = dict(zip(self.stage.sent, sent, strict=True))
        self.losses: Sequence[fx.Node] = losses
        self.stats: Sequence[fx.Node] = stats

    def joint(self) -> Joint:
        """(inputs, wanted gradients, weight) -> (sent, losses, stats, gradients of inputs)."""
        for piece in self.pieces:
            made = self.tracer.forward(piece, self._of(piece.inputs))
            self.values.update(zip(piece.outputs, made, strict=True))
        with self.tracer.mode:
            writer = _Writer(self)
            return writer.joint(self._traced(writer.starts()))

    def returned(self, joint: Joint) -> set[str]:
        """The received values that get a gradient."""
        return {n for n in self.stage.received if joint.gradients.get(n) is not None}

    def _of(self, nodes: Sequence[fx.Node]) -> list[Any]:
        return [self.values[node] for node in nodes]

    def _traced(self, starts: Mapping[fx.Node, Tensor]) -> list[Traced]:
        """The trace of each piece, found from the last to the first as gradients arrive."""
        sums = dict(starts)
        found = []
        for piece in reversed(self.pieces):
            tangents = [sums.get(node) for node in piece.outputs]
            traced = self.tracer.joint(piece, self._of(piece.inputs), tangents)
            for node, gradient in zip(piece.inputs, traced.gradients, strict=True):
                if gradient is not None:
                    value = gradient.meta["val"]
                    sums[node] = sums[node] + value if node in sums else value
            found.append(traced)
        return found[::-1]


def _fake(captured: Captured, stage: Stage, node: fx.Node, needs: set[str] | frozenset[str]) -> Any:
    """A fake value of a stage's input: all but its parameters is contiguous, as it arrives."""
    value = node.meta["val"]
    if node.name in stage.received or node.name in stage.fields:
        value = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if isinstance(value, Tensor):
        wanted = node.name in needs or captured.state.get(node.name) in captured.trained
        value = value.detach().requires_grad_(wanted and differentiable(value))
    return value


class _Writer:
    """The new graph. env: nodes of the stage's forward -> new nodes; sums: their gradients.

    labels: names of the inputs -> new nodes; numbers: sizes that a node stands for already
    """

    def __init__(self, trace: StageTrace) -> None:
        self.trace = trace
        self.graph = fx.Graph()
        self.layouts = Layouts()
        self.owner = nn.Module()
        self.labels: dict[str, fx.Node] = {}
        self.numbers: dict[sympy.Expr, fx.Node] = {}
        self.sums: dict[fx.Node, fx.Node] = {}
        self.env = {node: self._holder(node.name, trace.values[node]) for node in trace.holders}
        for value, to in trace.wanted:
            made = trace.values[trace.sent[value]]
            like = torch.empty(made.shape, dtype=made.dtype, device=made.device)
            self._holder(f"d_{value}_{to}", like)
        device = trace.losses[0].meta["val"].device if trace.losses else None
        self._holder("weight", torch.empty((), dtype=trace.loss_dtype, device=device))

    def _holder(self, label: str, value: Any) -> fx.Node:
        node = self.labels[label] = self.graph.placeholder(label)
        # Two inputs may be called alike, and generated code goes by targets: make them unique.
        node.target = node.name
        node.meta = {"val": value.detach() if isinstance(value, Tensor) else value}
        if is_number(node):
            self.numbers.setdefault(expression(value), node)
        return node

    def starts(self) -> dict[fx.Node, Tensor]:
        """The gradients with which the backward starts, of those results that want one."""
        trace = self.trace
        for value, to in trace.wanted:
            self.add(trace.sent[value], self.labels[f"d_{value}_{to}"])
        for loss in trace.losses:
            dtype = trace.values[loss].dtype
            weight = self.labels["weight"]
            cast = dtype != trace.loss_dtype
            self.add(
                loss, self._call(aten._to_copy.default, weight, dtype=dtype) if cast else weight
            )
        self.sums = {n: given for n, given in self.sums.items() if trace.values[n].requires_grad}
        return {node: given.meta["val"] for node, given in self.sums.items()}

    def joint(self, traced: Sequence[Traced]) -> Joint:
        """The finished graph."""
        trace = self.trace
        copies = [_Copied(self, i, found) for i, found in enumerate(traced)]
        for piece, copied in zip(trace.pieces, copies, strict=True):
            copied.run_forward(piece)
        sent = [self._contiguous(self.env[node]) for node in trace.sent.values()]
        for piece, copied in reversed(list(zip(trace.pieces, copies, strict=True))):
            copied.run_backward(piece)
        losses = [self.env[node] for node in trace.losses]
        stats = [self._contiguous(self.env[node]) for node in trace.stats]
        gradients = {
            node.name: self._contiguous(self.sums[node]) if node in self.sums else None
            for node in trace.holders
            if isinstance(trace.values[node], Tensor) and trace.values[node].requires_grad
        }
        self.graph.output((sent, losses, stats, list(gradients.values())))
        module = fx.GraphModule(self.owner, self.graph)
        return Joint(module, self.labels, sent, losses, gradients, stats)

    def _contiguous(self, node: fx.Node) -> fx.Node:
        if node not in self.layouts.doubtful and node.meta["val"].is_contiguous():
            return node
        return self._call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def add(self, node: fx.Node, gradient: fx.Node) -> None:
        """Add to the gradient of a node of the stage's forward."""
        known = self.sums.get(node)
        self.sums[node] = self._call(aten.add.Tensor, known, gradient) if known else gradient

    def _call(self, target: Any, *nodes: fx.Node, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(target, nodes, kwargs)
        made.meta = {"val": target(*(node.meta["val"] for node in nodes), **kwargs)}
        self.layouts.settle(made)
        return made


class _Copied:
    """The copy of one trace in the new graph. memory: the traced one -> that of the copy."""

    def __init__(self, writer: _Writer, number: int, traced: Traced) -> None:
        self.writer, self.number, self.traced = writer, number, traced
        self.env: dict[fx.Node, Any] = {}
        self.memory: dict[object, object] = {}

    def run_forward(self, piece: Piece) -> None:
        """Write the forward of a piece, and note where its outputs are."""
        writer, traced = self.writer, self.traced
        for node, holder in zip(piece.inputs, traced.inputs, strict=True):
            self._bind(holder, writer.env[node])
        for node in traced.forward:
            self._copy(node)
        made = map(self.env.__getitem__, traced.outputs)
        writer.env |= dict(zip(piece.outputs, made, strict=True))

    def run_backward(self, piece: Piece) -> None:
        """Write the backward of a piece; its gradients go to what it has read."""
        writer, traced = self.writer, self.traced
        given = [writer.sums[node] for node in piece.outputs if node in writer.sums]
        for holder, tangent in zip(traced.tangents, given, strict=True):
            self._bind(holder, tangent)
        for node in traced.backward:
            self._copy(node)
        for node, gradient in zip(piece.inputs, traced.gradients, strict=True):
            if gradient is not None:
                writer.add(node, self.env[gradient])

    def _bind(self, holder: fx.Node, node: fx.Node) -> None:
        self.env[holder] = node
        self.memory.update(zip(storages(holder), storages(node), strict=True))

    def _copy(self, node: fx.Node) -> None:
        if node.target in IDENTITY:
            self.env[node] = self.env[node.all_input_nodes[0]]
        elif is_number(node):
            self.env[node] = self._number(node)
        elif node.op == "get_attr":
            name = f"{str(node.target).replace('.', '_')}_of_{self.number}"
            setattr(self.writer.owner, name, attrgetter(str(node.target))(self.traced.graph))
            self.env[node] = self.writer.graph.get_attr(name)
        else:
            self.env[node] = self._node(node)

    def _node(self, node: fx.Node) -> fx.Node:
        made = self.writer.graph.node_copy(node, self.env.__getitem__)
        # The traced values are those of all copies: their memory must not be taken for one.
        own = [self.memory.setdefault(s, (self.number, s)) for s in storages(node)]
        made.meta = {"val": node.meta.get("val"), "storages": tuple(own)}
        self.writer.layouts.settle(made)
        return made

    def _number(self, node: fx.Node) -> fx.Node | int:
        expr = expression(node.meta["val"])
        if expr.is_number:
            return int(expr)
        if expr not in self.writer.numbers:
            made = self.writer.graph.node_copy(node, self.env.__getitem__)
            self.writer.numbers[expr] = made
        return self.writer.numbers[expr]
