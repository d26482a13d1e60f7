"""`fxpipe plan`: the schedule of regions of which only the seconds are known, or of a file."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from fxpipe import cli_options as options
from fxpipe.errors import OptionError, TableError
from fxpipe.forecast import Ask, Forecast, Owners, checked, forecast, replayed
from fxpipe.rates import Rates
from fxpipe.sketch import Sketch, named, one_each, regions
from fxpipe.table import Table


def plan(
    file: options.File = None,
    region: options.Region = None,
    ranks: options.Ranks = None,
    microbatches: options.Microbatches = 8,
    schedule: options.Schedule = "auto",
    chunks: options.Chunks = None,
    shard: options.Shard = None,
    owners: options.OwnerMap = None,
    modality_live: options.ModalityLive = None,
    llm_live: options.LlmLive = None,
    scale: options.Scale = None,
    latency: options.Latency = 0.0,
    bandwidth: options.Bandwidth = math.inf,
    byte: options.Bytes = None,
    keep: options.Keep = None,
    memory: options.Memory = None,
    recompute: options.Recompute = None,
    effort: options.Effort = 1.0,
    check: options.Check = False,
    as_json: options.Json = False,
) -> None:
    """Print a schedule as a time grid with its figures, or the table of a cut in FILE.

    fxpipe plan --ranks 4 --region vision=encoder:1,2 --region llm=backbone:1,1,1
    """
    sketches = regions(region or ())
    rates = _rates(sketches, latency, bandwidth, scale or (), byte or (), keep or ())
    limits = {"modality": modality_live, "llm": llm_live}
    live = {name: units for name, units in limits.items() if units is not None}
    sharded, owned = tuple(shard or ()), _owners(owners)
    ask = Ask(sketches, ranks, microbatches, schedule, chunks, sharded, rates, owned, live, memory)
    ask = replace(ask, recompute=tuple(recompute or ()), effort=effort)
    _run(file, ask, check=check, as_json=as_json)


def _rates(
    sketches: Sequence[Sketch],
    latency: float,
    bandwidth: float,
    scale: Sequence[str],
    sent: Sequence[str],
    kept: Sequence[str],
) -> Rates:
    return Rates(
        latency,
        bandwidth,
        named("--scale", scale, sketches),
        one_each("--bytes", sent, sketches),
        one_each("--keep", kept, sketches),
    )


def _run(file: Path | None, ask: Ask, *, check: bool, as_json: bool) -> None:
    if file is None and check:
        raise OptionError("--check needs a FILE with the text of a table")
    text = "" if file is None else _read(file)
    if check:
        _show_check(ask, text, as_json=as_json)
    elif file is None:
        _show(forecast(ask), as_json=as_json)
    elif not text.lstrip().startswith("ranks"):
        _show(replayed(ask, text), as_json=as_json)
    else:
        found = forecast(ask, Table.parse(text).cut)
        if as_json:
            _show(found, as_json=True)
        else:
            typer.echo(str(found.table))


def _show_check(ask: Ask, text: str, *, as_json: bool) -> None:
    """A broken table ends with status 1 and its broken rules, as JSON where that is wanted."""
    try:
        found = checked(ask, text)
    except TableError as error:
        if not as_json:
            raise
        typer.echo(_json({"valid": False, "broken": str(error).splitlines()}))
        raise typer.Exit(1) from None
    if not as_json:
        ops = sum(map(len, found.table.rows))
        typer.echo(f"{found.table.microbatches} microbatches, {ops} ops: valid\n")
    _show(found, as_json=as_json)


def _show(found: Forecast, *, as_json: bool) -> None:
    if as_json:
        typer.echo(_json(_record(found)))
        return
    from rich.console import Console  # here, so that nobody else waits for it

    from fxpipe.grid import grid
    from fxpipe.summary import front, summary

    console = Console(highlight=False)
    colour = console.color_system is not None and not console.no_color
    console.print(grid(found.timeline, console.width, colour=colour), soft_wrap=True)
    words = [summary(found.figures, console.width)]
    if found.schedule:
        words.insert(0, f"schedule {found.schedule}")
    if found.front:
        words += ["", front(found.front)]
    console.print("\n".join(words), markup=False, soft_wrap=True)


def _record(found: Forecast) -> dict[str, Any]:
    """What --json prints: seconds, fractions and counts, one per rank or per microbatch."""
    seen = found.figures
    record: dict[str, Any] = {
        "valid": True,
        "schedule": found.schedule,
        "makespan": seen.makespan,
        "lower_bound": seen.lower_bound,
        "bubble": seen.bubble,
        "peak_live": seen.peak_live,
        "peak_bytes": seen.peak_bytes,
        "owners": seen.owners,
        "E": seen.encoder,
        "w": seen.slack,
        "spill": seen.spill,
        "rows": str(found.table),
    }
    front = [point._asdict() for point in found.front]
    return record | ({"front": front} if front else {})


def _json(record: dict[str, Any]) -> str:
    """One JSON object with a line for each key."""
    lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    return "\n".join(["{", ",\n".join(lines), "}"])


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise OptionError(f"{file} is no text; give a cut, a table or a CSV of actions") from None


def _owners(text: str | None) -> Owners | None:
    """The name of an owner map, or the rank of each microbatch."""
    if text is None or text in options.OWNERS:
        return text
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        maps = ", ".join(options.OWNERS)
        raise OptionError(
            f"--owners {text!r} is unknown; write one of {maps}, or a rank per microbatch: 0,1,2"
        ) from None
