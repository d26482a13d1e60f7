"""Symbols of sizes that depend on data, as they stand in what a traced operator gave."""

import sympy
import torch
from torch import Tensor

from fxpipe.torch_internals import raw_expression, replace_symbol, unbacked_in
from fxpipe.trees import take_apart


def unbacked_sizes(value: object) -> list[sympy.Basic]:
    """The sizes and numbers in a value that no shape of the inputs tells."""
    found: list[sympy.Basic] = []
    for leaf in take_apart(value)[0]:
        for number in leaf.shape if isinstance(leaf, Tensor) else [leaf]:
            if isinstance(number, (torch.SymInt, torch.SymBool)):
                found.append(raw_expression(number))
    return [expr for expr in found if unbacked_in(expr)]


def same_unbacked(before: object, again: object) -> None:
    """Tell the tracer that what an operator gives again has the sizes that it had before."""
    old, new = take_apart(before)[0], take_apart(again)[0]
    for one, other in zip(old, new, strict=False):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            if one.dim() != other.dim():
                continue
            for size, number in zip(one.shape, other.shape, strict=True):
                _replace(size, number)
        else:
            _replace(one, other)


def _replace(before: object, again: object) -> None:
    """One symbol, or the symbol in a truth value, which is `Eq(symbol, 1)`."""
    if not isinstance(again, (torch.SymInt, torch.SymBool)):
        return
    if not isinstance(before, (int, torch.SymInt, torch.SymBool)):
        return
    new, old = raw_expression(again), raw_expression(before)
    if isinstance(new, sympy.Eq) and isinstance(old, sympy.Eq):
        new, old = new.lhs, old.lhs
    if isinstance(new, sympy.Symbol) and unbacked_in(new) and new != old:
        replace_symbol(again, new, old)
