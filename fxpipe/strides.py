"""Values that may lie in memory otherwise than their trace says, and what must not rely on it.

Some kernels lay out what they make of transposed operands otherwise than the rule by which traces
know their strides. A trace leaves `contiguous()` out where it would do nothing; a kernel that was
written for packed operands then gets others, and gives wrong numbers.
"""

import torch
from torch import Tensor, fx

from fxpipe.dataflow import aten, is_item, is_view, tensors_of
from fxpipe.torch_internals import expression

# Whatever their operands are, these make packed results.
_PACKED = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}
# As their operand is laid out, so are these.
_ALIKE = {
    aten._to_copy.default,
    aten.clone.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
}


class Layouts:
    """doubtful: the nodes, of those settled so far, whose strides are not known for sure."""

    def __init__(self) -> None:
        self.doubtful: set[fx.Node] = set()

    def settle(self, node: fx.Node) -> None:
        """Note what is known of a node's layout; where it runs a kernel of its own, pack doubtful
        operands that are packed as traced."""
        sources = [n for n in node.all_input_nodes if tensors_of(n)]
        if node.target in _PACKED or node.kwargs.get("memory_format") is torch.contiguous_format:
            return
        if _follows(node):
            doubtful = any(source in self.doubtful for source in sources)
        else:
            for source in sources:
                if source in self.doubtful and (how := packing(source)) is not None:
                    node.replace_input_with(source, _packed(node, source, how))
            doubtful = any(packing(source) is not torch.contiguous_format for source in sources)
        if doubtful:
            self.doubtful.add(node)


def packing(node: fx.Node) -> torch.memory_format | None:
    """In which way a traced tensor is packed; None if in no way."""
    value = node.meta["val"]
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    if _is_packed(value, range(value.dim())):
        return torch.contiguous_format
    if value.dim() == 4 and _is_packed(value, (0, 2, 3, 1)):
        return torch.channels_last
    if value.dim() == 5 and _is_packed(value, (0, 2, 3, 4, 1)):
        return torch.channels_last_3d
    return None


def _is_packed(value: Tensor, order: range | tuple[int, ...]) -> bool:
    """Whether dimensions lie in memory in this order, without gaps."""
    expected = expression(1)
    for dim in reversed(order):
        size = expression(value.shape[dim])
        if size != 1 and expression(value.stride(dim)) != expected:
            return False
        expected = expected * size
    return True


def _follows(node: fx.Node) -> bool:
    """Whether a node's layout follows from those of its operands by a rule that traces know."""
    tags = getattr(node.target, "tags", ())
    return is_item(node) or is_view(node) or torch.Tag.pointwise in tags or node.target in _ALIKE


def _packed(node: fx.Node, source: fx.Node, how: torch.memory_format) -> fx.Node:
    with node.graph.inserting_before(node):
        made = node.graph.call_function(aten.contiguous.default, (source,), {"memory_format": how})
    made.meta = dict(source.meta)
    return made
