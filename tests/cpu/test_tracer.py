"""What one microbatch that fails leaves behind for those that come after it."""

import pytest
from torch import Tensor, arange, nn, randn

from fxpipe.capture import Captured
from fxpipe.errors import CaptureError, UnknownSizeError
from fxpipe.tracer import Tracer


class Chosen(nn.Module):
    """As many rows as integers say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.layer(x[ids > 1]).square().sum()


def test_what_was_held_for_a_failure_is_let_go() -> None:
    held = []

    def failing(captured: Captured) -> Captured:
        held.append(list(captured.values))
        raise CaptureError("no") if captured.values else UnknownSizeError("a size")

    microbatch = {"x": randn(4, 3), "ids": arange(4)}
    tracer = Tracer(Chosen(), None)
    with pytest.raises(CaptureError, match="no"):
        tracer.lowered(microbatch, failing)
    assert held == [[], ["ids"]]
    assert not tracer.lowered(microbatch, lambda captured: captured).values
