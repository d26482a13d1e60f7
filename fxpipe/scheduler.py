"""What lays a model out over ranks and orders its ops: the name of a schedule, or a whole table.

scheduler("nested/1f1b")            derives a table for each cut and number of microbatches
scheduler("ranks 2 ...")            a given table: a Table, its text, or the path of a file
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fxpipe import passes
from fxpipe.choices import Option
from fxpipe.costs import Costs
from fxpipe.cut import Cut, Role
from fxpipe.device import NOMINAL, Device, Reckon
from fxpipe.errors import ScheduleError
from fxpipe.given import Given, read
from fxpipe.nest import limits_of
from fxpipe.owners import Given as Owners
from fxpipe.owners import check_named
from fxpipe.passes.communicate import communicate
from fxpipe.passes.reduce import reduce
from fxpipe.planner import Planned, plan
from fxpipe.schedule import AUTO, REPLICATED, Plan, Schedule, chunks_of, derive, layout
from fxpipe.table import Table
from fxpipe.verify import verify
from fxpipe.waves import waves


@dataclass(frozen=True)
class Options:
    """What a named schedule leaves open.

    chunks: backbone stages per rank. owners: an owner map, or the rank of each microbatch; also by
    region. sharded: encoders and generators that are cut into one stage per rank. recompute:
    regions whose backward computes the forward again. live: the most units of "modality" and "llm"
    on a rank. memory_budget: bytes per rank, for "auto" to keep to. costs: the seconds and bytes to
    reckon with, or a device to reckon them for, by what the largest microbatch known computes and
    moves (`fxpipe.roofline`); by default an accelerator's balance of both where there is a budget,
    and the stages' flops where there is none.
    """

    chunks: int | None = None
    owners: Owners = None
    sharded: Sequence[str] = ()
    recompute: Sequence[str] = ()
    live: Mapping[str, int] | None = None
    memory_budget: float | None = None
    costs: Costs | Device | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Options":
        """Options by their names. Raises ScheduleError for a name that is none."""
        names = [field.name for field in fields(cls)]
        for name in given.keys() - {*names}:
            near = get_close_matches(name, names, 1)
            instead = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(names)}"
            raise ScheduleError(f"a schedule has no option {name}; {instead}")
        return cls(**given)

    def __post_init__(self) -> None:
        for name in ("sharded", "recompute"):
            if isinstance(given := getattr(self, name), str):
                raise ScheduleError(f"{name} is the text {given!r}; expected names: ({given!r},)")
        if not isinstance(self.costs, Costs | Device | None):
            raise ScheduleError(
                f"costs is a {type(self.costs).__name__}; expected fxpipe.costs.Costs, or "
                "fxpipe.device.Device(flops, bandwidth)"
            )
        limits_of(self.live, 1, math.inf)
        rules = self.owners.values() if isinstance(self.owners, Mapping) else (self.owners,)
        for rule in rules:
            check_named(rule)

    @property
    def asked(self) -> list[str]:
        """The names of those that are not left open."""
        return [f.name for f in fields(self) if getattr(self, f.name) not in (None, (), [])]


class Scheduler(Protocol):
    """Decides where regions live, and the order of ops once there is a cut."""

    @property
    def recompute(self) -> tuple[str, ...]:
        """The regions that compute their forward again in the backward."""
        ...

    @property
    def ranks(self) -> int | None:
        """How many ranks it is for; None if for any number."""
        ...

    @property
    def microbatches(self) -> int | None:
        """How many microbatches it is for; None if for any number."""
        ...

    @property
    def in_order(self) -> bool:
        """Whether one rank runs all microbatches of an encoder, one after the other."""
        ...

    def plan(
        self, ranks: int, roles: Mapping[str, Role], others: Mapping[str, Role] | None = None
    ) -> Plan:
        """Where the regions live. others: those that have not come yet, but are known to be. Raises
        ScheduleError."""
        ...

    def table(self, cut: Cut, microbatches: int, reckon: Reckon | None = None) -> Table:
        """The table of a step, verified, with transfers and reductions. Raises ScheduleError."""
        ...


def scheduler(schedule: str | Path | Table, options: Options | None = None) -> Scheduler:
    """The scheduler of a schedule; only a named one has options. Raises ScheduleError."""
    options = options or Options()
    if isinstance(schedule, str) and "\n" not in schedule and not Path(schedule).is_file():
        if Path(schedule).suffix:
            raise ScheduleError(f"there is no file {schedule!r}, and no schedule has that name")
        if Schedule.parse(schedule).base != AUTO and options.memory_budget is not None:
            raise ScheduleError(
                f"memory_budget with schedule {schedule!r}, which is fixed and cannot be chosen by "
                "its memory; use schedule='auto', or leave memory_budget out"
            )
        return Named(schedule, options)
    if options.asked:
        raise ScheduleError(
            f"a given table decides {', '.join(options.asked)} itself; leave that out"
        )
    return Given(schedule) if isinstance(schedule, Table) else read(schedule)


@dataclass(frozen=True)
class Named:
    """`nested/1f1b` and its options: a table is derived for each cut."""

    schedule: str
    options: Options
    ranks: int | None = field(default=None, init=False)
    microbatches: int | None = field(default=None, init=False)

    @property
    def recompute(self) -> tuple[str, ...]:
        """The regions that compute their forward again."""
        return tuple(self.options.recompute)

    @property
    def in_order(self) -> bool:
        """Whether one rank runs all microbatches of an encoder, one after the other."""
        return Schedule.parse(self.schedule).placement not in REPLICATED

    def plan(
        self, ranks: int, roles: Mapping[str, Role], others: Mapping[str, Role] | None = None
    ) -> Plan:
        """Where the schedule wants these regions to live."""
        known = [n for n, r in {**roles, **(others or {})}.items() if r is not Role.BACKBONE]
        unknown = [name for name in self.options.sharded if name not in known]
        if unknown:
            raise ScheduleError(
                f"sharded names {unknown[0]!r}; the encoders and generators of this model are "
                f"{', '.join(known) or 'none'}. One that only some microbatches have is known from "
                "an example of these: pass a list of examples"
            )
        named = {role: [n for n, r in roles.items() if r is role] for role in Role}
        encoders, generators = named[Role.ENCODER], named[Role.GENERATOR]
        chunks, sharded = self.options.chunks, [n for n in self.options.sharded if n in roles]
        return layout(self.schedule, ranks, encoders, generators, chunks=chunks, sharded=sharded)

    def table(self, cut: Cut, microbatches: int, reckon: Reckon | None = None) -> Table:
        """The derived table; under a memory budget, what the planner chooses."""
        options = self.options
        costs = self._costs(cut, reckon)
        if options.memory_budget is not None:
            table = _within(options.memory_budget, cut, microbatches, options, costs)
        else:
            table = derive(
                cut,
                microbatches,
                self.schedule,
                costs=costs,
                owners=options.owners,
                live=options.live,
            )
        return passes.run(table, (partial(communicate, costs=costs), reduce))

    def _costs(self, cut: Cut, reckon: Reckon | None) -> Costs:
        given = self.options.costs
        if isinstance(given, Costs):
            return given
        if reckon and (given or self.options.memory_budget is not None):
            return reckon(given or NOMINAL)
        return _by_flops(cut)


@dataclass(frozen=True)
class Forward:
    """A forward without a backward, on the stages of another scheduler."""

    base: Scheduler
    recompute: tuple[str, ...] = field(default=(), init=False)
    ranks: int | None = field(default=None, init=False)
    microbatches: int | None = field(default=None, init=False)

    @property
    def in_order(self) -> bool:
        """Whether one rank runs all microbatches of an encoder, one after the other."""
        return self.base.in_order

    def plan(
        self, ranks: int, roles: Mapping[str, Role], others: Mapping[str, Role] | None = None
    ) -> Plan:
        """Where the other scheduler has the regions."""
        return self.base.plan(ranks, roles, others)

    def table(self, cut: Cut, microbatches: int, reckon: Reckon | None = None) -> Table:
        """Every F of the cut, microbatch after microbatch."""
        table = waves(cut, microbatches)
        verify(table)
        return table


def _by_flops(cut: Cut) -> Costs:
    """Costs in proportion to the flops of each stage, the dearest forward a second."""
    return Costs.from_flops(cut, max((stage.cost for stage in cut.stages), default=0.0) or 1.0)


def _within(budget: float, cut: Cut, microbatches: int, options: Options, costs: Costs) -> Table:
    """The quickest table of a cut in so many bytes per rank. Nothing is traced anew: other layouts
    and more recompute are only named where they would help."""
    if not (costs.kept or costs.resident):
        raise ScheduleError(
            "memory_budget needs costs that say how many bytes ops keep; leave costs= out, or pass "
            "a device, and they are reckoned from the stages' graphs"
        )
    option = Option(cut, costs)

    def planned(*, recompute: bool) -> Planned:
        return plan(
            lambda schedule, chunks: option,
            microbatches,
            chunks=(chunks_of(cut),),
            recompute=recompute,
            owners=options.owners,
            live=options.live,
            memory=budget,
        )

    try:
        return planned(recompute=False).table
    except ScheduleError as error:
        try:
            more = planned(recompute=True).chosen
        except ScheduleError:
            raise error from None
        names = ", ".join(map(repr, more.recompute))
        raise ScheduleError(
            f"{error}; with recompute=[{names}], {more.schedule} would fit in {more.bytes:.6g} "
            "bytes"
        ) from None
