"""A model on an emulated machine: other times, no losses, no gradients, and no memory needed."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fxpipe
from fxpipe.costs import Costs
from fxpipe.cut import Kind
from fxpipe.device import Device
from fxpipe.emulation import emptied, stretched
from fxpipe.errors import BackendError
from tests.models import ThreeRegions, both_losses, three_regions


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_that_has_no_numbers(world: None) -> None:
    (mb,) = three_regions(count=1)
    batch = 3 * [{name: torch.empty_like(value, device="meta") for name, value in mb.items()}]
    model = ThreeRegions().to("meta")
    given: Any = {"schedule": "nested/1f1b", "backend": "emulated", "loss_fn": both_losses}
    with pytest.raises(BackendError, match="needs to know what ops take: pass costs="):
        fxpipe.compile(model, **given)
    pipe = fxpipe.compile(model, batch[0], costs=Device(1e9, 1e9), **given)
    assert math.isnan(pipe.step(batch).loss)
    assert pipe.timeline.makespan > 0

    known = {(stage.name, kind): 0.01 for stage in pipe.cut.stages for kind in stage.kinds}
    pipe = pipe.reschedule("upfront/gpipe", costs=Costs(known))
    pipe.step(batch)
    ops = [span for span in pipe.timeline.compute if span.op.kind is not Kind.R]
    assert len(ops) == len(batch) * len(known)
    assert all(span.seconds >= 0.01 for span in ops)
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(BackendError, match="nothing to evaluate"):
        pipe.evaluate(batch)


def test_as_many_bytes_cross_as_in_a_real_step() -> None:
    class Crossing:
        index = 3

        def spec(self, source: str, target: str, kind: Kind) -> Any:
            return (((2, 3), torch.float64), ((4,), torch.bool)) if source == "a" else ()

    (slot,) = emptied([Crossing()])  # type: ignore[list-item]
    assert slot.index == 3
    assert slot.spec("a", "b", Kind.F) == (((52,), torch.uint8),)
    assert slot.spec("b", "c", Kind.F) == ()


def test_stretched_costs() -> None:
    costs = Costs({("a", Kind.F): (1.0, 2.0)}, latency=0.5, bandwidth=8.0, kept={("a", Kind.F): 1})
    longer = stretched(costs, 2)
    assert longer.seconds == {("a", Kind.F): (2.0, 4.0)}
    assert (longer.latency, longer.bandwidth, longer.kept) == (1.0, 4.0, costs.kept)
