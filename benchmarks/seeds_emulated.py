"""The marks on emulated chips: real programs, processes and transfers; ops sleep."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

from benchmarks.systems import Row
from fxpipe.costs import Amount, Costs
from fxpipe.cut import Role
from fxpipe.emulation import stretched
from fxpipe.emulator import Emulator
from fxpipe.simulate import simulate
from fxpipe.table import Table
from fxpipe.timeline import Timeline

CLOSE = 0.03  # a measured step may be so much longer than the simulated one
Job = tuple[Table, Costs]


def emulated(marks: Iterable[Mapping[str, Row]], unit: float, rounds: int, fraction: float) -> bool:
    """Every system of each workload, in turns; whether each takes what was predicted.

    unit: seconds of the shortest op of the backbone, to which all times are stretched.
    """
    far = [0.0]
    for rows in marks:
        factor = max(1.0, unit / min(map(shortest, rows.values())))
        work = rows["auto"].workload.name
        print(f"\n{work}, emulated: times x {factor:.3g}, {fraction:.3g} of the bytes\n")
        print("| system | simulated, s | measured, s | difference | bubble | stage / it |")
        print("|---|---|---|---|---|---|")
        jobs = [(x.found.table, stretched(x.found.costs, factor)) for x in rows.values()]
        steps = in_turns(jobs, rounds, fraction)
        first = fmean(step.makespan for step in steps[0])
        for name, job, timelines in zip(rows, jobs, steps, strict=True):
            text, excess = _line(name, job, timelines, first)
            print(text, flush=True)
            far.append(excess)
    reached = max(far) <= CLOSE
    print(f"measured within {CLOSE:.0%}: worst {max(far):.1%}: {'PASS' if reached else 'FAIL'}")
    return reached


def in_turns(jobs: Sequence[Job], rounds: int, fraction: float) -> list[list[Timeline]]:
    """The measured steps of tables for equally many ranks, one after the other in each round."""
    found: list[list[Timeline]] = [[] for _ in jobs]
    with Emulator(len(jobs[0][0].rows)) as emulator:
        for _ in range(rounds):
            for into, (table, costs) in zip(found, jobs, strict=True):
                into += emulator.run(table, costs, fraction=fraction)
    for (table, _), timelines in zip(jobs, found, strict=True):
        ops = sum(not op.way for row in table.rows for op in row)
        if any(len(timeline.compute) != ops for timeline in timelines):
            raise AssertionError(f"{table.schedule}: not every one of {ops} ops has run")
    return found


def spread(numbers: Sequence[float]) -> str:
    """Mean and standard deviation."""
    mean = fmean(numbers)
    return f"{mean:.3f} ± {stdev(numbers):.3f}" if len(numbers) > 1 else f"{mean:.3f}"


def _line(name: str, job: Job, timelines: Sequence[Timeline], first: float) -> tuple[str, float]:
    simulated = simulate(*job).makespan
    seconds = [timeline.makespan for timeline in timelines]
    ranks = range(timelines[0].cut.ranks)
    bubble = fmean(timeline.bubble(rank) for timeline in timelines for rank in ranks)
    excess = fmean(seconds) / simulated - 1
    cells = [name, f"{simulated:.3f}", spread(seconds), f"{excess:+.1%}", f"{bubble:.1%}"]
    return f"| {' | '.join([*cells, f'{first / fmean(seconds):.2f}'])} |", excess


def shortest(row: Row) -> float:
    """Seconds of the shortest op of the backbone."""
    cut, seconds = row.found.table.cut, row.found.costs.seconds
    stages = {stage.name for stage in cut.of(Role.BACKBONE)}
    return min(_least(amount) for (stage, _), amount in seconds.items() if stage in stages)


def _least(amount: Amount) -> float:
    return min(amount) if isinstance(amount, Sequence) else amount
