"""What torch keeps to itself of distributions and sizes: no public API, as torch_internals.

Tried on torch 2.13.0.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


def hints(sizes: Sequence[int | torch.SymInt]) -> list[int] | None:
    """The sizes that the example had; None where one depends on data."""
    known = all(s.node.has_hint() for s in sizes if isinstance(s, torch.SymInt))
    plain = (s.node.hint if isinstance(s, torch.SymInt) else s for s in sizes)
    return [int(size) for size in plain] if known else None


@contextmanager
def trusting_distributions() -> Iterator[None]:
    """torch.distributions check their arguments by reading them, which no trace can."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)
