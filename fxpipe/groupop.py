"""The modules that a program calls for its gradients: one for each group, and one for all.

group_R(rank, grads)                         -> gradients summed over the ranks of the group
gradients(rank, grads, reduced)              -> this rank's gradients, by name of parameter
"""

from collections.abc import Mapping, Sequence
from time import perf_counter

import torch
from torch import Tensor, nn

from fxpipe.accumulation import Grads
from fxpipe.cut import Cut
from fxpipe.stageop import Running, Variants
from fxpipe.state import grad_dtype


class GroupOp(nn.Module):
    """R of a group: its parameters' gradients, summed over its ranks in rank order.

    Which parameters take part is decided from the variants of the step, which every rank knows: one
    that had no microbatch contributes zeros, and one that no variant trains is in no rank's sum.
    owners: name of a trained parameter -> the stages that hold it.
    """

    def __init__(
        self,
        group: str,
        cut: Cut,
        variants: Variants,
        state: Mapping[str, Tensor],
        owners: Mapping[str, tuple[str, ...]],
    ) -> None:
        super().__init__()
        self.stages = cut.groups[group]
        self.ranks = cut.ranks_of(self.stages)
        self._token = f"{group}.R"
        self._variants = variants
        self._state = state
        self._owners = owners

    def forward(self, rank: Running, grads: Sequence[Grads]) -> Grads:
        """Pack what there is by dtype, sum it, unpack it."""
        rank.now = self._token
        start = perf_counter()
        local = {name: self._local(name, grads) for name in self._names(rank.variants)}
        summed: Grads = {}
        for dtype in sorted({grad.dtype for grad in local.values()}, key=str):
            names = [name for name, grad in local.items() if grad.dtype is dtype]
            flat = torch.cat([local.pop(name).reshape(-1) for name in names])
            total = rank.reduce(self._token, flat, self.ranks)
            start_at = 0
            for name in names:
                like = self._state[name]
                summed[name] = total[start_at : start_at + like.numel()].view(like.shape)
                start_at += like.numel()
        rank.times[self._token] = (start, perf_counter())
        return summed

    def _names(self, variants: frozenset[int]) -> list[str]:
        trained: dict[str, None] = {}
        for stage in self.stages:
            for variant in sorted(variants):
                graphs = self._variants[variant].get(stage)
                trained.update(dict.fromkeys(graphs.trained if graphs else ()))
        return [name for name in trained if self._owners[name] == self.stages]

    def _local(self, name: str, grads: Sequence[Grads]) -> Tensor:
        found = [stage[name] for stage in grads if name in stage]
        like = self._state[name]
        return total(found) if found else torch.zeros_like(like, dtype=grad_dtype(like))


class GradientsOp(nn.Module):
    """The gradients of a rank: those of its groups, and the sums over its own stages."""

    def forward(self, rank: Running, grads: Sequence[Grads], reduced: Sequence[Grads]) -> Grads:
        """A parameter of a group comes from the group's sum alone."""
        result = {name: grad for group in reduced for name, grad in group.items()}
        own: dict[str, list[Tensor]] = {}
        for stage in grads:
            for name, grad in stage.items():
                if name not in result:
                    own.setdefault(name, []).append(grad)
        return {**{name: total(found) for name, found in own.items()}, **result}


def total(found: Sequence[Tensor]) -> Tensor:
    """The gradients of one parameter in several stages, summed into the first, in their order."""
    for grad in found[1:]:
        found[0].add_(grad)
    return found[0]
