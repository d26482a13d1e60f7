"""`fxpipe run-table`: a table on an emulated machine, beside its simulation."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fxpipe.costs import Costs
from fxpipe.errors import OptionError
from fxpipe.table import Table
from fxpipe.trace import write_perfetto

_File = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Text of a table.")]
_Costs = Annotated[
    Path, typer.Option(exists=True, dir_okay=False, help="JSON of what its ops and transfers take.")
]


def run_table(
    file: _File,
    costs: _Costs,
    ranks: Annotated[int | None, typer.Option(min=1, help="Those of the table.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="How often it runs.")] = 3,
    scale: Annotated[float, typer.Option(help="Everything takes so many times as long.")] = 1.0,
    fraction: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of each transfer's bytes that really travel.")
    ] = 1.0,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Perfetto trace of the last step here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a table without a model: ops sleep for as long as the costs say, one process per rank,
    with real transfers over gloo. Prints what was measured beside what is simulated.
    """
    table = Table.parse(_text(file))
    if ranks is not None and ranks != len(table.rows):
        raise OptionError(f"--ranks {ranks}, but {file} has {len(table.rows)} rows; leave it out")
    if not 0 < scale < float("inf"):
        raise OptionError(f"--scale {scale:g}: expected a factor above 0")
    from fxpipe.beside import beside  # here, so that the other commands need no torch
    from fxpipe.emulation import stretched
    from fxpipe.emulator import Emulator, finished

    taken = stretched(Costs.from_json(_text(costs)), scale)
    table = finished(table, taken)
    with Emulator(len(table.rows)) as emulator:
        timelines = emulator.run(table, taken, steps=steps, fraction=fraction)
    found = beside(table, taken, timelines)
    typer.echo(json.dumps(found.record(), indent=1) if as_json else found.text())
    if trace is not None:
        typer.echo(f"trace: {write_perfetto(timelines[-1], trace)} (open it at ui.perfetto.dev)")


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8-sig", errors="replace")
