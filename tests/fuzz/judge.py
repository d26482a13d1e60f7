"""Whether fxpipe does with a random model what eager does, under each of its schedules."""

import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fxpipe
from fxpipe.errors import FxpipeError, RankError
from tests.fuzz.model import Model, batch, build
from tests.fuzz.spec import Run, Spec

RIGHT, REFUSED, WRONG, CRASH, HANG, INVALID = (
    "right", "refused", "wrong", "crash", "hang", "invalid"
)  # fmt: skip
SEED = 7  # before eager's run, and before each step
ROUNDED = {"save_half": 3e-2, "save_single": 1e-5}


@dataclass(frozen=True)
class Verdict:
    """kind: one of the above; about: what was refused or wrong, without names and numbers."""

    kind: str
    about: str = ""
    text: str = ""


class _MismatchError(Exception):
    pass


class _LateError(BaseException):
    pass


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """At most so many seconds of this process, and ten times as many of the clock."""

    def late(number: int, frame: FrameType | None) -> None:
        raise _LateError

    timers = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}
    before = {number: signal.signal(number, late) for number in timers.values()}
    for timer, factor in zip(timers, (1, 10), strict=True):
        signal.setitimer(timer, factor * seconds)
    try:
        yield
    finally:
        for timer, number in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def judge(spec: Spec, seconds: int = 60) -> Verdict:
    """Compile and run the model of a spec; INVALID if eager itself cannot run it."""
    try:
        expected = _eager(spec)
    except Exception as error:
        return Verdict(INVALID, type(error).__name__, str(error))
    try:
        with _limit(seconds):
            _compare(spec, expected)
    except _MismatchError as wrong:
        if is_chaotic(spec, expected.losses):
            return Verdict(INVALID, "chaotic", str(wrong))
        return Verdict(WRONG, _kind(str(wrong)), str(wrong))
    except RankError as error:
        return Verdict(CRASH, _kind(f"RankError: {error}"), str(error))
    except FxpipeError as error:
        return Verdict(REFUSED, _kind(f"{type(error).__name__}: {error}"), str(error))
    except _LateError:
        return Verdict(HANG)
    except Exception as error:
        return Verdict(CRASH, _kind(f"{type(error).__name__}: {error}"), str(error))
    return Verdict(RIGHT)


def _kind(text: str) -> str:
    """The beginning of a message, without numbers and quoted parts."""
    plain = " ".join(re.sub(r"'[^']*'|\[[^]]*\]|\{[^}]*\}", "_", text).split())
    return re.sub(r"\d+", "#", plain)[:110]


def loss_of(output: Any) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, dict) else getattr(output, "loss", output)
    return loss


def _weights(run: Run, count: int) -> list[float]:
    return [(i + 1) / 4 for i in range(count)] if run.weighted else [1 / count] * count


Grads = dict[str, Tensor | None]


class _Eager(NamedTuple):
    """Losses, for each microbatch the gradients of its own loss, and what the run leaves behind."""

    losses: list[Tensor]
    grads: list[Grads]
    model: Model
    random: Tensor


def _eager(spec: Spec) -> _Eager:
    model, losses, grads = build(spec), [], []
    torch.manual_seed(SEED)
    for mb in batch(spec):
        model.zero_grad()
        loss = loss_of(model(**mb))
        if loss.dim() or not loss.isfinite():
            raise ValueError("the loss is no finite number")
        loss.backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        if not all(g.isfinite().all() for g in found.values() if g is not None):
            raise ValueError("a gradient is not finite")
        losses.append(loss.detach())
        grads.append(found)
    return _Eager(losses, grads, model, torch.get_rng_state())


def is_chaotic(spec: Spec, losses: Sequence[Tensor]) -> bool:
    """Whether eager's own losses follow a change of the parameters in their last bit by a
    millionth: such a model says nothing about who computes it."""
    model, noise = build(spec), torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            last = torch.randn(parameter.shape, generator=noise, dtype=torch.float64) * 1e-15
            parameter.mul_(1 + last.to(parameter.dtype))
    torch.manual_seed(SEED)
    found = torch.stack([loss_of(model(**mb)).detach() for mb in batch(spec)]).double()
    return not torch.allclose(found, torch.stack(list(losses)).double(), rtol=1e-6, atol=1e-12)


def _compare(spec: Spec, eager: _Eager) -> None:
    model, mbs = build(spec), batch(spec)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss_fn = (lambda output: output["loss"]) if spec.output == "dict" else None
    first, pipe = spec.runs[0], None
    regions = {"llm": [model.backbone]} | {n: [n] for n in model.encoders + model.generators}
    for run in spec.runs:
        if pipe is None:
            pipe = fxpipe.compile(
                model, mbs[0], schedule=first.schedule, ranks=first.ranks, backend="local",
                loss_fn=loss_fn, regions=regions if spec.regions else None,
            )  # fmt: skip
        names = [r.name for i, r in enumerate(pipe.cut.regions) if run.recompute >> i & 1]
        if run is not first or names:
            pipe = pipe.reschedule(run.schedule, run.ranks, recompute=tuple(names))
        model.zero_grad()
        model.load_state_dict(before)
        weights = _weights(run, len(mbs))
        order = list(reversed(range(len(mbs)))) if run.reverse else None
        torch.manual_seed(SEED)
        result = pipe.step(mbs, weights if run.weighted else None, order)
        if not torch.equal(eager.random, torch.get_rng_state()):
            raise _MismatchError(f"the random generator is not where eager leaves it in {run}")
        _check(spec, run, (result.losses, eager.losses), model, _sum(eager.grads, weights))
        for name, value in eager.model.state_dict().items():
            found = model.state_dict()[name]
            if not torch.allclose(found, value, rtol=1e-9, atol=1e-9, equal_nan=True):
                raise _MismatchError(f"state {name} is another in {run}")


def _sum(grads: Sequence[Grads], weights: Sequence[float]) -> Grads:
    total: Grads = {}
    for found, weight in zip(grads, weights, strict=True):
        for name, grad in found.items():
            before = total.get(name)
            now = None if grad is None else grad * weight
            total[name] = now if before is None else before if now is None else before + now
    return total


def _check(
    spec: Spec, run: Run, losses: tuple[Tensor, Sequence[Tensor]], model: Model, expected: Grads
) -> None:
    used = {name for block in _blocks(spec) for name in block}
    tolerance = max([1e-9, *(ROUNDED[name] for name in used & set(ROUNDED))])
    found, wanted = losses[0].double(), torch.stack(list(losses[1])).double()
    if not torch.allclose(found, wanted, rtol=tolerance, atol=tolerance):
        raise _MismatchError(f"losses {found.tolist()}, eager {wanted.tolist()} in {run}")
    largest = max([1e-6, *(float(g.abs().max()) for g in expected.values() if g is not None)])
    for name, parameter in model.named_parameters():
        grad, other = parameter.grad, expected[name]
        if (grad is None) != (other is None):
            raise _MismatchError(f"gradient of {name} is {grad}, eager {other} in {run}")
        if grad is not None and other is not None:
            off = float((grad - other).abs().max())
            if not off <= tolerance * max(float(other.abs().max()), 1e-3 * largest):
                raise _MismatchError(f"gradient of {name} is off by {off:.1e} in {run}")


def _blocks(spec: Spec) -> Iterator[tuple[str, ...]]:
    yield from (*spec.blocks, spec.before, spec.after)
    for region in (*spec.encoders, *spec.generators):
        yield from region.blocks
