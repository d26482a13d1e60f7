"""Buffers and random numbers over gloo: the bits of a local run, on every rank."""

from pathlib import Path
from typing import Any

import torch

import fxpipe
from tests.cpu import test_buffers, test_chance
from tests.dist.test_gloo import processes


def _run(rank: int, ranks: int) -> list[Any]:
    found = []
    for module, model in (
        (test_buffers, test_buffers.build("norm")),
        (test_chance, test_chance.build(test_chance.Drops(), test_chance.Noise())),
    ):
        # Each rank has drawn other numbers before: they follow the first one.
        torch.manual_seed(5 + rank)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        pipe = fxpipe.compile(model, module.batch()[0], schedule="nested/1f1b", backend="gloo")
        found.append(_step(pipe, module, model))
        if rank == 0:
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            torch.manual_seed(5)
            found.append(_step(pipe.reschedule("nested/1f1b", ranks, "local"), module, model))
    return found


def _step(pipe: fxpipe.Pipe, module: Any, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    losses = pipe.step(module.batch()).losses
    held = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {"losses": losses, "chance": torch.get_rng_state(), **buffers, **held}


def test_gloo_has_the_bits_of_local(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    first, second = processes(_run, 2, tmp_path)
    for gloo, local, other in ((*first[:2], second[0]), (*first[2:], second[1])):
        for found in (gloo, other):
            assert found.keys() <= local.keys()
            for name, value in found.items():
                if name != "chance" or local is first[3]:
                    assert torch.equal(value, local[name]), name
