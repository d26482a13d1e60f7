"""The modules that a program calls, by their names in it."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from fxpipe.cut import Cut, Kind, Stage
from fxpipe.emulation import Emulation
from fxpipe.groupop import GradientsOp, GroupOp
from fxpipe.stageop import StageOp, Variants


class Parts(NamedTuple):
    """What modules run: the graphs of each variant, the model's tensors, and which stages hold a
    trained parameter."""

    variants: Variants
    state: Mapping[str, Tensor]
    owners: Mapping[str, tuple[str, ...]]


def modules(
    cut: Cut, held: Iterable[Stage], parts: Parts, engine: str | Emulation
) -> dict[str, nn.Module]:
    """Those of the stages that a rank holds, and of all groups."""
    root: dict[str, nn.Module] = {"gradients": GradientsOp()}
    ops = [(stage.name, kind) for stage in held for kind in stage.kinds]
    if isinstance(engine, Emulation):
        root |= {called(*op): engine.stage(*op, cut) for op in ops}
        return root | {called(x, Kind.R): engine.group(x, cut) for x in cut.groups}
    variants, state, owners = parts
    root |= {called(*op): StageOp(*op, cut, variants, state, engine) for op in ops}
    groups = (GroupOp(group, cut, variants, state, owners) for group in cut.groups)
    return root | {called(group, Kind.R): op for group, op in zip(cut.groups, groups, strict=True)}


def called(*parts: object) -> str:
    """A Python name: `llm0+llm3`, `R` -> `llm0_llm3_R`."""
    return re.sub(r"\W", "_", "_".join(map(str, parts)))
