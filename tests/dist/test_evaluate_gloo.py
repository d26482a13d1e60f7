"""`pipe.evaluate` over processes: each rank has only its own weights, and outputs are gathered."""

import pytest
from pathlib import Path
from typing import Any

import torch

import fxpipe
from tests import models
from tests.dist.test_gloo import processes

pytestmark = pytest.mark.slow


def _model() -> models.AnyRegions:
    torch.manual_seed(0)
    return models.AnyRegions((True,), (True,)).double()


def _evaluate(rank: int, ranks: int) -> Any:
    model = _model()
    batch = model.batch(3)
    pipe = fxpipe.compile(model, batch[0], backend="gloo", schedule="nested/1f1b")
    mine = dict(pipe.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(2.0 if name in mine else float("nan"))
    everywhere = pipe.evaluate(batch, outputs=lambda loss: {"loss": loss, "empty": loss[None][:0]})
    on_one = pipe.evaluate(batch, outputs=True, to=1)
    return everywhere.losses, everywhere.outputs, on_one.outputs


def test_outputs_come_to_every_rank_or_to_one(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    found = processes(_evaluate, 2, tmp_path)
    model = _model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
        eager = torch.stack([model(**mb) for mb in model.batch(3)])
    for losses, outputs, _ in found:
        torch.testing.assert_close(losses, eager, rtol=1e-12, atol=0)
        torch.testing.assert_close(torch.stack([o["loss"] for o in outputs]), eager)
        assert all(o["empty"].shape == (0,) for o in outputs)
    assert found[0][2] is None
    torch.testing.assert_close(torch.stack(list(found[1][2])), eager)
