"""Orders of ops that are there already: the text of a table, or torch's CSV of actions."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fxpipe import passes
from fxpipe.actions import read_actions
from fxpipe.cut import Cut, Kind, Layout, Role, Seam
from fxpipe.device import Reckon
from fxpipe.errors import ScheduleError
from fxpipe.schedule import Plan
from fxpipe.table import Table
from fxpipe.verify import verify

_ACTION = re.compile(r"(?<!\w)(\d+)[FIBW](\d+)")


def read(source: str | Path) -> "Given | Actions":
    """The table or the actions that a text, or the file at a path, holds."""
    is_text = isinstance(source, str) and "\n" in source
    text = str(source) if is_text else Path(source).read_text(encoding="utf-8")
    first = next(filter(None, map(str.strip, text.splitlines())), "")
    return Actions(text) if re.match(r"\(?\d|,", first) else Given(Table.parse(text))


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

    @property
    def in_order(self) -> bool:
        """Whether one rank runs all microbatches of an encoder, one after the other."""
        return all(stage.rank is not None for stage in self.given.cut.stages)

    def plan(
        self, ranks: int, roles: Mapping[str, Role], others: Mapping[str, Role] | None = None
    ) -> Plan:
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
        return Plan(kind, homes, ranks_of)

    def table(self, cut: Cut, microbatches: int, reckon: Reckon | None = None) -> Table:
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
        table = passes.run(
            table, [step for name, step in passes.ALL.items() if not done.get(name, True)]
        )
        verify(table)
        return table


@dataclass(frozen=True)
class Actions:
    """A CSV of actions: stage i is the i-th of all encoders, the backbone's, all generators."""

    text: str
    recompute: tuple[str, ...] = field(default=(), init=False)
    in_order: bool = field(default=True, init=False)

    @property
    def ranks(self) -> int:
        """As many as it has lines."""
        return len(self.text.splitlines())

    @property
    def microbatches(self) -> int:
        """As many as it runs."""
        return 1 + max((int(found[2]) for found in _ACTION.finditer(self.text)), default=-1)

    def plan(
        self, ranks: int, roles: Mapping[str, Role], others: Mapping[str, Role] | None = None
    ) -> Plan:
        """Where its stages live: an encoder or a generator has one, the backbone the others."""
        if ranks != self.ranks:
            raise ScheduleError(f"the actions are for {self.ranks} ranks; there are {ranks}")
        lines = enumerate(self.text.splitlines())
        homes = {int(x[1]): rank for rank, line in lines for x in _ACTION.finditer(line)}
        first, last = (
            [name for name, found in roles.items() if found is role]
            for role in (Role.ENCODER, Role.GENERATOR)
        )
        count = len(homes) - len(first) - len(last)
        if count < 1 or set(homes) != set(range(len(homes))):
            raise ScheduleError(
                f"the actions are of stages {sorted(homes)}; expected 0, 1, ... for {_roles(roles)}"
                ", one for each region and more for the backbone"
            )
        own = {name: homes[i] for i, name in enumerate(first)}
        own |= {name: homes[len(first) + count + i] for i, name in enumerate(last)}
        backbone = tuple(homes[len(first) + i] for i in range(count))
        return Plan(Layout.SHARDED, dict(own), backbone)

    def table(self, cut: Cut, microbatches: int, reckon: Reckon | None = None) -> Table:
        """The table that the actions mean for a cut."""
        return Given(Table(cut, read_actions(self.text, cut))).table(cut, microbatches)


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
