"""Microbatches that take different paths through one model, in one step: eager's gradients."""

from collections.abc import Iterator

import pytest
import torch

import fxpipe
from tests import mixtures, models
from tests.mixtures import microbatch

pytestmark = pytest.mark.slow

EVERY = ("images", "audio", "labels", "target")
PATHS = [("labels",), EVERY, ("images", "target"), ("audio", "labels")]
MIXED = [microbatch(parts, seed) for seed, parts in enumerate(PATHS)]
SCHEDULES = {
    "nested/1f1b": 2,
    "nested/zb-h1": 2,
    "upfront/gpipe": 2,
    "transpose/1f1b": 2,
    "ends/zb-h1": 2,
    "stage/1f1b": 4,
    "nested/gpipe": 1,
}


@pytest.fixture(scope="module")
def pipe() -> fxpipe.Pipe:
    torch.set_num_threads(1)
    return fxpipe.compile(mixtures.made(), MIXED, schedule="nested/1f1b", ranks=2, backend="local")


@pytest.fixture(autouse=True)
def _fresh(pipe: fxpipe.Pipe) -> Iterator[None]:
    pipe.model.zero_grad()
    yield


def check(
    pipe: fxpipe.Pipe, batch: list[models.Microbatch], weights: list[float] | None = None
) -> None:
    """A step has eager's loss and gradients, and no gradient where eager has none."""
    result = pipe.step(batch, weights)
    reference = mixtures.made()
    losses = [reference(**mb) for mb in batch]
    factors = weights or [1 / len(batch)] * len(batch)
    for loss, weight in zip(losses, factors, strict=True):
        (weight * loss).backward()
    torch.testing.assert_close(result.losses, torch.stack(losses).detach(), rtol=1e-12, atol=0)
    assert models.worst(pipe.model, reference) < 1e-10


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_paths_in_one_step(pipe: fxpipe.Pipe, schedule: str) -> None:
    mixed = pipe.reschedule(schedule, SCHEDULES[schedule])
    check(mixed, MIXED)
    assert [region.name for region in mixed.cut.regions] == ["vision", "audio", "llm", "generator"]
    mixed.model.zero_grad()
    check(mixed, [microbatch(("labels",), seed) for seed in range(4)])
    assert mixed.model.get_submodule("image_tower.0.up").weight.grad is None
    mixed.model.zero_grad()
    check(mixed, [MIXED[0], MIXED[2], microbatch(PATHS[0], 1), MIXED[0]])


def test_regions_that_come_later_get_their_place(
    pipe: fxpipe.Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a staged placement the backbone gives up a rank when an encoder comes."""
    monkeypatch.setattr(pipe, "_example", None)
    later = pipe.reschedule("stage/1f1b", 2)
    for parts, stages in ((PATHS[0], 2), (PATHS[3], 1), (EVERY, 2)):
        later.model.zero_grad()
        check(later, [microbatch(PATHS[0]), microbatch(parts, 1)])
        assert len([stage for stage in later.cut.stages if stage.region == "llm"]) == stages


def test_recompute_of_regions_that_come_later(
    pipe: fxpipe.Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are known from the pipe before, whatever the new one meets first."""
    monkeypatch.setattr(pipe, "_example", microbatch(PATHS[0]))
    later = pipe.reschedule("nested/1f1b", recompute=["vision", "generator"])
    check(later, MIXED)
    again = {region.name for region in later.cut.regions if region.recompute}
    assert again == {"vision", "generator"}


def test_a_region_that_comes_later_may_be_sharded(
    pipe: fxpipe.Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipe, "_example", microbatch(PATHS[0]))
    later = pipe.reschedule("nested/1f1b", sharded=["vision"])
    check(later, MIXED)
    assert [stage.rank for stage in later.cut.stages if stage.region == "vision"] == [0, 1]


def test_weight_zero_for_what_has_no_counted_token(pipe: fxpipe.Pipe) -> None:
    empty = microbatch(("labels",))
    empty["labels"] = torch.full_like(empty["labels"], -100)
    batch = [empty, MIXED[1], MIXED[3]]
    result = pipe.step(batch, [0.0, 0.75, 0.25])
    reference = mixtures.made()
    for mb, weight in zip(batch, [0.0, 0.75, 0.25], strict=True):
        (weight * reference(**mb)).backward()
    assert models.worst(pipe.model, reference) < 1e-10
    assert result.losses.isnan().tolist() == [True, False, False]
    expected = 0.75 * reference(**MIXED[1]) + 0.25 * reference(**MIXED[3])
    torch.testing.assert_close(result.loss, expected.detach())
