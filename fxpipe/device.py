"""What a schedule is reckoned for: the speed of a rank and of its links."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fxpipe.costs import Costs


@dataclass(frozen=True)
class Device:
    """What a rank can do: flops per second, bytes per second of its memory; and a link between two
    ranks: alpha seconds, and beta seconds per byte. Numbers, or symbols of `fxpipe.formulas`."""

    peak_flops: Any
    bandwidth: Any
    alpha: Any = 0.0
    beta: Any = 0.0


NOMINAL = Device(3e14, 2e12, 1e-5, 2e-11)  # about an accelerator of 2022 on its fast links

Reckon = Callable[[Device], Costs]  # the costs of a model whose graphs are known
