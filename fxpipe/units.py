"""Runs of ops of several stages for one microbatch on one rank."""

from collections.abc import Iterator, Sequence

from fxpipe.cut import Cut, Kind, Role, Stage
from fxpipe.table import Op


def forward(stages: Sequence[Stage], mb: int) -> Iterator[Op]:
    """`vision.F0 llm0.F0`: the forwards of some stages, in their order."""
    return (Op(stage.name, Kind.F, mb) for stage in stages)


def backward(stages: Sequence[Stage], mb: int) -> Iterator[Op]:
    """`llm0.B0 llm0.W0 vision.W0`: the backwards that exist, in reverse order of the stages."""
    for stage in reversed(stages):
        yield from (Op(stage.name, kind, mb) for kind in (Kind.B, Kind.W) if kind in stage.kinds)


def replicated(cut: Cut, role: Role) -> tuple[Stage, ...]:
    """The stages of a role that run where the microbatch has its owner."""
    return tuple(stage for stage in cut.of(role) if stage.rank is None)
