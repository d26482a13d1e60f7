"""The symbols of a captured graph in numbers, from the sizes of a microbatch."""

from collections.abc import Iterable, Mapping, Sequence

import sympy
import torch
from torch import Tensor

from fxpipe.capture import Captured
from fxpipe.dry import shapes
from fxpipe.inputs import Leaf

Symbols = Mapping[sympy.Symbol, sympy.Integer]
Found = Sequence[tuple[Leaf, int, sympy.Expr, int]]  # leaf, dimension, what it should be, size
Ranges = Mapping[sympy.Symbol, tuple[sympy.Expr, sympy.Expr]]


def solve(
    leaves: Sequence[Leaf], tensors: Sequence[Tensor]
) -> tuple[dict[sympy.Symbol, sympy.Integer], list[tuple[Leaf, int, sympy.Expr, int]]]:
    """The symbols' values from the tensors' sizes, and every (leaf, dim, expression, size)."""
    sizes = [
        (leaf, dim, expr, tensor.shape[dim])
        for leaf, tensor in zip(leaves, tensors, strict=True)
        for dim, expr in enumerate(leaf.shape)
    ]
    symbols = {
        expr: sympy.Integer(size) for _, _, expr, size in sizes if isinstance(expr, sympy.Symbol)
    }
    for _, _, expr, size in sizes:
        unknown = expr.xreplace(symbols).free_symbols
        if len(unknown) == 1:
            symbol = unknown.pop()
            answers = sympy.solve(expr.xreplace(symbols) - size, symbol)
            if len(answers) == 1 and answers[0].is_integer:
                symbols[symbol] = sympy.Integer(answers[0])
    return symbols, sizes


def solved(
    captured: Captured, tensors: Sequence[Tensor]
) -> tuple[dict[sympy.Symbol, sympy.Integer], list[tuple[Leaf, int, sympy.Expr, int]]]:
    """`solve`, with the sizes of what an opaque stage makes where they do not follow from it."""
    if captured.prefix is None or not decides(captured):
        return solve(captured.leaves, tensors)
    made = [torch.empty(s, device="meta") for s in shapes(captured.prefix, tensors)]
    return solve((*captured.leaves, *captured.crossing), (*tensors, *made))


def decides(captured: Captured) -> bool:
    """Whether sizes of what crosses do not follow from the microbatch's own sizes: its values, too,
    must be looked at."""
    known = {
        symbol for leaf in captured.leaves for size in leaf.shape for symbol in size.free_symbols
    }
    return any(size.free_symbols - known for leaf in captured.crossing for size in leaf.shape)


def read_by(captured: Captured) -> Iterable[str]:
    """The tensors whose values decide whether, or how, a microbatch fits."""
    if captured.prefix is not None and decides(captured):
        return [leaf.name for leaf in captured.leaves if not leaf.dtype.is_floating_point]
    return captured.values


def misfit(
    ranges: Ranges, symbols: Symbols, sizes: Found, guards: Sequence[sympy.Basic]
) -> str | None:
    """Which assumption of a graph these sizes break, if any.

    guards: conditions on the symbols that tracing has assumed.
    """
    for leaf, dim, expr, size in sizes:
        if expr.free_symbols - set(symbols) or int(expr.xreplace(symbols)) != size:
            return f"dimension {dim} of {leaf.name} is {size}; this graph was traced for {expr}"
    for symbol, size in symbols.items():
        low, high = ranges.get(symbol, (sympy.Integer(0), sympy.oo))
        if not low <= size <= high:
            return f"a dimension is {size}; this graph was traced for {low} to {high}"
    return broken(guards, symbols)


def broken(guards: Sequence[sympy.Basic], symbols: Symbols) -> str | None:
    """Which condition on symbols does not hold, if any."""
    for guard in guards:
        if guard.free_symbols <= set(symbols) and not guard.xreplace(symbols):
            return f"the sizes break {guard}, which the model's code assumed"
    return None
