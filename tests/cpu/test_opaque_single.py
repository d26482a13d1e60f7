"""Microbatches of one sample, which fit no graph of many: opaque stages, and graphs for values."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxpipe
from fxpipe import tracer
from fxpipe.errors import CaptureError
from tests.eager import step_alike

Batch = list[dict[str, Tensor]]


class Counted(nn.Module):
    """Rows are cut by lengths at which Python looks, then blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        lengths = [count for count in counts.tolist() if count > 1]
        parts = torch.split(self.stem(x)[:, : sum(lengths)], lengths, 1)
        h = torch.stack([part.mean(1) for part in parts], 1)
        for block in self.blocks:
            h = h + block(h).tanh()
        return F.mse_loss(h.mean(1).view(x.shape[0], -1), x[:, 0])


def batch(*shapes: tuple[int, list[int]]) -> Batch:
    """Microbatches of so many rows, each cut in the same way."""
    return [
        {"x": torch.randn(rows, sum(counts), 4), "counts": torch.tensor(counts)}
        for rows, counts in shapes
    ]


def compiled(microbatches: Batch) -> fxpipe.Pipe:
    """A pipe that has done one step right."""
    torch.manual_seed(0)
    how = {"schedule": "nested/1f1b", "ranks": 2, "backend": "local"}
    pipe = fxpipe.compile(Counted(), microbatches[0], **how)
    step_alike(pipe, microbatches, copy.deepcopy(pipe.model), 1e-5)
    return pipe


def test_one_sample_has_an_opaque_stage_of_its_own() -> None:
    """It is not tried out with microbatches that need another graph."""
    pipe = compiled(batch((2, [2, 3]), (3, [2, 4]), (1, [3, 2])))
    assert pipe.captures == 4  # two of values; one for one row, one for the others
    assert all(variant.prefix for variant in pipe.variants)


def test_values_that_no_opaque_stage_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opaque stages, and graphs for the values of what can have none, in one step."""
    mixed = batch((2, [2, 3]), (2, [2, 4]), (3, [4, 5]), (1, [3, 4]), (2, [5, 2, 1]))
    cut = tracer.capture_opaque

    def for_many(model: nn.Module, microbatch: Any, *more: Any, **how: Any) -> Any:
        if len(microbatch["x"]) == 1:
            raise CaptureError("not for one row")
        return cut(model, microbatch, *more, **how)

    monkeypatch.setattr(tracer, "capture_opaque", for_many)
    pipe = compiled(mixed)
    kinds = [bool(variant.prefix) for variant in pipe.variants]
    assert any(kinds) and not all(kinds)
    before = pipe.captures
    again = pipe.reschedule("stage/gpipe")
    step_alike(again, mixed, copy.deepcopy(pipe.model), 1e-5)
    assert again.captures == before
