"""How forward changes tensors of the model: running statistics, counters, moving averages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch import Tensor, fx, nn


@dataclass(frozen=True)
class Recipe:
    """New values of some buffers: `module(*reads)` -> one value for each name.

    reads: ("state", name of a buffer), ("stat", name of a node), ("size", expression)
    """

    names: tuple[str, ...]
    reads: tuple[tuple[str, Any], ...]
    module: fx.GraphModule

    def apply(
        self,
        values: Mapping[str, Tensor],
        stats: Mapping[str, Tensor],
        size: Callable[[sympy.Expr], int],
    ) -> dict[str, Tensor]:
        """The new values. values: of buffers, before; stats: what one microbatch has made."""
        if not self.names:
            return {}
        found: dict[str, Callable[[Any], Any]] = {
            "state": values.__getitem__,
            "stat": stats.__getitem__,
            "size": size,
        }
        made = self.module(*(found[kind](key) for kind, key in self.reads))
        return dict(zip(self.names, made, strict=True))


@dataclass(frozen=True)
class Updates:
    """What one microbatch does to the model's tensors.

    stats: the values that stages compute for it; carried: name of buffer -> the stat that is its
    new value; foreseen: updates that read no stat; deferred: updates that wait for the stats
    """

    stats: tuple[str, ...]
    carried: Mapping[str, str]
    foreseen: Recipe
    deferred: Recipe

    def also(self, carried: Mapping[str, str]) -> "Updates":
        """These, and buffers that become other values that stages compute."""
        stats = (*carried.values(), *self.stats)
        return replace(self, stats=stats, carried={**carried, **self.carried})

    @property
    def names(self) -> tuple[str, ...]:
        """All that it changes."""
        return (*self.foreseen.names, *self.deferred.names, *self.carried)

    @property
    def read(self) -> tuple[str, ...]:
        """What may be read by a stage, and has another value in each microbatch."""
        return (*self.foreseen.names, *self.carried)


def no_updates() -> Updates:
    """What a microbatch does that leaves the model alone."""
    nothing = Recipe((), (), fx.GraphModule(nn.Module(), fx.Graph()))
    return Updates((), {}, nothing, nothing)
