"""How a write to a view becomes a new value of what it is a view of; counterparts of operators.

rule(view, base, value, read) -> (operator, arguments), or None where there is no way
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from fxpipe.dataflow import arguments, aten, function, path
from fxpipe.errors import CaptureError


def counterpart(node: fx.Node) -> Callable[..., Any]:
    """The operator that makes a new tensor, or a view, of what `node` does in place."""
    called = function(node)
    own = called.overloadpacket.__name__
    # `x |= y` is `__ior__`, and its counterpart `__or__`.
    name = f"__{own[3:]}" if own.startswith("__i") else own.removesuffix("_")
    packet = getattr(aten, name, None) if called.namespace == "aten" else None
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet else []
    kinds = _kinds(called)
    candidates = [overload for overload in overloads if _kinds(overload) == kinds]
    candidates.sort(key=lambda overload: overload._overloadname != called._overloadname)
    found = [o for o in candidates if not o._schema.is_mutable]
    if not found or name in ("resize", "set"):
        raise CaptureError(refusal(node, "it has no counterpart that makes a new tensor"))
    overload: Callable[..., Any] = found[0]
    return overload


def _kinds(called: Any) -> list[str]:
    """What an operator takes. Overloads of one name may differ in it: `pow_.Scalar` takes a tensor
    and a number, `pow.Scalar` a number and a tensor."""
    return [str(a.real_type) for a in called._schema.arguments if not a.is_out]


def written_by(node: fx.Node) -> Any:
    """What an in-place operator writes to: the argument, or the one given as `out=`."""
    arguments_of = function(node)._schema.arguments
    for i, argument in enumerate(arguments_of):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return node.kwargs[argument.name] if argument.name in node.kwargs else node.args[i]
    return None


def refusal(node: fx.Node, why: str) -> str:
    lines = str(node.meta.get("stack_trace", "")).strip().splitlines()
    where = " ".join(line.strip() for line in lines[-2:]) or node.format_node()
    return (
        f"module {path(node) or '(the model itself)'}: the in-place operator {node.target} "
        f"({where}) cannot become a value: {why}. Write it out of place: y = x * 2 for x.mul_(2), "
        "torch.where for a masked write"
    )


Call = tuple[Callable[..., Any], tuple[Any, ...]]
Reader = Callable[[fx.Node], fx.Node]


def _rest(view: fx.Node, read: Reader) -> tuple[Any, ...]:
    rest: tuple[Any, ...] = fx.node.map_arg(tuple(view.args[1:]), read)
    return rest


def _by(scatter: Callable[..., Any]) -> Callable[..., Call]:
    """The scatter operator that takes the view's own arguments."""
    return lambda view, base, value, read: (scatter, (base, value, *_rest(view, read)))


def _same_order(view: fx.Node, base: fx.Node, value: fx.Node, read: Reader) -> Call:
    return aten.reshape_as.default, (value, base)


def itself(view: fx.Node, base: fx.Node, value: fx.Node, read: Reader) -> Call:
    return aten.alias.default, (value,)


def _swapped(view: fx.Node, base: fx.Node, value: fx.Node, read: Reader) -> Call:
    return counterpart(view), (value, *_rest(view, read))


def _permuted(view: fx.Node, base: fx.Node, value: fx.Node, read: Reader) -> Call:
    dims = arguments(view)[1]
    count = len(dims)
    order = [dim % count for dim in dims]
    return aten.permute.default, (value, [order.index(dim) for dim in range(count)])


def _moved_back(view: fx.Node, base: fx.Node, value: fx.Node, read: Reader) -> Call:
    _, source, destination = arguments(view)
    return function(view), (value, destination, source)


def _narrowed(view: fx.Node, base: fx.Node, value: fx.Node, read: Reader) -> Call | None:
    dim, start, length = _rest(view, read)
    if not isinstance(start, int) or not isinstance(length, int) or start < 0:
        return None
    return aten.slice_scatter.default, (base, value, dim, start, start + length)


def _expanded(view: fx.Node, base: fx.Node, value: fx.Node, read: Reader) -> Call | None:
    """One element that stands for several cannot be written to; the same shape is a plain view."""
    same = view.meta["val"].shape == base.meta["val"].shape
    return itself(view, base, value, read) if same else None


def _real(view: fx.Node, base: fx.Node, value: fx.Node, read: Reader) -> Call:
    """The real part replaced; of a tensor that is not complex it is the tensor itself."""
    if not base.meta["val"].is_complex():
        return itself(view, base, value, read)
    other = base.graph.call_function(aten.imag.default, (base,))
    other.meta = dict(view.meta)
    return aten.complex.default, (value, other)


def _imaginary(view: fx.Node, base: fx.Node, value: fx.Node, read: Reader) -> Call:
    other = base.graph.call_function(aten.real.default, (base,))
    other.meta = dict(view.meta)
    return aten.complex.default, (other, value)


def _as_complex(view: fx.Node, base: fx.Node, value: fx.Node, read: Reader) -> Call:
    plain = base.graph.call_function(aten.contiguous.default, (value,))
    plain.meta = dict(view.meta)
    return aten.view_as_complex.default, (plain,)


def _as_real(view: fx.Node, base: fx.Node, value: fx.Node, read: Reader) -> Call:
    return aten.view_as_real.default, (value,)


def rejoined(parts: fx.Node, number: int, value: fx.Node, read: Reader) -> Call:
    """What was taken apart by split, chunk or unbind, with one of its parts replaced."""
    new = read(parts)
    items: list[fx.Node] = []
    for i, part in enumerate(parts.meta["val"]):
        item = value if i == number else new.graph.call_function(operator.getitem, (new, i))
        if i != number:
            item.meta = {**parts.meta, "val": part}
        items.append(item)
    together, dim = APART[parts.target]
    given = arguments(parts)
    return together, (items, given[dim] if dim < len(given) else parts.kwargs.get("dim", 0))


# What takes a tensor apart: what puts it together, and which argument is the dimension.
APART: Mapping[Any, tuple[Callable[..., Any], int]] = {
    aten.split.Tensor: (aten.cat.default, 2),
    aten.split.sizes: (aten.cat.default, 2),
    aten.split_with_sizes.default: (aten.cat.default, 2),
    aten.tensor_split.sections: (aten.cat.default, 2),
    aten.tensor_split.indices: (aten.cat.default, 2),
    aten.chunk.default: (aten.cat.default, 2),
    aten.unbind.int: (aten.stack.default, 1),
}
SCATTER: Mapping[Any, Callable[..., Call | None]] = {
    aten.slice.Tensor: _by(aten.slice_scatter.default),
    aten.select.int: _by(aten.select_scatter.default),
    aten.diagonal.default: _by(aten.diagonal_scatter.default),
    **dict.fromkeys(
        [
            aten.view.default,
            aten.reshape.default,
            aten.flatten.using_ints,
            aten.unflatten.int,
            aten.unsqueeze.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.view_as.default,
            aten.unsqueeze_.default,
            aten.squeeze_.default,
            aten.squeeze_.dim,
            aten.ravel.default,
        ],
        _same_order,
    ),
    **dict.fromkeys(
        [
            aten.alias.default,
            aten.contiguous.default,
            aten.to.dtype,
            aten.to.dtype_layout,
            aten.to.device,
            aten.to.other,
            aten.type_as.default,
            aten.dropout.default,
        ],
        itself,
    ),
    **dict.fromkeys(
        [
            aten.transpose.int,
            aten.t.default,
            aten.swapaxes.default,
            aten.swapdims.default,
            aten.mT.default,
            aten.transpose_.default,
            aten.t_.default,
            aten.swapaxes_.default,
            aten.swapdims_.default,
        ],
        _swapped,
    ),
    **dict.fromkeys([aten.movedim.int, aten.movedim.intlist], _moved_back),
    **dict.fromkeys([aten.expand.default, aten.expand_as.default], _expanded),
    aten.narrow.default: _narrowed,
    aten.real.default: _real,
    aten.imag.default: _imaginary,
    aten.view_as_real.default: _as_complex,
    aten.view_as_complex.default: _as_real,
    aten.permute.default: _permuted,
}
