"""Several stages of a region on one rank, and encoders that are cut: the gradients of eager."""

from collections.abc import Iterator, Mapping

import pytest
import torch

import fxpipe
from fxpipe.costs import Costs
from fxpipe.cut import Kind, Layout
from fxpipe.errors import RegionError, ScheduleError, StageError
from fxpipe.table import Op, Table
from tests import models
from tests.layouts import AnyOrder, Home, laid_out

THREE = models.CASES["three"]
BATCH = THREE.batch(True, torch.float64)
WHOLE: dict[str, Home] = {}


@pytest.fixture(scope="module")
def pipe() -> fxpipe.Pipe:
    torch.set_num_threads(1)
    model = THREE.build(torch.float64)
    # Four backbone stages, as most layouts below have.
    return fxpipe.compile(
        model, BATCH[0], schedule="nested/1f1b", ranks=4, loss_fn=THREE.loss_fn, backend="local"
    )


@pytest.fixture(scope="module")
def reference() -> Iterator[torch.nn.Module]:
    model = THREE.build(torch.float64)
    models.eager(THREE, model, BATCH)
    yield model


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("home", "backbone"),
    [
        (WHOLE, (0, 1, 0, 1)),
        (WHOLE, (0, 1, 1, 0)),
        ({"vision": 0, "generator": 1}, (0, 1, 1, 0)),
        ({"vision": 2, "generator": 2}, (0, 1, 2, 0)),
        ({"vision": (1, 0), "generator": (0, 1)}, (0, 1, 1, 0)),
        ({"vision": (0, 1)}, (0, 1, 2, 3)),
    ],
    ids=["loop", "v", "v with homes", "uneven", "all regions cut", "encoder cut"],
)
def test_equals_eager(
    pipe: fxpipe.Pipe,
    reference: torch.nn.Module,
    home: Mapping[str, Home],
    backbone: tuple[int, ...],
    seed: int,
) -> None:
    laid = laid_out(pipe, AnyOrder(home, backbone, seed=seed))
    pipe.model.zero_grad()
    laid.step(BATCH)
    assert models.worst(pipe.model, reference) < 1e-12
    assert Table.parse(str(laid.table)) == laid.table


def test_a_cut_encoder_is_balanced_and_has_its_own_stages(pipe: fxpipe.Pipe) -> None:
    cut = laid_out(pipe, AnyOrder({"vision": (1, 0), "generator": (0, 1)}, (0, 1, 1, 0))).cut
    assert [(s.name, s.rank) for s in cut.stages if s.region == "vision"] == [
        ("vision0", 1),
        ("vision1", 0),
    ]
    assert cut.region["vision"].layout is Layout.SHARDED
    costs = [stage.cost for stage in cut.stages if stage.region == "vision"]
    assert max(costs) < 1.2 * min(costs)
    pairs = {(seam.source, seam.target) for seam in cut.seams}
    assert {("vision0", "vision1"), ("vision1", "llm0"), ("generator0", "generator1")} <= pairs
    # The bridge is read by the first encoder stage and by the first generator stage.
    assert ("vision0", "generator0") in cut.shared


def test_options_reach_the_schedule(pipe: fxpipe.Pipe, reference: torch.nn.Module) -> None:
    owners = (1, 0, 0, 1, 1)
    found = pipe.reschedule("nested/interleaved", 2, chunks=2, owners=owners, live={"modality": 3})
    pipe.model.zero_grad()
    found.step(BATCH)
    assert models.worst(pipe.model, reference) < 1e-12
    assert [s.rank for s in found.cut.stages if s.region == "llm"] == [0, 1, 0, 1]
    assert tuple(found.table.place[Op("vision", Kind.F, mb)] for mb in range(5)) == owners
    assert max(max(live.units) for live in found.table.live if live.region != "llm") <= 3
    cut = pipe.reschedule("ends/interleaved", 2, sharded=("vision",)).cut
    assert [s.rank for s in cut.stages] == [0, 1, 0, 1, 0, 1, 1]
    costs = Costs.uniform(cut, {"llm0": 3.0})
    assert pipe.reschedule("nested/1f1b", 2, costs=costs).table.cut.ranks == 2


def test_more_stages_than_blocks_are_refused(pipe: fxpipe.Pipe) -> None:
    with pytest.raises(StageError, match=r"99 stages were asked of region vision, .* parts"):
        laid_out(pipe, AnyOrder({"vision": (0, 1, 1) * 33}, (0, 1)))
    with pytest.raises(StageError, match=r"198 stages were asked of region llm, .* parts"):
        pipe.reschedule("nested/interleaved", 2, chunks=99)


def test_recompute_of_no_region_is_refused(pipe: fxpipe.Pipe) -> None:
    with pytest.raises(RegionError, match=r"recompute names 'lm'; .* vision, llm, generator"):
        pipe.reschedule("nested/1f1b", recompute=("lm",))


def test_only_encoders_and_generators_are_sharded(pipe: fxpipe.Pipe) -> None:
    with pytest.raises(ScheduleError, match=r"sharded names 'llm'; .* are vision, generator"):
        pipe.reschedule("nested/1f1b", sharded=("llm",))
