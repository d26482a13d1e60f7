"""What ops and transfers take and keep, in seconds and bytes: the numbers of every forecast.

An amount is one number for all microbatches, or a number for each: (40.0, 0.0) for one microbatch
with 40 images and one without. A shorter list than there are microbatches starts again.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any

from fxpipe.cut import Cut, Kind, Role, Stage
from fxpipe.errors import ScheduleError
from fxpipe.table import Op

Amount = float | Sequence[float]  # of a `Costs` a float or a tuple
Amounts = Mapping[tuple[str, Kind], Amount]
_PER_OP = ("seconds", "bytes", "kept")
_PER_STAGE = ("resident", "received")


@dataclass(frozen=True)
class Costs:
    """Amounts by (stage, kind) or by stage. What is not listed takes no time and no memory.

    seconds: of each op; R bears the name of its group, as in ("llm0+llm3", Kind.R)
    latency, bandwidth: seconds of a transfer beside its bytes, and bytes per second of a link
    bytes: what one F or B sends to one rank
    kept: of F, from it to the first op of the backward; of B, from it to W
    resident: of a stage on each rank that holds it (weights, gradients, optimizer state)
    received: what one F of a stage takes from others; by default what its seams' sources send

    Raises ScheduleError on an amount that is negative or no number.
    """

    seconds: Amounts
    latency: float = 0.0
    bandwidth: float = math.inf
    bytes: Amounts = field(default_factory=dict)
    kept: Amounts = field(default_factory=dict)
    resident: Mapping[str, float] = field(default_factory=dict)
    received: Mapping[str, Amount] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*_PER_OP, *_PER_STAGE):
            checked = {key: _checked(name, key, x) for key, x in getattr(self, name).items()}
            object.__setattr__(self, name, checked)
        listed = [stage for stage, size in self.resident.items() if isinstance(size, tuple)]
        if listed or isinstance(self.latency, Sequence):
            what = f"resident of {listed[0]}" if listed else "latency"
            raise ScheduleError(f"{what} is one for each microbatch; expected one number")
        _checked("latency", "all transfers", self.latency)
        if not isinstance(self.bandwidth, Real) or not self.bandwidth > 0:
            raise ScheduleError(
                f"bandwidth is {self.bandwidth!r}; expected bytes per second above 0"
            )

    def compute(self, op: Op) -> float:
        """Seconds of a compute op."""
        return at(self.seconds.get(op[:2], 0.0), op.mb)

    def sends(self, value: Op) -> float:
        """Bytes of a value that one rank gets."""
        return at(self.bytes.get((value.stage, value.kind), 0.0), value.mb)

    def occupies(self, value: Op) -> float:
        """Seconds for which a transfer of a value holds the link between its two ranks."""
        return self.sends(value) / self.bandwidth

    def transfer(self, value: Op) -> float:
        """Seconds from the later of send and post until the value is received, on a free link."""
        return self.latency + self.occupies(value)

    def keeps(self, op: Op) -> float:
        """Bytes that an F or a B keeps for the next op of its stage and microbatch."""
        return at(self.kept.get((op.stage, op.kind), 0.0), op.mb)

    def recomputed(self, cut: Cut) -> "Costs":
        """The costs where each region of the cut that says `recompute` does so.

        Its stages keep what they received, and nothing else; the first op of their backward runs
        the forward again. Only for costs of a model that keeps everything: those that come from
        the graphs of a cut have it in them already.
        """
        seconds, kept = dict(self.seconds), dict(self.kept)
        for stage in cut.stages:
            first = first_backward(stage)
            if first is None or not cut.region[stage.region].recompute:
                continue
            forward = self.seconds.get((stage.name, Kind.F), 0.0)
            again = (self.seconds.get((stage.name, first), 0.0), forward)
            seconds[stage.name, first] = combine(sum, again)
            if (stage.name, Kind.F) in kept:
                kept[stage.name, Kind.F] = self._received(cut, stage.name)
        return replace(self, seconds=seconds, kept=kept)

    def _received(self, cut: Cut, stage: str) -> Amount:
        if stage in self.received:
            return self.received[stage]
        sources = [seam.source for seam in cut.seams_into[stage]]
        return combine(sum, [self.bytes.get((source, Kind.F), 0.0) for source in sources])

    def scaled(self, cut: Cut, factors: Mapping[str, Amount]) -> "Costs":
        """The costs with all amounts of these regions multiplied: seconds, bytes and what is kept.

        `costs.scaled(cut, {"vision": (1, 0, 40)})`: the images of each microbatch.
        """
        unknown = [region for region in factors if region not in cut.region]
        if unknown:
            known = ", ".join(cut.region)
            raise ScheduleError(f"no region {unknown[0]} to scale; the cut has {known}")
        of = {stage.name: factors.get(stage.region, 1.0) for stage in cut.stages}

        def by(amounts: Amounts) -> dict[tuple[str, Kind], Amount]:
            return {
                key: combine(math.prod, (amount, of[key[0]])) if key[0] in of else amount
                for key, amount in amounts.items()
            }

        received = {s: combine(math.prod, (x, of[s])) for s, x in self.received.items()}
        return replace(
            self,
            seconds=by(self.seconds),
            bytes=by(self.bytes),
            kept=by(self.kept),
            received=received,
        )

    def largest(self) -> "Costs":
        """One number for all microbatches: the most that any has."""
        most: dict[str, Any] = {
            name: {key: _most(amount) for key, amount in getattr(self, name).items()}
            for name in (*_PER_OP, "received")
        }
        return replace(self, **most)

    def to_json(self) -> str:
        """The text that `from_json` reads: `{"seconds": {"llm0.F": 1.0, ...}, ...}`."""
        found: dict[str, object] = {"latency": self.latency}
        if self.bandwidth != math.inf:
            found["bandwidth"] = self.bandwidth
        for name in _PER_OP:
            found[name] = {f"{s}.{kind}": x for (s, kind), x in getattr(self, name).items()}
        found |= {name: getattr(self, name) for name in _PER_STAGE}
        return json.dumps(found, indent=1)

    @staticmethod
    def from_json(text: str) -> "Costs":
        """The costs that `to_json` wrote, or a person. Raises ScheduleError."""
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ScheduleError(f"the costs are no JSON: {error}") from error
        known = [f.name for f in fields(Costs)]
        if not isinstance(found, dict) or "seconds" not in found or set(found) - set(known):
            raise ScheduleError(
                f"the costs are no object with `seconds` and, if wanted, {', '.join(known[1:])}"
            )
        for name in (*_PER_OP, *_PER_STAGE):
            if not isinstance(found.get(name, {}), dict):
                raise ScheduleError(f"{name} of the costs is {found[name]!r}; expected an object")
        for name in _PER_OP:
            found[name] = {_key(name, key): x for key, x in found.get(name, {}).items()}
        return Costs(**found)

    @staticmethod
    def uniform(cut: Cut, forward: Mapping[str, float] | None = None) -> "Costs":
        """F = B = W = 1 second for every stage, or `forward[stage]` seconds; W = 2 F without B."""
        return Costs(_seconds(cut, dict.fromkeys(cut.stage, 1.0) | dict(forward or {})))

    @staticmethod
    def from_flops(cut: Cut, flops_per_second: float) -> "Costs":
        """F = B = W in proportion to each stage's cost; W = 2 F without B."""
        return Costs(_seconds(cut, {s.name: s.cost / flops_per_second for s in cut.stages}))

    @staticmethod
    def of_regions(
        cut: Cut,
        seconds: Mapping[str, Sequence[float]],
        *,
        bytes: Mapping[str, float] | None = None,
        kept: Mapping[str, float] | None = None,
        latency: float = 0.0,
        bandwidth: float = math.inf,
    ) -> "Costs":
        """Costs from numbers by region: `{"vision": (1, 2), "llm": (1, 1, 1)}`.

        seconds: F, then the backward as a whole, or B and W; kept: bytes of one F. Both are of the
        whole region for an encoder or a generator, and of one of `cut.ranks` equal shares for the
        backbone, whose stages split them evenly, however many they are. bytes: what one op of a
        stage sends to one rank.
        """
        part = {stage.name: _part(cut, stage) for stage in cut.stages}
        return Costs(
            seconds={
                (stage.name, kind): _of_kind(stage, kind, seconds.get(stage.region, ()))
                * part[stage.name]
                for stage in cut.stages
                for kind in stage.kinds
            },
            latency=latency,
            bandwidth=bandwidth,
            bytes={
                (stage.name, kind): bytes[stage.region]
                for stage in cut.stages
                for kind in (Kind.F, Kind.B)
                if bytes and stage.region in bytes and kind in stage.kinds
            },
            kept={
                (stage.name, Kind.F): kept[stage.region] * part[stage.name]
                for stage in cut.stages
                if kept and stage.region in kept
            },
        )


def at(amount: Amount, mb: int | None) -> float:
    """The number of one microbatch."""
    return amount if isinstance(amount, float | int) else amount[(mb or 0) % len(amount)]


def _most(amount: Amount) -> float:
    return max(amount) if isinstance(amount, Sequence) else amount


def combine(function: Callable[[list[float]], float], amounts: Sequence[Amount]) -> Amount:
    """An amount made of others, microbatch by microbatch: `combine(sum, (1.0, (2.0, 3.0)))`."""
    lengths = [len(amount) for amount in amounts if isinstance(amount, Sequence)]
    if not lengths:
        return float(function([at(amount, None) for amount in amounts]))
    return tuple(float(function([at(x, mb) for x in amounts])) for mb in range(math.lcm(*lengths)))


def first_backward(stage: Stage) -> Kind | None:
    """The kind that reads what F keeps; None for a stage without backward."""
    return next((kind for kind in (Kind.B, Kind.W) if kind in stage.kinds), None)


def _checked(name: str, key: object, amount: Amount) -> Amount:
    """The amount in floats; a tuple where there is one for each microbatch."""
    values = tuple(amount) if isinstance(amount, Sequence) else (amount,)
    if not values or not all(isinstance(x, Real) and 0 <= x < math.inf for x in values):
        where = ".".join(key) if isinstance(key, tuple) else key
        raise ScheduleError(
            f"{name} of {where} is {amount!r}; expected a finite number of at least 0, or one "
            "for each microbatch"
        )
    numbers = tuple(map(float, values))
    return numbers if isinstance(amount, Sequence) else numbers[0]


def _key(name: str, text: str) -> tuple[str, Kind]:
    stage, _, kind = text.rpartition(".")
    if not stage or kind not in list(Kind):
        raise ScheduleError(f"{name} of the costs names {text!r}; expected an op like llm0.F")
    return stage, Kind(kind)


def _part(cut: Cut, stage: Stage) -> float:
    """The part of its region's numbers that a stage has."""
    stages = sum(other.region == stage.region for other in cut.stages)
    return (cut.ranks if cut.role(stage.name) is Role.BACKBONE else 1) / stages


def _of_kind(stage: Stage, kind: Kind, seconds: Sequence[float]) -> float:
    """One number for the backward is the whole of it, halved where B and W are apart."""
    match kind, list(seconds):
        case Kind.F, [forward, *_]:
            return forward
        case _, [_, whole]:
            return whole / (len(stage.kinds) - 1)
        case Kind.B, [_, inputs, _]:
            return inputs
        case Kind.W, [_, inputs, weights]:
            return weights if Kind.B in stage.kinds else inputs + weights
    raise ScheduleError(
        f"{stage.name} runs {''.join(stage.kinds)}, but region {stage.region} has {len(seconds)} "
        "numbers; give seconds of F and of its backward, or of F, B and W"
    )


def _seconds(cut: Cut, forward: Mapping[str, float]) -> dict[tuple[str, Kind], float]:
    """Where nothing needs the input gradients, one W does the whole of the backward."""
    return {
        (stage.name, kind): forward[stage.name] * _share(kind, stage.kinds)
        for stage in cut.stages
        for kind in stage.kinds
    }


def _share(kind: Kind, kinds: tuple[Kind, ...]) -> int:
    return 2 if kind is Kind.W and Kind.B not in kinds else 1
