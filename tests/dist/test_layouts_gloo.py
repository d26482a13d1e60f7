"""Layouts with several stages per rank, over gloo: the bits of a local run, and eager's gradients.

Each process traces the model once; the first one then runs it in one process as well.
"""

from pathlib import Path
from typing import Any

import torch

import fxpipe
from tests import models
from tests.dist.test_gloo import processes
from tests.layouts import AnyOrder, laid_out

MICROBATCHES = 6
ORDER = (3, 0, 5, 1, 4, 2)
LAYOUTS = {
    "loop": AnyOrder({}, (0, 1, 0, 1)),
    "v": AnyOrder({"vision": 1}, (0, 1, 1, 0), seed=1),
    "all cut": AnyOrder({"vision": (1, 0), "generator": (1, 0)}, (0, 1, 1, 0), seed=2),
    "recompute": AnyOrder({}, (1, 0, 0, 1), ("vision", "llm"), seed=3),
    "two on one": AnyOrder({"vision": (1, 1), "generator": 0}, (0, 0, 1, 1), seed=4),
}
Found = dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]


def _model() -> Any:
    torch.manual_seed(0)
    return models.AnyRegions([True], [True]).double()


def _run(pipe: fxpipe.Pipe, backend: str) -> Found:
    found: Found = {}
    model: Any = pipe.model
    for name, how in LAYOUTS.items():
        laid = laid_out(pipe, how, backend)
        model.zero_grad()
        result = laid.step(model.batch(MICROBATCHES), order=ORDER)
        grads = {n: p.grad.clone() for n, p in laid.named_parameters() if p.grad is not None}
        found[name] = result.losses, grads
    return found


def _process(rank: int, ranks: int) -> list[Found]:
    model = _model()
    pipe = fxpipe.compile(model, model.batch(1)[0], ranks=4, backend="local")
    found = [_run(pipe, "gloo")]
    return found if rank else [*found, _run(pipe, "local")]


def test_gloo_has_the_bits_of_local(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    found = processes(_process, 2, tmp_path)
    local = found[0].pop()
    reference = _model()
    for mb in reference.batch(MICROBATCHES):
        (reference(**mb) / MICROBATCHES).backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    for name, (losses, grads) in local.items():
        assert grads.keys() == expected.keys()
        for parameter, grad in grads.items():
            torch.testing.assert_close(grad, expected[parameter], rtol=1e-11, atol=1e-14)
        seen = set()
        for (results,) in found:
            assert torch.equal(results[name][0], losses)
            for parameter, grad in results[name][1].items():
                assert torch.equal(grad, grads[parameter]), (parameter, name)
                seen.add(parameter)
        assert seen == grads.keys()
