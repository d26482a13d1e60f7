"""Facts about the nodes of a captured graph: origin, tensor inputs, leaves, work.

Sizes flow through a graph beside tensors; they are recomputed on every rank, so they are no
dataflow here: only edges that carry tensors count.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxpipe.sizes import is_ratio, is_size
from fxpipe.torch_internals import expression, share_storage, storage_of

aten = torch.ops.aten
UNKNOWN_SIZE = 64
ASIDE = "aside"
_DROPOUTS = (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)
CUTS_GRADIENT = {
    aten.detach.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}


def function(node: fx.Node) -> Any:
    """What a node calls; fx types it as a function or the name of one."""
    return node.target


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """What a node is called with; fx types each as whatever an argument may be."""
    return node.args


def path(node: fx.Node) -> str:
    """The dotted path of the innermost module that made a node; `` for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    return _own_path(list(stack.values())[-1][0]) if stack else ""


def repetition(node: fx.Node, prefix: str) -> str:
    """`@1` if the module at `prefix` runs for the second time around a node; else nothing."""
    for key, (found, _) in (node.meta.get("nn_module_stack") or {}).items():
        own = _own_path(found)
        if own == prefix or own.startswith(f"{prefix}."):
            _, mark, count = str(key).rpartition("@")
            return f"{mark}{count}" if mark else ""
    return ""


def _own_path(recorded: object) -> str:
    """A recorded path as the model names it; nodes that no module made bear a mark."""
    plain = str(recorded)
    return "" if plain.startswith("_") else plain.removeprefix("model").removeprefix(".")


def module_class(node: fx.Node, prefix: str) -> str:
    """The class of the module at `prefix` around a node."""
    for found, kind in (node.meta.get("nn_module_stack") or {}).values():
        if _own_path(found) == prefix:
            return kind if isinstance(kind, str) else kind.__qualname__
    return ""


def data_inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values a node reads, without sizes and what is computed from them."""
    return [n for n in node.all_input_nodes if not is_size(n) and not is_ratio(n)]


def calls(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute something for the loss, beside sizes and their ratios, in order."""
    nodes = [node for node in graph.nodes if node.op == "call_function" and not aside(node)]
    return [node for node in nodes if not is_size(node) and not is_ratio(node)]


def aside(node: fx.Node) -> bool:
    """Whether no loss needs a node, only an update of a buffer (`passes.buffer_updates`)."""
    return bool(node.meta.get(ASIDE))


def differentiable(value: Tensor) -> bool:
    """Whether a tensor can have a gradient: floats and complex numbers."""
    return value.is_floating_point() or value.is_complex()


def spread(graph: fx.Graph, own: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """For every node the bits of itself and of all that it is computed from."""
    bits: dict[fx.Node, int] = {}
    for node in graph.nodes:
        mine = own.get(node, 0)
        for source in data_inputs(node):
            mine |= bits[source]
        bits[node] = mine
    return bits


def behind(starts: Iterable[fx.Node], barrier: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Everything that `starts` are computed from, without passing through a barrier node."""
    seen: set[fx.Node] = set()
    stack = [source for start in starts for source in data_inputs(start)]
    while stack:
        node = stack.pop()
        if node not in seen and not barrier(node):
            seen.add(node)
            stack.extend(data_inputs(node))
    return seen


def closure(
    ends: Iterable[fx.Node], barrier: Callable[[fx.Node], bool] = lambda _: False
) -> set[fx.Node]:
    """These nodes and everything that they are computed from, numbers included, without a barrier
    node and what is behind it."""
    return _reached(ends, lambda node: node.all_input_nodes, barrier)


def ahead(starts: Iterable[fx.Node], barrier: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Everything that is computed from `starts`, without passing through a barrier node."""
    return _reached((user for start in starts for user in start.users), lambda n: n.users, barrier)


def _reached(
    starts: Iterable[fx.Node],
    beyond: Callable[[fx.Node], Iterable[fx.Node]],
    barrier: Callable[[fx.Node], bool],
) -> set[fx.Node]:
    """These nodes and what lies beyond each, without a barrier node and what only it leads to."""
    seen: set[fx.Node] = set()
    stack = list(starts)
    while stack:
        node = stack.pop()
        if node not in seen and not barrier(node):
            seen.add(node)
            stack.extend(beyond(node))
    return seen


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from the random generator."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def is_item(node: fx.Node) -> bool:
    """Whether a node takes one of the values that an operator makes."""
    return node.target is operator.getitem


def is_view(node: fx.Node) -> bool:
    """Whether a node's result shares its input's storage."""
    if node.target is aten._unsafe_view.default:
        return True
    schema = getattr(node.target, "_schema", None)
    returns = schema.returns if schema is not None else ()
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def is_in_place(node: fx.Node) -> bool:
    """Whether a node changes the numbers in one of its inputs; `unsqueeze_` changes none."""
    schema = getattr(node.target, "_schema", None)
    tags = getattr(node.target, "tags", ())
    return schema is not None and schema.is_mutable and torch.Tag.inplace_view not in tags


def alias_of(node: fx.Node) -> fx.Node | None:
    """The input in whose memory a node's result lies, as traced.

    Schemas do not say: `reshape` and `to` return a view, or a new tensor. A dropout of nothing
    returns its input, though its trace shows a copy.
    """
    if node.target in _DROPOUTS and not (node.args[1] and node.args[2]):
        return node.all_input_nodes[0]
    made = tensors_of(node)
    for source in node.all_input_nodes if node.op == "call_function" else ():
        if any(share_storage(value, base) for value in made for base in tensors_of(source)):
            return source
    return None


def tensors_of(node: fx.Node) -> list[Tensor]:
    """The tensors that a node makes, as traced."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [item for item in values if isinstance(item, Tensor)]


def storages(node: fx.Node) -> tuple[object, ...]:
    """The memory of each tensor that a node makes; nodes of one trace that is used for several
    pieces of a graph have the same traced values, and each its own memory."""
    known: tuple[object, ...] | None = node.meta.get("storages")
    return tuple(map(storage_of, tensors_of(node))) if known is None else known


def size_in_numbers(value: Any, symbols: Mapping[sympy.Symbol, sympy.Integer]) -> tuple[int, ...]:
    """A traced tensor's shape for one microbatch; sizes that depend on data count as 64."""
    shape = []
    for size in value.shape:
        number = expression(size).xreplace(symbols)
        shape.append(int(number) if number.is_number else UNKNOWN_SIZE)
    return tuple(shape)


def work(node: fx.Node, symbols: Mapping[sympy.Symbol, sympy.Integer]) -> float:
    """Floating-point operations of a node's forward for one microbatch."""
    return float(flops(node, lambda value: size_in_numbers(value, symbols)))


def flops(node: fx.Node, shape: Callable[[Tensor], Sequence[Any]]) -> Any:
    """Floating-point operations of a node: a number or an expression, as `shape` gives sizes.

    Two for each product that is summed up; everything else counts one for each element it makes.
    A node that stands for a whole stage knows its number.
    """
    if "flops" in node.meta:
        return node.meta["flops"]
    tensors = tensors_of(node)
    if is_item(node) or not tensors:
        return 0
    made = math.prod(shape(tensors[0]))
    operands = [
        shape(arg.meta["val"])
        for arg in node.args
        if isinstance(arg, fx.Node) and isinstance(arg.meta.get("val"), Tensor)
    ]
    rule = _WORK.get(getattr(node.target, "overloadpacket", None))
    return rule(node, made, operands) if rule and len(operands) > 1 else made


Shapes = Sequence[Sequence[Any]]


def _contract(node: fx.Node, made: Any, shapes: Shapes) -> Any:
    """A matrix product: the last dimension of the left operand is summed over."""
    return 2 * made * (shapes[0][-1] if shapes[0] else 1)


def _addmm(node: fx.Node, made: Any, shapes: Shapes) -> Any:
    return _contract(node, made, shapes[1:])


def _convolution(node: fx.Node, made: Any, shapes: Shapes) -> Any:
    """A weight is used once for each output position, or, transposed, for each input position."""
    transposed = node.target is aten.convolution.default and node.args[6]
    return 2 * (math.prod(shapes[0]) if transposed else made) * math.prod(shapes[1][1:])


def _convolution_backward(node: fx.Node, made: Any, shapes: Shapes) -> Any:
    """As much as the forward for each of the gradients of input and weight."""
    *_, transposed, _, _, mask = arguments(node)
    positions = math.prod(shapes[1] if transposed else shapes[0])
    return 2 * positions * math.prod(shapes[2][1:]) * sum(map(bool, mask[:2]))


def _attention(node: fx.Node, made: Any, shapes: Shapes) -> Any:
    """Scores and their product with the values."""
    return 4 * made * shapes[1][-2]


def _attention_backward(node: fx.Node, made: Any, shapes: Shapes) -> Any:
    """The scores again, and four products for the gradients; operands: gradient, q, k, v."""
    return 10 * math.prod(shapes[1]) * shapes[2][-2]


_WORK: dict[Any, Callable[[fx.Node, Any, Shapes], Any]] = {
    aten.linear: _contract,
    aten.matmul: _contract,
    aten.mm: _contract,
    aten.bmm: _contract,
    aten.addmm: _addmm,
    aten.baddbmm: _addmm,
    aten.conv1d: _convolution,
    aten.conv2d: _convolution,
    aten.conv3d: _convolution,
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten.scaled_dot_product_attention: _attention,
}
_KERNELS = (
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_fused_attention_overrideable,
)
_WORK |= dict.fromkeys(_KERNELS, _attention)
_WORK |= {getattr(aten, f"{kernel.__name__}_backward"): _attention_backward for kernel in _KERNELS}
