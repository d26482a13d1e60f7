"""What lays a model out over ranks and orders its ops: the name of a schedule, or a whole table.

scheduler("nested/1f1b")            derives a table for each cut and number of microbatches
scheduler("ranks 2 ...")            a given table: a Table, its text, or the path of a file
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fxpipe import passes
from fxpipe.costs import Costs
from fxpipe.cut import Cut, Role
from fxpipe.errors import ScheduleError
from fxpipe.given import Given, read
from fxpipe.schedule import Plan, Schedule, derive, layout
from fxpipe.table import Table

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
        raise ScheduleError(f"a given table decides {', '.join(asked)} itself; leave them out")
    return Given(schedule) if isinstance(schedule, Table) else read(schedule)


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
