"""The steps of a pipe: a batch bound to its variants, the programs that run it, the gradients.

Steps(variants, backend, ...).run(batch, weights, order) -> Result
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxpipe.agreement import alike, check_weights
from fxpipe.backends import Backend
from fxpipe.bind import Bound, Fit
from fxpipe.costs import Costs
from fxpipe.cut import Cut
from fxpipe.device import Device
from fxpipe.emulation import Emulation, emptied
from fxpipe.errors import BatchError
from fxpipe.inputs import Microbatch, split_batch
from fxpipe.passes.reorder import check_order
from fxpipe.program import Program, emit
from fxpipe.runtime import Step, run_step
from fxpipe.table import Table
from fxpipe.variants import Variants


@dataclass(frozen=True)
class Result:
    """What a step returns.

    losses: [microbatches], each microbatch's own loss; weights: [microbatches]; metrics: what
    loss_fn returns beside the loss, [microbatches] each; on every rank.
    """

    losses: Tensor
    weights: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def loss(self) -> Tensor:
        """The step's loss, 0-dim: the sum of weight times loss."""
        return weighted(self.losses, self.weights)


def weighted(losses: Tensor, weights: Tensor) -> Tensor:
    """The sum of weight times loss, in the order of the microbatches. One of weight 0 is no part of
    it, even if its own loss is not a number: a mean over no token."""
    total = torch.zeros((), dtype=losses.dtype)
    for weight, loss in zip(weights, losses, strict=True):
        total = total + weight * loss if weight else total
    return total


def returned(step: Step, bound: Sequence[Bound]) -> list[Any]:
    """What was wanted of each microbatch beside its loss, in the order of the caller."""
    by_mb: dict[int, dict[int, Tensor]] = {mb.index: {} for mb in bound}
    for (mb, number), tensor in step.outputs.items():
        by_mb[mb][number] = tensor
    found = {
        own: mb.output([by_mb[mb.index][number] for number in range(len(by_mb[mb.index]))])
        for own, mb in zip(step.order, bound, strict=True)
        if mb.wants
    }
    return [found.get(own) for own in range(len(bound))]


def _metrics(found: Sequence[Mapping[str, Tensor] | None]) -> dict[str, Tensor]:
    """Each metric over the microbatches; nan where one has not got it."""
    names = dict.fromkeys(name for metrics in found for name in metrics or {})
    return {name: torch.stack([_number(metrics, name) for metrics in found]) for name in names}


def _number(metrics: Mapping[str, Tensor] | None, name: str) -> Tensor:
    if metrics is None or name not in metrics:
        return torch.tensor(float("nan"), dtype=torch.float64)
    return metrics[name].double().cpu()


class Steps:
    """Runs steps, and keeps the tables and the programs that they need.

    microbatches: how many a batch in one dict is cut into, once that is known
    """

    def __init__(
        self, variants: Variants, backend: Backend, microbatches: int | None, engine: str
    ) -> None:
        self.microbatches = variants.scheduler.microbatches or microbatches
        self.engine = engine
        self.last: Step | None = None
        self._variants = variants
        self._backend = backend
        self._tables: dict[tuple[Cut, int], Table] = {}
        self._programs: dict[tuple[int, int, int], Program] = {}

    def run(
        self,
        batch: Any,
        weights: Sequence[float] | Tensor | None,
        order: Sequence[int] | None,
        seeds: Sequence[int] | None = None,
    ) -> Result:
        """One step, as `Pipe.step` describes it."""
        parts = split_batch(batch, self.microbatches)
        step, bound, factors = self.advance(parts, weights, order, seeds=seeds)
        self._accumulate(step.gradients)
        if self._apart:
            union, (rank,) = self._variants.union, self._backend.mine
            where = self._variants.holding.by_rank(union), union.trained, rank
            self._variants.holding.copies.trained(*where, self._variants.state)
        self._write(step.buffers)
        return Result(step.losses, factors.cpu(), _metrics(returned(step, bound)))

    def advance(
        self,
        parts: Sequence[Microbatch],
        weights: Sequence[float] | Tensor | None = None,
        order: Sequence[int] | None = None,
        to: int | None = None,
        seeds: Sequence[int] | None = None,
    ) -> tuple[Step, list[Bound], Tensor]:
        """Run microbatches: what it gives, what ran, and the weights. No gradient and no buffer is
        written."""
        if not self._apart:
            return self._advance(parts, weights, order, to, seeds)
        given: dict[str, Any] = {"weights": weights, "order": order, "to": to, "seeds": seeds}
        with alike(self._backend, parts, self._variants.purpose, given):
            return self._advance(parts, **given)

    def _advance(
        self,
        parts: Sequence[Microbatch],
        weights: Sequence[float] | Tensor | None,
        order: Sequence[int] | None,
        to: int | None,
        seeds: Sequence[int] | None,
    ) -> tuple[Step, list[Bound], Tensor]:
        emulated = self._backend.costs is not None
        if not emulated:
            _refuse_meta(self._variants.device)
        self._variants.follow_mode()
        fits = self._variants.fit_all(parts, [f"microbatch {i}" for i in range(len(parts))])
        self._variants.refresh()
        self.catch_up()
        if self._apart:
            self._variants.holding.check(self._variants.union)
        factors = self._weights(weights, len(parts))
        order = tuple(range(len(parts))) if order is None else check_order(order, len(parts))
        bound = self._bound(fits, order, factors, with_data=not emulated)
        self.microbatches = self.microbatches or len(parts)
        programs = {rank: self.program(rank, len(parts)) for rank in self._backend.mine}
        self._backend.connect(programs[self._backend.mine[0]].table)
        self.last = run_step(
            self._where(),
            programs,
            bound,
            factors.dtype,
            order,
            to,
            state=self._variants.state,
            seeds=_checked(seeds, len(parts)),
        )
        return self.last, bound, factors

    def catch_up(self) -> None:
        """Have the newest of what the ranks of this process read. Every rank calls it.

        Raises BatchError if ranks hold different values of one tensor.
        """
        known = self._variants
        if self._apart:
            held = known.holding.by_rank(known.union)
            if known.holding.copies.bring(self._backend, held, known.state):
                check_weights(self._backend, held, known.state)
        elif known.holding.copies.any_behind and self._backend.costs is None:
            known.holding.copies.refuse(known.held(self._backend.mine), known.state)

    @property
    def _apart(self) -> bool:
        """Whether other processes train copies of the model of their own."""
        return len(self._backend.mine) < self._backend.ranks and self._backend.costs is None

    @property
    def count(self) -> int:
        """How many microbatches the last step had, or the next one is expected to have."""
        if self.last is not None:
            return self.last.table.microbatches
        return self.microbatches or self._backend.ranks

    def table(self, count: int) -> Table:
        """The table of a step of so many microbatches."""
        variants = self._variants
        key = variants.union.cut, count
        if key not in self._tables:
            self._tables[key] = variants.scheduler.table(*key, variants.reckon)
        return self._tables[key]

    def program(self, rank: int, count: int) -> Program:
        """What a rank runs for that table."""
        key = self._variants.generation, rank, count
        if key not in self._programs:
            # Programs of an older generation would keep its graphs alive.
            self._programs = {k: p for k, p in self._programs.items() if k[0] == key[0]}
            self._programs[key] = emit(
                self.table(count),
                rank,
                self._variants.graphs,
                self._variants.state,
                owners=self._variants.union.owners,
                engine=self._engine(),
                ahead=self._backend.ahead,
            )
        return self._programs[key]

    def _bound(
        self, fits: Sequence[Fit], order: Sequence[int], factors: Tensor, *, with_data: bool
    ) -> list[Bound]:
        """The microbatches in the order of the table. Raises BatchError where data is missing."""
        bound = []
        for number, i in enumerate(order):
            fit, lowered = fits[i], self._variants[fits[i].number]
            if with_data and any(tensor.is_meta for tensor in fit.tensors):
                raise BatchError(f"microbatch {i} is on the meta device, so there is no data in it")
            bound.append(Bound(number, fit.number, lowered, fit.sizes, fit.tensors, factors[i]))
        return bound if with_data else emptied(bound)

    def _where(self) -> Backend:
        """The backend; an emulated device as what it takes for the microbatches known so far."""
        where = self._backend
        if isinstance(where.costs, Device):
            return where.costing(self._variants.reckon(where.costs))
        return where

    def _engine(self) -> str | Emulation:
        costs = self._where().costs
        return Emulation(costs) if isinstance(costs, Costs) else self.engine

    def _weights(self, weights: Sequence[float] | Tensor | None, count: int) -> Tensor:
        if weights is None:
            weights = [1 / count] * count
        dtype = self._variants.loss_dtype
        try:
            found = torch.as_tensor(weights, dtype=dtype).detach().to(self._device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BatchError(f"weights={weights!r} are no numbers ({error})") from error
        if found.shape != (count,):
            raise BatchError(
                f"weights has shape {tuple(found.shape)}; expected one for each of {count} "
                "microbatches"
            )
        return found

    @property
    def _device(self) -> torch.device:
        """Where ranks run: the backend's device, or, with all in this process, the model's."""
        if self._backend.name != "local":
            return self._backend.device.device
        return self._variants.device

    def _accumulate(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            parameter = self._variants.state[name]
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                with torch.no_grad():
                    parameter.grad.add_(gradient)

    def _write(self, buffers: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in buffers.items():
                self._variants.state[name].copy_(value)


def _checked(seeds: Sequence[int] | None, count: int) -> Sequence[int] | None:
    if seeds is not None and len(seeds) != count:
        raise BatchError(
            f"seeds has {len(seeds)} numbers; expected one for each of {count} microbatches"
        )
    return seeds


def _refuse_meta(device: torch.device) -> None:
    if device.type == "meta":
        raise BatchError(
            "the model is on the meta device: it has no numbers, so it compiles and cannot run. "
            "Give it memory first, for example with model.to_empty(device='cpu'), and load its "
            "weights"
        )
