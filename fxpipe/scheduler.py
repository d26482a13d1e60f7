"""What lays a model out over ranks and orders its ops: the name of a schedule, or a whole table.

scheduler("nested/1f1b")            derives a table for each cut and number of microbatches
scheduler("ranks 2 ...")            a given table: a Table, its text, or the path of a file
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from fxpipe import passes
from fxpipe.costs import Costs
from fxpipe.cut import Cut, Kind, Layout, Role, Seam
from fxpipe.errors import ScheduleError
from fxpipe.schedule import Plan, Schedule, derive, layout
from fxpipe.table import Table
from fxpipe.verify import verify

Owners = str | Mapping[str, Sequence[int]] | Sequence[int]


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

    def plan(self, ranks: int, roles: Mapping[str, Role]) -> Plan:
        """Where the regions live. Raises ScheduleError."""
        ...

    def table(self, cut: Cut, microbatches: int) -> Table:
        """The table of a step, verified, with transfers and reductions. Raises ScheduleError."""
        ...


def scheduler(
    schedule: str | Path | Table,
    chunks: int | None = None,
    owners: Owners | None = None,
    recompute: Sequence[str] = (),
    memory_budget: float | None = None,
    costs: Costs | None = None,
) -> Scheduler:
    """The scheduler of a schedule. Raises ScheduleError.

    Only a named one has options. chunks: backbone stages per rank. owners: a rule, or the owner of
    each microbatch. recompute: regions whose backward computes the forward again. memory_budget:
    bytes per rank, for "auto" to keep to. costs: the seconds that it reckons with.
    """
    options: dict[str, object] = {
        "chunks": chunks,
        "owners": owners,
        "recompute": recompute or None,
    }
    options |= {"memory_budget": memory_budget, "costs": costs}
    asked = [name for name, value in options.items() if value is not None]
    if isinstance(schedule, str) and "\n" not in schedule and not Path(schedule).is_file():
        Schedule.parse(schedule)
        if memory_budget is not None and schedule.strip().lower() != "auto":
            raise ScheduleError(
                f"memory_budget with schedule {schedule!r}, which is fixed and cannot be chosen by "
                "its memory; use schedule='auto', or leave memory_budget out"
            )
        return Named(schedule, chunks, owners, tuple(recompute), memory_budget, costs)
    if asked:
        raise ScheduleError(f"a given table says all of {', '.join(asked)} itself; leave them out")
    return Given(schedule if isinstance(schedule, Table) else _read(schedule))


def _read(source: str | Path) -> Table:
    is_text = isinstance(source, str) and "\n" in source
    return Table.parse(str(source) if is_text else Path(source).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Named:
    """`nested/1f1b` and its options: a table is derived for each cut."""

    schedule: str
    chunks: int | None = None
    owners: Owners | None = None
    recompute: tuple[str, ...] = ()
    memory_budget: float | None = None
    costs: Costs | None = None
    ranks: int | None = field(default=None, init=False)
    microbatches: int | None = field(default=None, init=False)

    def plan(self, ranks: int, roles: Mapping[str, Role]) -> Plan:
        """Where the schedule wants these regions to live."""
        named = {role: [n for n, r in roles.items() if r is role] for role in Role}
        options: dict[str, Any] = {} if self.chunks is None else {"chunks": self.chunks}
        encoders, generators = named[Role.ENCODER], named[Role.GENERATOR]
        return layout(self.schedule, ranks, encoders, generators, **options)

    def table(self, cut: Cut, microbatches: int) -> Table:
        """The derived table."""
        options: dict[str, Any] = {} if self.owners is None else {"owners": self.owners}
        return passes.run(derive(cut, microbatches, self.schedule, costs=self.costs, **options))


@dataclass(frozen=True)
class Given:
    """A table that is there already, by whomever it was made; it is checked, and used as it is."""

    given: Table

    @property
    def ranks(self) -> int:
        """As many as it has rows."""
        return self.given.cut.ranks

    @property
    def microbatches(self) -> int:
        """As many as it runs."""
        return self.given.microbatches

    @property
    def recompute(self) -> tuple[str, ...]:
        """As its regions say."""
        return tuple(region.name for region in self.given.cut.regions if region.recompute)

    def plan(self, ranks: int, roles: Mapping[str, Role]) -> Plan:
        """Where its stages live."""
        cut = self.given.cut
        found = {region.name: region.role for region in cut.regions}
        if found != dict(roles):
            raise ScheduleError(
                f"the table is for the regions {_roles(found)}; this model has {_roles(roles)}"
            )
        if ranks != cut.ranks:
            raise ScheduleError(f"the table is for {cut.ranks} ranks; there are {ranks}")
        homes = {name: _home(cut, name) for name in found}
        backbone = next(name for name, role in found.items() if role is Role.BACKBONE)
        ranks_of = tuple(s.rank or 0 for s in cut.stages if s.region == backbone)
        del homes[backbone]
        replicated = any(home is None for home in homes.values())
        kind = Layout.REPLICATED if replicated else Layout.SHARDED
        return Plan(kind, homes, ranks_of)  # type: ignore[arg-type]

    def table(self, cut: Cut, microbatches: int) -> Table:
        """The table, with the transfers and the reductions that it lacks."""
        if microbatches != self.given.microbatches:
            raise ScheduleError(
                f"the table runs {self.given.microbatches} microbatches; the step has "
                f"{microbatches}"
            )
        _check_cut(self.given.cut, cut)
        table = replace(self.given, cut=cut)
        ops = [op for row in table.rows for op in row]
        has_transfers = any(op.way for op in ops)
        has_sums = any(op.kind is Kind.R for op in ops)
        done = {"communicate": has_transfers, "reduce": has_sums}
        table = passes.run(table, [step for name, step in passes.ALL.items() if not done[name]])
        verify(table)
        return table


def _roles(roles: Mapping[str, Role]) -> str:
    return ", ".join(f"{name} ({role})" for name, role in roles.items())


def _home(cut: Cut, region: str) -> int | tuple[int, ...] | None:
    """Of a region other than the backbone: one of several stages is numbered."""
    stages = [stage for stage in cut.stages if stage.region == region]
    if len(stages) == 1 and stages[0].name == region:
        return stages[0].rank
    return tuple(stage.rank or 0 for stage in stages)


def _check_cut(given: Cut, cut: Cut) -> None:
    """Raise unless a table for one cut runs another: names, kinds, ranks, seams and sharing."""
    mine, theirs = _facts(cut), _facts(given)
    for key in [*theirs, *mine]:
        if mine.get(key) != theirs.get(key):
            raise ScheduleError(
                f"the table is not for this model: {key} is {theirs.get(key, 'missing')} in the "
                f"table, and {mine.get(key, 'missing')} here; print pipe.cut for the cut that a "
                "table must have"
            )


def _facts(cut: Cut) -> dict[str, str]:
    facts = {f"region {region.name}": str(region) for region in cut.regions}
    for stage in cut.stages:
        facts[f"stage {stage.name}"] = str(replace(stage, cost=1.0))
    for seam in cut.seams:
        facts[f"seam {seam.source} -> {seam.target}"] = _gradients(seam)
    return facts | {"shared": "; ".join(" ".join(entry) for entry in cut.shared)}


def _gradients(seam: Seam) -> str:
    return "with gradients" if seam.grads else "without gradients"
