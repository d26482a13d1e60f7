"""Costs from the graphs: flops as torch counts them, bytes as the runtime counts them."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fxpipe
from fxpipe.costs import Costs, at
from fxpipe.cut import Kind
from fxpipe.formulas import peak_flops, threshold
from fxpipe.lower import Lowered
from fxpipe.pipe import Pipe
from fxpipe.roofline import Device, Roofline, costs_of, roofline, symbols_of
from fxpipe.simulate import simulate
from fxpipe.solving import Symbols
from tests import models

DEVICE = Device(peak_flops=1e12, bandwidth=1e11, alpha=1e-6, beta=1e-10)
_PRODUCTS = re.compile("mm|bmm|addmm|convolution")


def _three() -> tuple[nn.Module, list[Any], Callable[..., Any]]:
    return models.ThreeRegions(), models.three_regions(uneven=True), models.both_losses


@cache
def stepped() -> tuple[Pipe, Lowered, Roofline, Costs]:
    """A pipeline that has run a step of uneven microbatches, and its costs."""
    torch.manual_seed(0)
    model, batch, loss = _three()
    pipe = fxpipe.compile(model, batch[0], ranks=2, backend="local", loss_fn=loss)
    pipe.step(batch)
    lowered = pipe._variants.first
    return pipe, lowered, roofline(lowered), costs_of(_steps(lowered), DEVICE)


def _steps(lowered: Lowered) -> list[tuple[Lowered, Symbols]]:
    return [(lowered, symbols_of(lowered, mb)) for mb in models.three_regions(uneven=True)]


def test_flops_are_those_that_torch_counts() -> None:
    """It counts products alone; here they are all but a few percent, for every set of sizes."""
    model, batch, loss = _three()
    _, lowered, roof, _ = stepped()
    for mb in batch:
        with FlopCounterMode(display=False) as counter:
            loss(model(**mb)).backward()
        counted = counter.get_total_flops()
        symbols = symbols_of(lowered, mb)
        products = [
            effort.flops
            for efforts in roof.efforts.values()
            for effort in efforts
            if _PRODUCTS.match(effort.name)
        ]
        assert sum(int(work.xreplace(symbols)) for work in products) == counted
        total = sum(float(work.xreplace(symbols)) for work in roof.flops.values())
        assert counted < total < 1.05 * counted


def test_flops_of_a_model_with_convolutions_and_fused_attention() -> None:
    """Attention on CPUs is a kernel of which torch counts nothing."""
    torch.manual_seed(0)
    model, batch = models.internvl(), models.image_text(count=1)
    with FlopCounterMode(display=False) as counter:
        model(**batch[0]).loss.backward()
    pipe = fxpipe.compile(model, batch[0], ranks=2, backend="local")
    lowered = pipe._variants.first
    symbols = symbols_of(lowered, batch[0])
    efforts = [x for found in roofline(lowered).efforts.values() for x in found]
    products = [x.flops for x in efforts if _PRODUCTS.match(x.name)]
    assert sum(int(work.xreplace(symbols)) for work in products) == counter.get_total_flops()
    forward = [x.flops for x in efforts if re.fullmatch(r"_scaled_dot.*for_cpu(_\d+)?", x.name)]
    backward = [x.flops for x in efforts if re.match("_scaled_dot.*backward", x.name)]
    assert 2 * sympy.Add(*backward).xreplace(symbols) == 5 * sympy.Add(*forward).xreplace(symbols)
    assert sympy.Add(*forward).xreplace(symbols) > 0


def test_kept_bytes_are_those_that_the_runtime_counts() -> None:
    """Of one forward, and at the peak of a step, on every rank."""
    pipe, _, _, costs = stepped()
    table = pipe.table
    timeline = replace(pipe.timeline, costs=replace(costs, resident={}))
    assert timeline.peaks
    for peak in timeline.peaks:
        owned = [
            at(costs.kept[op.stage, Kind.F], op.mb)
            for op, rank in table.place.items()
            if (op.stage, op.kind, rank) == (peak.stage, Kind.F, peak.rank)
        ]
        assert max(owned) == peak.forward_bytes
        region = pipe.cut.stage[peak.stage].region
        assert timeline.peak_bytes(peak.rank, [region]) == peak.bytes


def test_what_crosses_and_what_is_resident() -> None:
    pipe, _, _, costs = stepped()
    batch = models.three_regions(uneven=True)
    features = [4 * 16 * math.prod(mb["pixel_values"].shape[:2]) for mb in batch]
    assert costs.bytes["vision", Kind.F] == tuple(features)
    assert costs.bytes["llm0", Kind.B] == tuple(features)
    # The last stage reads the mean of the features, which is made where they are, or there.
    assert at(costs.received["llm1"], 0) >= at(costs.bytes["llm0", Kind.F], 0)
    assert (costs.latency, costs.bandwidth) == (1e-6, 1e10)
    sizes = {name: p.numel() * 4 for name, p in pipe.model.named_parameters()}
    state = pipe.graphs["vision"].state
    # Weight, gradient, and two moments of each.
    assert costs.resident["vision"] == 4 * sum(sizes[name] for name in state)
    assert simulate(pipe.table, costs).peak_bytes(0) > simulate(
        pipe.table, replace(costs, resident={})
    ).peak_bytes(0)


def test_recomputation_is_in_the_graphs() -> None:
    """The backward of the region does its forward again, and nothing of it is kept."""
    pipe, _, plain, before = stepped()
    lowered = pipe.reschedule("nested/1f1b", recompute=("vision",))._variants.first
    again, after = roofline(lowered), costs_of(_steps(lowered), DEVICE)
    assert lowered.cut.region["vision"].recompute
    assert all(size == 0 for size in (after.kept["vision", Kind.F], again.kept["vision", Kind.F]))
    assert after.kept["llm0", Kind.F] == before.kept["llm0", Kind.F]
    more = sympy.expand(again.flops["vision", Kind.W] - plain.flops["vision", Kind.W])
    symbols = symbols_of(lowered, models.three_regions()[0])
    share = more.xreplace(symbols) / plain.flops["vision", Kind.F].xreplace(symbols)
    assert 0.8 < share <= 1


def test_costs_in_closed_form() -> None:
    """Of the vision encoder, and how many patches it may have for a number of flops."""
    _, lowered, roof, costs = stepped()
    pixels = next(leaf for leaf in lowered.captured.leaves if leaf.name == "pixel_values")
    samples, patches = pixels.shape[:2]
    work = sympy.expand(roof.flops["vision", Kind.F])
    assert work.free_symbols == {samples, patches}
    assert sympy.degree(work, patches) == 2
    # 2 blocks of width 16, 8 * 16^2 weights and 4 * 16 flops per score; 12 * 16 of the bridge.
    products = sympy.expand(2 * samples * patches * (2 * 2048 + 192 + 2 * 2 * 16 * patches))
    assert 1 < (work / products).xreplace({samples: 2, patches: 1000}) < 1.1
    most = threshold(sympy.Le(work / peak_flops, 1e-3), patches)
    assert most.free_symbols == {samples, peak_flops}
    number = int(most.subs({samples: 2, peak_flops: 1e12}))
    assert work.subs({samples: 2, patches: number}) <= 1e9
    assert work.subs({samples: 2, patches: number + 1}) > 1e9
    seconds = roof.seconds("vision", Kind.F, DEVICE)
    for mb, batch in enumerate(models.three_regions(uneven=True)):
        found = float(seconds.xreplace(symbols_of(lowered, batch)))
        assert found == pytest.approx(at(costs.seconds["vision", Kind.F], mb))


def test_equal_microbatches_have_one_number() -> None:
    _, lowered, _, costs = stepped()
    same = [(lowered, symbols_of(lowered, mb)) for mb in models.three_regions()]
    found = costs_of(same, DEVICE)
    assert all(isinstance(seconds, float) for seconds in found.seconds.values())
    assert found.seconds["llm1", Kind.B] == at(costs.seconds["llm1", Kind.B], 0)
    assert Costs.from_json(found.to_json()) == found
