"""The rows of `benchmarks.architectures`: one for each step, kept in a CSV, shown as markdown."""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.training import Trained

LOSS_BAR = 1e-6
GRADIENT_BAR = {"float32": 1e-5, "float64": 1e-9}
HEAD = (
    "model | regions | rung, graphs | stages, seam values | nodes | capture (of export), compile | "
    "steps | loss | gradient | float32's own | float64 | remarks"
)


@dataclass(frozen=True)
class Row:
    """One step of one architecture, beside eager; the fields of `Trained` and `Run`, as text fits
    into a cell."""

    model: str
    dtype: str
    setting: str
    regions: str = ""
    rung: str = ""
    captures: int = 0
    nodes: int = 0
    export: float = 0.0
    capture: float = 0.0
    compile: float = 0.0
    stages: int = 0
    values: int = 0
    loss: float = 0.0
    gradient: float = 0.0
    worst: str = ""
    rounding: float = 0.0
    apart: str = ""
    equal: str = ""
    error: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What was run."""
        return self.model, self.dtype, self.setting

    @property
    def wrong(self) -> str:
        """Why it is not as eager; nothing where it is."""
        if self.error or self.equal:
            return self.error or f"differing microbatches: {self.equal}"
        if self.loss > LOSS_BAR or not self.gradient <= GRADIENT_BAR[self.dtype]:
            return f"loss {self.loss:.1e}, gradient {self.gradient:.1e} of {self.worst}"
        return ""


def wrong(rows: Sequence[Row]) -> list[Row]:
    """The steps that are not as eager's, without those that miss float32's bar by rounding: in
    float64 they are within theirs."""
    exact = {(r.model, r.setting) for r in rows if r.dtype == "float64" and not r.wrong}

    def rounded(row: Row) -> bool:
        missed = bool(row.error or row.equal) or row.gradient > 10 * GRADIENT_BAR[row.dtype]
        return not missed and (row.model, row.setting) in exact

    return [row for row in rows if row.wrong and not rounded(row)]


def rows_of(found: Trained) -> list[Row]:
    """One row for each step that was run."""
    return [
        Row(
            model=found.name,
            dtype=found.dtype,
            regions=" ".join(found.regions),
            rung=found.rung,
            captures=found.captures,
            nodes=found.nodes,
            export=found.export,
            capture=found.capture,
            compile=found.compile,
            rounding=found.rounding,
            apart=" ".join(found.apart),
            equal=found.equal,
            **asdict(run),
        )
        for run in found.runs
    ]


def read(path: Path) -> list[Row]:
    """What a file holds; nothing where there is none."""
    if not path.exists():
        return []
    kinds: Mapping[str, Any] = {"int": int, "float": float, "str": str}
    types = {
        field.name: kinds[str(getattr(field.type, "__name__", field.type))] for field in fields(Row)
    }
    with path.open(newline="") as file:
        return [
            Row(**{name: types[name](cell) for name, cell in line.items()})
            for line in csv.DictReader(file)
        ]


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write all rows, in place of what the file held."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def merged(old: Iterable[Row], new: Iterable[Row], order: Sequence[str]) -> list[Row]:
    """All of them, the new ones in place of old ones of the same step, by model."""
    found = {row.key: row for row in (*old, *new)}
    return sorted(found.values(), key=lambda row: (order.index(row.model), row.dtype))


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """The table: one line for each model."""
    yield f"| {HEAD} |"
    yield f"|{'---|' * (HEAD.count('|') + 1)}"
    for model in dict.fromkeys(row.model for row in rows):
        yield line([row for row in rows if row.model == model])


def line(rows: Sequence[Row]) -> str:
    """The line of one model."""
    single = [row for row in rows if row.dtype == "float32"] or list(rows)
    double = [row for row in rows if row.dtype == "float64" and not row.error]
    done = [row for row in single if not row.error]
    first = done[0] if done else single[0]
    bad = wrong(rows)
    ratio = f" ({first.capture / first.export:.1f} ×)" if first.export else ""
    cells = [
        first.model,
        first.regions,
        f"{first.rung}, {first.captures}" if first.rung else "",
        "; ".join(dict.fromkeys(f"{row.stages}, {row.values}" for row in done)),
        str(first.nodes or ""),
        f"{first.capture:.1f}{ratio}, {first.compile:.1f} s" if first.nodes else "",
        f"{len(single) - sum(row in bad for row in single)} of {len(single)}",
        _largest(row.loss for row in done),
        _largest(row.gradient for row in done),
        _largest(row.rounding for row in done),
        _largest(row.gradient for row in double),
        "; ".join(_remarks(rows)),
    ]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _largest(found: Iterable[float]) -> str:
    numbers = list(found)
    return f"{max(numbers):.0e}" if numbers else ""


def _remarks(rows: Sequence[Row]) -> Iterator[str]:
    """Modules that are not in a region of the role that they are drawn in; what went wrong."""
    yield from dict.fromkeys(f"not as drawn: {row.apart}" for row in rows if row.apart)
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.wrong:
            reasons.setdefault(_short(row.wrong), []).append(row.setting)
    yield from (f"{', '.join(where)}: {why}" for why, where in reasons.items())


def _short(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:157]}..."


def summary(rows: Sequence[Row]) -> str:
    """How many there are, and how many are right."""
    models = list(dict.fromkeys(row.model for row in rows))
    bad = wrong(rows)
    opaque = {row.model for row in rows if row.rung.startswith("3")}
    later = {row.model for row in rows if "3 (" in row.rung} - opaque
    steps, right = len(rows) - len(bad), len(models) - len({row.model for row in bad})
    return (
        f"{right} of {len(models)} models and {steps} of {len(rows)} steps as "
        f"eager; {len(models) - len(opaque)} examples without an opaque stage; {len(later)} get "
        "one when sizes differ in every microbatch"
    )
