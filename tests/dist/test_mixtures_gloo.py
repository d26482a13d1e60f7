"""Microbatches of different paths over gloo: the bits of a local run, and nothing sent for nothing."""

import pytest
from pathlib import Path

import torch

import fxpipe
from tests import mixtures, models
from tests.dist.test_gloo import processes
from tests.mixtures import microbatch

pytestmark = pytest.mark.slow

PATHS = [("images", "labels", "target"), ("labels",)]
BATCH = [microbatch(PATHS[i], seed) for seed, i in enumerate((1, 0, 1))]
Found = tuple[torch.Tensor, dict[str, torch.Tensor | None]]


def _run(pipe: fxpipe.Pipe) -> Found:
    pipe.model.zero_grad()
    held = dict(pipe.named_parameters())
    result = pipe.step(BATCH)
    assert pipe.captures == len(PATHS)
    return result.losses, {name: parameter.grad for name, parameter in held.items()}


def _process(rank: int, ranks: int) -> list[Found]:
    examples = [microbatch(parts) for parts in PATHS]
    pipe = fxpipe.compile(mixtures.made(), examples, schedule="nested/1f1b", ranks=ranks)
    found = [_run(pipe)]
    return found if rank else [*found, _run(pipe.reschedule("nested/1f1b", backend="local"))]


def test_gloo_has_the_bits_of_local(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    found = processes(_process, 2, tmp_path)
    losses, grads = found[0].pop()
    model, reference = mixtures.made(), mixtures.made()
    for mb in BATCH:
        (reference(**mb) / len(BATCH)).backward()
    for name, parameter in model.named_parameters():
        parameter.grad = grads[name]
    assert models.worst(model, reference) < 1e-12
    assert grads["audio_tower.0.up.weight"] is None
    for ((own, mine),) in found:
        assert torch.equal(own, losses)
        for name, grad in mine.items():
            other = grads[name]
            assert (grad is None) == (other is None), name
            assert grad is None or other is None or torch.equal(grad, other), name
