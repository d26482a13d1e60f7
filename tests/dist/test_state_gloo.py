"""Buffers and random numbers over gloo: the bits of a local run, on every rank."""

import pytest
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxpipe
from tests.cpu.test_buffers import WIDTH, Flat, Stateful, batch
from tests.dist.test_gloo import processes

pytestmark = pytest.mark.slow


def _run(rank: int, ranks: int) -> list[Any]:
    torch.manual_seed(0)
    model = Stateful(Flat(WIDTH), nn.Dropout(0.2)).double()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    pipe = fxpipe.compile(model, batch()[0], schedule="nested/1f1b", backend="gloo")
    # Each rank has drawn other numbers before: they follow the first one.
    torch.manual_seed(5 + rank)
    found = [_step(pipe)]
    if rank == 0:
        model.load_state_dict(before, strict=False)
        torch.manual_seed(5)
        found.append(_step(pipe.reschedule("nested/1f1b", ranks, "local")))
    return found


def _step(pipe: fxpipe.Pipe) -> dict[str, torch.Tensor]:
    pipe.model.zero_grad()
    losses = pipe.step(batch()).losses
    held = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in pipe.model.named_buffers()}
    return {"losses": losses, "chance": torch.get_rng_state(), **buffers, **held}


def test_gloo_has_the_bits_of_local(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    (first, local), (second,) = processes(_run, 2, tmp_path)
    assert local.keys() == {*first, *second}
    for found in (first, second):
        for name, value in found.items():
            assert torch.equal(value, local[name]), name
