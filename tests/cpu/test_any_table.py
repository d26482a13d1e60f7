"""Any model, any cut, any order that can run: the losses and gradients of eager."""

from functools import lru_cache
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import fxpipe
from fxpipe.schedule import AUTO, Schedule
from fxpipe.skeletons import base
from tests import models
from tests.layouts import AnyOrder, any_order, laid_out
from tests.schedules import EVERY

Flags = tuple[bool, ...]
BLOCKS = 4  # of the backbone

# Every example traces a model: a failing one is not made smaller.
few = settings(
    max_examples=7,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@lru_cache(maxsize=2)
def traced(encoders: Flags, generators: Flags, backbone: bool) -> fxpipe.Pipe:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = models.AnyRegions(encoders, generators, backbone).double()
    return fxpipe.compile(
        model, model.batch(1)[0], schedule="nested/1f1b", ranks=BLOCKS, backend="local"
    )


def shapes() -> st.SearchStrategy[tuple[Flags, Flags, bool]]:
    """Which encoders and generators there are, and which of all are trained."""
    flags = st.lists(st.booleans(), max_size=2).map(tuple)
    made = st.tuples(flags, flags, st.booleans())
    return made.filter(lambda shape: any(shape[0]) or any(shape[1]) or shape[2])


def check(pipe: fxpipe.Pipe, microbatches: int, order: list[int] | None = None) -> None:
    model: Any = pipe.model
    batch = model.batch(microbatches)
    weights = [1 / (2 + i) for i in range(microbatches)]
    model.zero_grad()
    losses = torch.stack([model(**mb) for mb in batch])
    (losses * losses.new_tensor(weights)).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    result = pipe.step(batch, weights, order)
    torch.testing.assert_close(result.losses, losses.detach(), rtol=1e-12, atol=0)
    for name, p in model.named_parameters():
        assert (p.grad is None) == (expected[name] is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-11, atol=1e-14)


@few
@given(shapes(), st.sampled_from(EVERY), st.integers(1, 4), st.integers(1, 8), st.randoms())
def test_any_schedule(
    shape: tuple[Flags, Flags, bool], schedule: str, ranks: int, microbatches: int, random: Any
) -> None:
    name = Schedule.parse(schedule).base
    chunks = 1 if name == AUTO else base(name).default_chunks
    pipe = traced(*shape).reschedule(schedule, min(ranks, BLOCKS // chunks))
    order = random.sample(range(microbatches), microbatches)
    check(pipe, microbatches, order)


@few
@given(shapes(), st.integers(1, 3), st.integers(1, 6), st.integers(0, 99), st.randoms())
def test_any_order(
    shape: tuple[Flags, Flags, bool], ranks: int, microbatches: int, seed: int, random: Any
) -> None:
    pipe = traced(*shape)
    regions = list(pipe.regions.roles)
    others = [name for name in regions if name != "llm"]
    backbone = random.sample(range(ranks), ranks) + random.choices(range(ranks), k=BLOCKS - ranks)
    homes = {name: random.choice([None, *range(ranks)]) for name in others}
    recompute = tuple(name for name in regions if random.random() < 0.3)
    laid = laid_out(pipe, AnyOrder(homes, tuple(backbone), recompute, seed=seed))
    check(laid, microbatches)
    table = fxpipe.passes.run(any_order(laid.cut, microbatches, seed + 1))
    check(laid.reschedule(str(table)), microbatches)
