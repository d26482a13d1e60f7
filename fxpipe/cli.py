"""The command line: `fxpipe demo`, and the table's tools `plan`, `verify`, `simulate`, `run-table`.

The tools read and print the text of a cut or a table; all but the last need no torch.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fxpipe.cli_plan import plan
from fxpipe.cli_run import run_table
from fxpipe.costs import Costs
from fxpipe.errors import FxpipeError, OptionError
from fxpipe.schedule import AUTO
from fxpipe.simulate import simulate as run_simulation
from fxpipe.table import Table
from fxpipe.timeline import Timeline
from fxpipe.trace import write_perfetto
from fxpipe.verify import verify as check

app = typer.Typer(
    name="fxpipe",
    help="Compile a plain multimodal nn.Module into one program per rank of a pipeline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_File = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Text of a table.")]
_Schedule = Annotated[str, typer.Option(help="PLACEMENT/BASE, or auto.")]
_Costs = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="JSON of what its ops and transfers take."),
]
_Trace = Annotated[Path | None, typer.Option(help="Write a Perfetto trace of it here.")]


app.command()(plan)
app.command()(run_table)


@app.command()
def verify(file: _File) -> None:
    """Check a table against every rule; exit status 1 and the broken rules if it breaks any."""
    table = _table(file)
    check(table)
    ops = sum(map(len, table.rows))
    typer.echo(
        f"{file}: {len(table.rows)} ranks, {table.microbatches} microbatches, {ops} ops: valid"
    )


@app.command()
def simulate(file: _File, costs: _Costs = None, trace: _Trace = None) -> None:
    """Simulate a table: each op takes what its stage's cost says, or --costs; print how long each
    rank works.
    """
    table = _table(file)
    by_cost = Costs.from_flops(table.cut, 1.0)
    timeline = run_simulation(table, by_cost if costs is None else Costs.from_json(_text(costs)))
    for line in _summary(timeline):
        typer.echo(line)
    if trace is not None:
        typer.echo(f"trace: {write_perfetto(timeline, trace)} (open it at ui.perfetto.dev)")


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(min=1, max=4, help="Processes.")] = 2,
    steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 40,
    schedule: _Schedule = AUTO,
    trace: Annotated[Path, typer.Option(help="Where to write the timeline.")] = Path(
        "fxpipe-demo.perfetto.json"
    ),
) -> None:
    """Train a small LLaVA on handwritten digits in a pipeline, beside the same in eager."""
    for module, package in (("transformers", "transformers"), ("sklearn", "scikit-learn")):
        if find_spec(module) is None:
            raise OptionError(
                f"the demo needs {package}, which is not installed: pip install 'fxpipe[demo]', or "
                "in a clone pip install -e '.[demo]'"
            )
    from fxpipe.demo.run import Options, run

    raise typer.Exit(run(Options(ranks=ranks, steps=steps, schedule=schedule, trace=trace)))


def main() -> None:
    """The console script. What fxpipe raises on purpose is printed without a traceback."""
    try:
        app()
    except FxpipeError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(1)


def _table(file: Path) -> Table:
    """What is no text is no table either: the line that holds it is named."""
    return Table.parse(_text(file))


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8-sig", errors="replace")


def _summary(timeline: Timeline) -> list[str]:
    makespan = timeline.makespan
    ranks = range(timeline.cut.ranks)
    rows = [f"rank {r}: busy {timeline.busy(r):g}, bubble {timeline.bubble(r):.1%}" for r in ranks]
    return [f"makespan {makespan:g}", *rows]


if __name__ == "__main__":
    main()
