"""`fxpipe.compile`: a plain module in, a pipeline out that keeps every level on the way.

pipe = fxpipe.compile(model, example, schedule="nested/1f1b", ranks=4, backend="local")
result = pipe.step(microbatches)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from fxpipe.backends import Backend, choose
from fxpipe.capture import Captured
from fxpipe.costs import Costs
from fxpipe.cut import Cut
from fxpipe.device import Device
from fxpipe.errors import BatchError, FxpipeError
from fxpipe.evaluation import Evaluation, Evaluations
from fxpipe.explain import explain
from fxpipe.inputs import Microbatch
from fxpipe.joint import StageGraphs
from fxpipe.owners import Given as Owners
from fxpipe.passes.regions import Regions
from fxpipe.scheduler import Options, scheduler
from fxpipe.split import Stages
from fxpipe.stageop import check_engine
from fxpipe.steps import Result, Steps
from fxpipe.table import Table
from fxpipe.timeline import Timeline
from fxpipe.variants import Variants
from fxpipe.wanted import LossFn


def compile(
    model: nn.Module,
    example: Microbatch | list[Microbatch] | None = None,
    *,
    microbatches: int | None = None,
    schedule: str | Path | Table = "auto",
    ranks: int | None = None,
    mesh: DeviceMesh | None = None,
    backend: str | None = None,
    regions: Mapping[str, Sequence[str]] | None = None,
    loss_fn: LossFn | None = None,
    engine: str = "aten",
    chunks: int | None = None,
    owners: Owners = None,
    sharded: Sequence[str] = (),
    recompute: Sequence[str] = (),
    live: Mapping[str, int] | None = None,
    memory_budget: float | None = None,
    costs: Costs | Device | None = None,
) -> "Pipe":
    """Compile a model for pipeline-parallel training.

    example: one microbatch, a dict of keyword arguments or a tuple, or a list, one for each path;
    without, the first `step` traces. microbatches: how many a dict given to `step` is cut into.
    schedule: `PLACEMENT/BASE`, or a Table, its text or its file. ranks, mesh, backend: where it
    runs; by default as torch.distributed was started, and in this process alone where it was not.
    regions: region -> names of modules, instead of what is found. loss_fn: model output -> scalar
    loss. engine: "aten" runs the graphs, "inductor" compiles them. The others: see
    `scheduler.Options`. Raises Capture-, Region-, Stage-, Batch-, Schedule- or BackendError.
    """
    check_engine(engine)
    options = Options(chunks, owners, sharded, recompute, live, memory_budget, costs)
    how = scheduler(schedule, options)
    if microbatches is not None and microbatches < 1:
        raise BatchError(f"microbatches={microbatches}; a step needs at least one")
    where = choose(backend, how.ranks if ranks is None else ranks, mesh, costs)
    variants = Variants(model, how, where.ranks, regions, loss_fn)
    pipe = Pipe(model, variants, where, microbatches, engine, example)
    pipe.trace_example()
    return pipe


class Pipe:
    """A compiled model. Every level that it went through can be looked at and printed."""

    def __init__(
        self,
        model: nn.Module,
        variants: Variants,
        backend: Backend,
        microbatches: int | None,
        engine: str,
        example: Microbatch | list[Microbatch] | None,
    ) -> None:
        self.model = model
        self.backend = backend
        self._variants = variants
        self._steps = Steps(variants, backend, microbatches, engine)
        self._evaluations = Evaluations(variants, backend, engine)
        self._example = example

    def step(
        self,
        batch: Any,
        weights: Sequence[float] | Tensor | None = None,
        order: Sequence[int] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> Result:
        """Forward and backward of every microbatch; gradients are added to `.grad`.

        The same as `for mb, w in zip(batch, weights): (w * loss(model(**mb))).backward()`, and the
        result is the same on every rank. batch: a list of microbatches, or one dict whose tensors
        all have the batch as dim 0, with `microbatches` given to `compile`; the same on every
        rank. weights: one factor for each microbatch, 1/M by default. order: which microbatch runs
        as number 0, 1, ... of the table (`passes.reorder`). seeds: as `torch.manual_seed` before
        each microbatch would; without, random numbers go on from rank 0's generator, in eager's
        order. Raises BatchError before anything runs, RankError if a rank fails; then no `.grad`
        and no buffer has changed.
        """
        return self._steps.run(batch, weights, order, seeds)

    def evaluate(
        self,
        batch: Any,
        *,
        outputs: bool | str | Sequence[str] | Callable[[Any], Any] = False,
        to: int | None = None,
        weights: Sequence[float] | Tensor | None = None,
        microbatches: int | None = None,
    ) -> Evaluation:
        """Forward alone, under no_grad, of any number of microbatches; `.grad` is not touched.

        The model's mode is as it is: call `model.eval()` before, as in eager. batch, weights: as in
        `step`; microbatches: how many parts one dict is cut into. outputs: True for all that the
        model returns, names of it, or a function of it, which runs as part of the model; with
        outputs, microbatches without labels need no loss. to: the one rank that gets the outputs
        instead of every rank. Raises BatchError before anything runs, RankError if a rank fails.
        """
        count = microbatches or self._steps.microbatches
        return self._evaluations.run(batch, count, outputs, to, weights)

    def reschedule(
        self,
        schedule: str | Path | Table,
        ranks: int | None = None,
        backend: str | None = None,
        **options: Any,
    ) -> "Pipe":
        """The same model under another schedule, on other ranks, or on another backend.

        options: chunks, owners, sharded, recompute, live, memory_budget, costs, as `compile` takes
        them. What is traced is not traced again, so that schedules can be compared quickly.
        """
        how = scheduler(schedule, Options.of(options))
        ranks = how.ranks if ranks is None else ranks
        same = backend is None and ranks in (None, self.backend.ranks)
        costs = options.get("costs") or self.backend.costs
        where = self.backend.costing(costs)
        if not same:
            where = choose(backend or where.name, ranks, costs=costs)
        variants = self._variants.rescheduled(how, where.ranks)
        steps = self._steps
        pipe = Pipe(self.model, variants, where, steps.microbatches, steps.engine, self._example)
        pipe.trace_example()
        return pipe

    def trace_example(self) -> None:
        """Trace the example, if there is one; compile has done it already."""
        self._variants.follow_mode()
        if self._example is not None:
            if isinstance(self._example, list):
                names = [f"example {i}" for i in range(len(self._example))]
                self._variants.fit_all(self._example, names)
            else:
                self._variants.fit(self._example, "the example")
            self._steps.catch_up()

    @property
    def captured(self) -> Captured:
        """The whole model's graph."""
        return self._variants.first.captured

    @property
    def variants(self) -> tuple[Captured, ...]:
        """The graphs of all variants that microbatches have asked for so far; the first is
        `captured`."""
        return tuple(lowered.captured for lowered in self._variants.all.values())

    @property
    def captures(self) -> int:
        """How often the model has been traced, by this pipe and those it was rescheduled from."""
        return self._variants.captures

    @property
    def regions(self) -> Regions:
        """Which region every node is in."""
        return self._variants.first.regions

    @property
    def stages(self) -> Stages:
        """The forward graph of each stage, and what crosses between them."""
        return self._variants.first.stages

    @property
    def graphs(self) -> Mapping[str, StageGraphs]:
        """F, B and W by stage: `pipe.graphs["llm0"].B`."""
        return self._variants.first.graphs

    @property
    def cut(self) -> Cut:
        """Regions, stages and seams of all variants, as scheduling sees them."""
        return self._variants.union.cut

    @property
    def table(self) -> Table:
        """The operator table for as many microbatches as the last step had, or compile was told;
        as many as there are ranks before both."""
        return self._steps.table(self._steps.count)

    def program(self, rank: int) -> fx.GraphModule:
        """What a rank runs for `table`: a graph module that prints as straight-line Python."""
        if not 0 <= rank < self.backend.ranks:
            raise FxpipeError(f"there is no rank {rank}; this pipe has {self.backend.ranks}")
        return self._steps.program(rank, self._steps.count).module

    @property
    def timeline(self) -> Timeline:
        """The last step as it was measured, on all ranks. Raises FxpipeError before the first."""
        if self._steps.last is None:
            raise FxpipeError("there is no timeline before the first step()")
        return self._steps.last.timeline

    def explain(self) -> str:
        """Every module and loose node: its region, stage, rank, and why."""
        return explain(self._variants)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the model's own names, each once."""
        self._variants.hand_out(self.backend.mine)
        mine = self._variants.held(self.backend.mine)
        yield from ((n, p) for n, p in self.model.named_parameters() if n in mine)

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters: give them to any optimizer."""
        yield from (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """This rank's parameters and buffers under the model's own names, tied ones under each.

        Raises BatchError if another pipe of this model has since trained some on other ranks.
        """
        mine = self._variants.held(self.backend.mine)
        self._variants.refresh()
        self._variants.holding.copies.refuse(mine, self._variants.state)
        names = self._variants.canonical
        return {k: v for k, v in self.model.state_dict().items() if names.get(k, k) in mine}
