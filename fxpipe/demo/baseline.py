"""The same model by hand in torch.distributed.pipelining: 1F1B with the encoder in stage 0."""

import copy
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from fxpipe.demo.data import Microbatch

Plan = tuple[range, ...]
"""Which decoder layers each stage has."""


class HandStage(nn.Module):
    """Some decoder layers of a LLaVA: before them the encoder in the first stage, and after them
    the head in the last one."""

    def __init__(self, llava: Any, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        whole = copy.deepcopy(llava)
        self.first, self.last = first, last
        self.llava: Any = whole.model if first else None
        self.decoder: Any = whole.model.language_model
        self.decoder.layers = nn.ModuleList(self.decoder.layers[i] for i in layers)
        if not first:
            self.decoder.embed_tokens = None
        if not last:
            self.decoder.norm = nn.Identity()
        self.head: Any = whole.lm_head if last else None

    def forward(self, *hidden: Tensor, **microbatch: Tensor) -> Tensor:
        """Hidden states, or logits in the last stage. Every stage is given the mask as a field of
        the batch: a later stage would otherwise need it sent through all stages before it."""
        if self.llava is not None:
            out: Tensor = self.llava(**microbatch)[0]
        else:
            mask = microbatch["attention_mask"]
            out = self.decoder(inputs_embeds=hidden[0], attention_mask=mask)[0]
        if self.head is not None:
            out = self.head(out)
        return out


class Baseline:
    """One rank of the hand-made pipeline, with a given plan."""

    def __init__(self, llava: Any, plan: Plan, rank: int, microbatches: int) -> None:
        self.plan = plan
        last = rank == len(plan) - 1
        self.module = HandStage(llava, plan[rank], first=rank == 0, last=last)
        stage = PipelineStage(self.module, rank, len(plan), torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, microbatches, loss_fn=_loss)

    def step(self, batch: Sequence[Microbatch]) -> Tensor | None:
        """Forward and backward of a step, gradients of the mean loss; the loss on the last rank."""
        names = ["attention_mask"]
        if self.module.first:
            names += ["input_ids", "pixel_values"]
        fields: dict[str, Any] = {name: torch.cat([mb[name] for mb in batch]) for name in names}
        target = torch.cat([mb["labels"] for mb in batch]) if self.module.last else None
        losses: list[Tensor] | None = [] if self.module.last else None
        self._schedule.step(target=target, losses=losses, return_outputs=False, **fields)
        return torch.stack(losses).mean().detach() if losses else None


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def plans(layers: int, ranks: int) -> list[Plan]:
    """Every way to give the stages consecutive layers; only the encoder's stage may have none."""
    cuts = combinations(range(layers), ranks - 1)
    return [tuple(range(a, b) for a, b in pairwise([0, *cut, layers])) for cut in cuts]


def fastest(llava: Any, rank: int, ranks: int, batch: Sequence[Microbatch]) -> Baseline:
    """The baseline with the plan that takes the least time, measured: the best a hand could do."""
    every = plans(len(llava.model.language_model.layers), ranks)
    candidates = [Baseline(llava, plan, rank, len(batch)) for plan in every]
    seconds = torch.tensor([_best_of(baseline, batch) for baseline in candidates])
    dist.broadcast(seconds, src=0)
    return candidates[int(seconds.argmin())]


def _best_of(baseline: Baseline, batch: Sequence[Microbatch], repeats: int = 3) -> float:
    baseline.step(batch)
    return min(timed(lambda: baseline.step(batch)) for _ in range(repeats))


def timed(step: Callable[[], object]) -> float:
    """Seconds from when all ranks start a step until all have ended it."""
    dist.barrier()
    start = perf_counter()
    step()
    dist.barrier()
    return perf_counter() - start
