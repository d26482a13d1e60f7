"""A graph behind a boundary, tried out: with the model's own loss, for microbatches seen before.

A number of the first microbatch that has come past the boundary would show in another one's loss.
"""

from collections.abc import Mapping, Sequence

import sympy
import torch
from torch import Tensor, fx

from fxpipe.capture import Captured
from fxpipe.chance import Draw, Stream, Walk
from fxpipe.dry import with_own
from fxpipe.errors import BatchError, CaptureError
from fxpipe.inputs import Microbatch, flatten, rebuild
from fxpipe.libraries import as_exported
from fxpipe.prefix_chance import generators
from fxpipe.python_chance import PYTHON
from fxpipe.solving import misfit, solve
from fxpipe.state import named_state
from fxpipe.torch_internals import fake_mode, guards, hooks_at_rest
from fxpipe.undone import untouched
from fxpipe.wanted import Reader


def try_out(whole: Captured, suffix: Captured, reader: Reader, microbatch: Microbatch) -> None:
    """Compare the losses. suffix: the graph behind the boundary; whole: the prefix with it.

    Raises CaptureError where they differ. Nothing can be compared where the microbatch needs a
    graph of its own, or where it is not known which random numbers eager draws.
    """
    prefix = whole.prefix
    assert prefix is not None
    tensors, fixed, structure = flatten(microbatch)
    leaves = [tensor for _, tensor in tensors]
    if (structure, fixed) != prefix.rebuilt or not suffix.terms:
        return
    draws = with_own(prefix, whole.draws, leaves)
    if suffix.draws and (suffix.data.symbols or any(d.apart for d in draws if d.device != PYTHON)):
        return
    args, kwargs = rebuild(leaves, structure, fixed)
    with torch.no_grad(), hooks_at_rest(), as_exported():
        with untouched(prefix.model):
            wanted = reader(prefix.model(*args, **kwargs))[0]
        with untouched(prefix.model):
            before = generators(prefix.model)
            try:
                inputs = [*leaves, *prefix.run(leaves)[0]]
            except BatchError:
                return
            if not _fits(suffix, inputs):
                return
            found = _loss(suffix, whole, [*inputs, *_states(suffix, draws, inputs, before)])
    if not torch.allclose(found, wanted, rtol=1e-3, atol=1e-4):
        raise CaptureError(
            f"the loss is {float(found):.6g} instead of {float(wanted):.6g} for another "
            "microbatch: a number of the first one is used after the boundary"
        )


def _fits(suffix: Captured, inputs: Sequence[Tensor]) -> bool:
    """Whether a graph is for sizes like these: one traced with a single sample is for no other."""
    symbols, sizes = solve(suffix.leaves, inputs)
    holders = [n for n in suffix.graph.graph.nodes if n.op == "placeholder"]
    assumed = guards(fake_mode([node.meta["val"] for node in holders]))
    return misfit(suffix.ranges, symbols, sizes, assumed) is None


def _states(
    suffix: Captured, draws: Sequence[Draw], inputs: Sequence[Tensor], before: Mapping[str, Tensor]
) -> list[Tensor]:
    """The states of the generators that the suffix takes, if the model begins with those before."""
    if not suffix.draws:
        return []
    symbols, _ = solve(suffix.leaves, inputs)

    def size(expr: sympy.Expr) -> int:
        return int(expr.xreplace(symbols))

    names = [draw.placeholder for draw in suffix.draws]
    torches = [draw for draw in draws if draw.device != PYTHON]
    stream = Stream([Walk(torches, size, set(names))], inputs[0].device, _now=dict(before))
    return [stream.state(0, name) for name in names]


def _loss(suffix: Captured, whole: Captured, inputs: Sequence[Tensor]) -> Tensor:
    assert whole.prefix is not None
    state = {**dict(named_state(whole.prefix.model)), **suffix.constants}
    values = iter(inputs)
    holders = [node for node in suffix.graph.graph.nodes if node.op == "placeholder"]
    given = [
        state[suffix.state[n.name]] if n.name in suffix.state else next(values) for n in holders
    ]
    ends = fx.Interpreter(suffix.graph).run(*given)
    total: Tensor = sum(ends[: len(suffix.terms)], start=torch.zeros(()))
    return total
