"""Random models under random schedules: what eager gives, or a refusal that can be read.

`python -m tests.fuzz` runs many more of them.
"""

import pytest
import torch

from tests.fuzz.draw import drawn
from tests.fuzz.judge import INVALID, REFUSED, RIGHT, SEED, is_chaotic, judge, loss_of
from tests.fuzz.model import batch, build
from tests.fuzz.spec import Encoder, Generator, Run, Spec, smaller

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("number", range(24))
def test_random_models(number: int) -> None:
    spec = drawn(number, small=True)
    verdict = judge(spec)
    assert verdict.kind in (RIGHT, REFUSED, INVALID), (verdict.text, spec)
    assert verdict.kind != REFUSED or len(verdict.text) > 60


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.judge._sum", lambda grads, weights: dict(grads[0]))
    assert judge(Spec(microbatches=Spec().microbatches * 2)).about.startswith("gradient of")


def test_a_model_that_a_last_bit_changes_is_not_judged() -> None:
    twice = (("largest", "no_grad"),) * 4
    generators = (
        Generator(blocks=(("padded", "write_masked"),) * 2, condition="detached"),
        Generator(blocks=(("bilinear", "no_grad"),) * 2, condition="mean"),
    )
    wild = Spec(blocks=twice, generators=generators, losses=("squares",), combine="product")
    for spec, chaotic in ((wild, True), (Spec(), False)):
        torch.manual_seed(SEED)
        losses = [loss_of(build(spec)(**mb)).detach() for mb in batch(spec)]
        assert is_chaotic(spec, losses) == chaotic


def test_smaller_ends_at_the_default() -> None:
    spec: Spec = Spec(
        encoders=(Encoder(join="cat"),), generators=(Generator(),), runs=(Run(), Run())
    )
    steps = 0
    while found := next(iter(smaller(spec)), None):
        spec, steps = found, steps + 1
    assert spec == Spec(blocks=spec.blocks, microbatches=spec.microbatches)
    assert steps < 20
