"""Pieces of a stage, each traced with its backward; pieces that are alike share one trace.

    Tracer.forward(piece, inputs)           -> outputs, as fake tensors
    Tracer.joint(piece, inputs, tangents)   -> Traced

Alike are pieces with the same text whose inputs and tangents have the same sizes, strides and
dtypes, and of which the same inputs want a gradient.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.dataflow import arguments, aten, closure, is_in_place, is_item
from fxpipe.errors import CaptureError
from fxpipe.passes.functionalise import functionalise
from fxpipe.pieces import Piece
from fxpipe.torch_internals import expression, storage_of, trying
from fxpipe.torch_modes import sizes_without_a_greatest


@dataclass(frozen=True)
class Traced:
    """A piece's forward and backward in one graph.

    inputs: a placeholder for each input; tangents: one for each output that has a tangent;
    outputs: their nodes; gradients: a node, or None, for each input
    """

    graph: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    gradients: tuple[fx.Node | None, ...]

    @cached_property
    def forward(self) -> tuple[fx.Node, ...]:
        """What makes the outputs, and what is not to be left out or put off."""
        nodes = self.graph.graph.nodes
        fixed = [n for n in nodes if n.op == "call_function" and n.is_impure()]
        needed = closure([*self.outputs, *fixed], _is_input)
        return tuple(n for n in nodes if n in needed or (is_item(n) and n.args[0] in needed))

    @cached_property
    def backward(self) -> tuple[fx.Node, ...]:
        """What else the gradients need."""
        ends = (n for n in self.gradients if n is not None)
        needed = closure(ends, _is_input).difference(self.forward)
        return tuple(n for n in self.graph.graph.nodes if n in needed)


class Tracer:
    """The traces made so far, under one mode of fake tensors."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self._forwards: dict[Hashable, list[Any]] = {}
        self._joints: dict[Hashable, Traced] = {}

    def __len__(self) -> int:
        """How many pieces were traced with their backward."""
        return len(self._joints)

    def forward(self, piece: Piece, inputs: Sequence[Any]) -> list[Tensor]:
        """What a piece makes; the results that depend on a trained parameter require a gradient."""
        key = piece.text, described(inputs)
        if key not in self._forwards:
            with trying(self.mode), torch.enable_grad():
                made = piece.run(_leaves(inputs))
            self._forwards[key] = [v.detach().requires_grad_(v.requires_grad) for v in made]
        return self._forwards[key]

    def joint(
        self,
        piece: Piece,
        inputs: Sequence[Any],
        tangents: Sequence[Tensor | None],
    ) -> Traced:
        """A piece with its backward; tangents: of each output, or None.

        Raises CaptureError where a parameter has a sparse gradient.
        """
        given = [tangent for tangent in tangents if tangent is not None]
        present = tuple(tangent is not None for tangent in tangents)
        key = piece.text, described(inputs), described(given), present
        if key not in self._joints:
            self._joints[key] = _trace(piece, inputs, (given, present))
        return self._joints[key]


def described(values: Sequence[Any]) -> Hashable:
    """All of some values that a trace can depend on; also which of them share their memory."""
    memory: dict[object, int] = {}
    found: list[Hashable] = []
    for value in values:
        if not isinstance(value, Tensor):
            found.append((type(value), expression(value)))
            continue
        place = memory.setdefault(storage_of(value), len(memory))
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        flags = value.requires_grad, value.is_conj(), value.is_neg()
        kind = value.dtype, value.device, value.layout, *flags
        found.append((*kind, value.dim(), tuple(map(expression, sizes)), place))
    return tuple(found)


def _leaves(values: Sequence[Any]) -> list[Any]:
    return [
        v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in values
    ]


def _trace(
    piece: Piece,
    inputs: Sequence[Any],
    tangents: tuple[list[Tensor], tuple[bool, ...]],
) -> Traced:
    given, present = tangents
    wants = [isinstance(value, Tensor) and value.requires_grad for value in inputs]

    def run(plain: list[Any], given: list[Tensor]) -> Any:
        leaves = [
            v.detach().requires_grad_(w) if w else v for v, w in zip(plain, wants, strict=True)
        ]
        with torch.enable_grad():
            made = piece.run(leaves)
        ends = [value for value, has in zip(made, present, strict=True) if has]
        targets = [leaf for leaf, want in zip(leaves, wants, strict=True) if want]
        return [
            *(value.detach() for value in made),
            *_gradients(ends, targets, given),
        ]

    plain = [value.detach() if isinstance(value, Tensor) else value for value in inputs]
    with sizes_without_a_greatest():
        traced = make_fx(run, tracing_mode="symbolic")(plain, given)
    if any(map(is_in_place, traced.graph.nodes)):
        # Some formulas of autograd write in place: the parts must not depend on the order.
        traced = functionalise(traced)
    _reshape(traced.graph)
    holders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    results = iter(arguments(traced.graph.output_node())[0])
    return Traced(
        graph=traced,
        inputs=tuple(holders[: len(inputs)]),
        tangents=tuple(holders[len(inputs) :]),
        outputs=tuple(next(results) for _ in present),
        gradients=tuple(next(results) if want else None for want in wants),
    )


def _reshape(graph: fx.Graph) -> None:
    """Views may copy: some kernels lay their results out otherwise than their traces say."""
    for node in graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default


def _gradients(
    made: list[Tensor], targets: list[Tensor], given: list[Tensor]
) -> Sequence[Tensor | None]:
    """Gradients of the targets; None for one that nothing made depends on."""
    if not made or not targets:
        return [None] * len(targets)
    found = torch.autograd.grad(made, targets, given, allow_unused=True)
    if any(gradient is not None and gradient.layout is not torch.strided for gradient in found):
        raise CaptureError(
            "a parameter has a sparse gradient, which cannot be kept and sent; use nn.Embedding "
            "without sparse=True"
        )
    return found


def _is_input(node: fx.Node) -> bool:
    return node.op == "placeholder"
