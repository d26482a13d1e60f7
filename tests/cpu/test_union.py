"""What variants are together: their cut, where regions that come later go, and what is let go."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import variants
from fxpipe.errors import BatchError
from tests import mixtures
from tests.models import Small, worst


class Steps(nn.Module):
    """Unrolls over a number, and runs its blocks the other way round if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Small(3) for _ in range(2))
        self.extra = nn.Linear(3, 3)

    def forward(self, x: Tensor, times: int = 0, extra: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        for _ in range(times):
            x = x.tanh()
        if extra is not None:
            x = x * self.extra(extra)
        return x.square().mean()


def _pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Steps().double()
    reference = Steps().double()
    reference.load_state_dict(model.state_dict())
    return model, reference


def _step(pipe: fxpipe.Pipe, reference: nn.Module, batch: list[dict[str, Any]]) -> None:
    pipe.step(batch)
    for mb in batch:
        (reference(**mb) / len(batch)).backward()
    assert worst(pipe.model, reference) < 1e-12


def test_variants_that_are_not_used_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "LIMIT", 2)
    model, reference = _pair()
    pipe = fxpipe.compile(model, ranks=2, backend="local", schedule="nested/gpipe")
    x = torch.randn(2, 3).double()
    _step(pipe, reference, [{"x": x, "times": times} for times in (0, 1, 2)])
    assert len(pipe.variants) == 3, "a step has all that it needs"
    _step(pipe, reference, [{"x": x, "times": times} for times in (1, 3)])
    assert len(pipe.variants) == 3
    _step(pipe, reference, [{"x": x, "times": 0}])
    assert len(pipe.variants) == 2
    assert "2 more were let go" in pipe.explain()
    _step(pipe, reference, [{"x": x, "times": 2}, {"x": x, "extra": x}])
    assert pipe.captures == 5, "what was let go is still remembered"


def test_a_rank_says_when_it_gets_a_parameter_later() -> None:
    model, _ = _pair()
    x = torch.randn(2, 3).double()
    pipe = fxpipe.compile(model, {"x": x}, ranks=2, backend="local")
    given = pipe._variants
    list(pipe.parameters())
    given.holding.check(given.union)
    given.fit({"x": x, "extra": x}, "one more")
    with pytest.raises(BatchError, match=r"rank 1 now trains extra\..*example=\[\.\.\.\]"):
        given.holding.check(given.union)
    list(pipe.parameters())
    given.holding.check(given.union)


def test_what_was_given_out_still_gets_its_gradient() -> None:
    """Also where its rank does not read it any more: its optimizer would leave it behind."""
    model, reference = mixtures.made(), mixtures.made()
    both, one = (
        mixtures.microbatch(parts) for parts in (("images", "target"), ("images", "labels"))
    )
    pipe = fxpipe.compile(model, both, ranks=2, backend="local", schedule="stage/1f1b")
    name, first, last = "bridge.weight", pipe.cut.stages[0].name, pipe.cut.stages[-1].name
    assert pipe._variants.union.owners[name] == (first, last)
    given = {name for name, _ in pipe.named_parameters()}
    assert name in given
    for module in (model, reference):
        module.eval()  # all is traced again
    _step(pipe, reference, [one])
    assert len(pipe.variants) == 1
    owners = pipe._variants.union.owners[name]
    assert {pipe.cut.stage[stage].rank for stage in owners} == {0, 1}
    list(pipe.parameters())
    assert pipe._variants.union.owners[name] == (first,)
    _step(pipe, reference, [one])
