"""Public architectures, with microbatches that differ, train as in eager."""

from dataclasses import replace

import pytest
import torch

from benchmarks.training import Setting, train
from benchmarks.zoo import ALL

SETTINGS = (Setting("nested/1f1b", 2),)


@pytest.mark.parametrize("name", ["whisper"])
def test_trains_as_in_eager(name: str) -> None:
    torch.set_num_threads(1)
    architecture = ALL[name]
    few = replace(architecture, batch=lambda g: architecture.batch(g)[:2])
    found = train(name, few, "float64", SETTINGS)
    assert not found.equal
    assert not found.apart
    for run in found.runs:
        assert not run.error
        assert run.loss < 1e-12, run
        assert run.gradient < 1e-9, run
