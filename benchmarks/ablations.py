"""What each part of a schedule is worth: owners, window, insertion, W as filler, tail, weights.

    python -m benchmarks.ablations [--quick] [--emulate] [--names 'Mpipe B'] [--plot FILE.png]

On the papers' workloads (`benchmarks/workloads.py`), simulated; with --emulate the variants of each
part run in turns on emulated chips as well. Every variant but the one that it names is the same.
Exit code 1 when the usual choice is slower than a variant that holds no more, beyond `TIE`.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks import plots
from benchmarks.asked import given, parser
from benchmarks.seeds_emulated import in_turns, shortest, spread
from benchmarks.systems import Row, System, simulated
from benchmarks.workloads import BIGMAC_U, MPIPE_B, Workload
from fxpipe.costmodel import warmup_slack
from fxpipe.cut import Kind
from fxpipe.emulation import stretched
from fxpipe.emulator import finished
from fxpipe.errors import ScheduleError
from fxpipe.listing import listing
from fxpipe.numbering import build
from fxpipe.owners import round_robin, slack
from fxpipe.policies import Policy
from fxpipe.problem import Limits
from fxpipe.schedule import base_rows, stated
from fxpipe.search import Side
from fxpipe.simulate import simulate
from fxpipe.table import Op, Table

TIE = 0.02
_OURS = System("searched for", "nested/zb-h1", "", split=True)
_TRANSPOSE = System("", "transpose/zb-h1", "", split=True)
# Ops that may start as soon go by these; the encoder's come first, the backbone's in the middle.
INSERTIONS = {
    "as soon as one can start": Policy.parse("0 0 0  0 0 0  0 0 0"),
    "only where the base waits": Policy.parse("10 10 10  0 0 0  0 0 0 | patience 0.01"),
    "the same, a group of P at a time": Policy.parse("5 5 5  0 0 0  0 0 0 | drift 0.2 grouped"),
}


@dataclass(frozen=True)
class Variant:
    """One way to do a part. usual: what fxpipe does unless told otherwise."""

    name: str
    row: Row
    usual: bool = False


Part = Callable[[Workload, float], Iterator[Variant]]


def main() -> int:
    """The command line."""
    asked = _options()
    reached, panels = True, []
    for workload in asked.workloads:
        print(f"\n**{workload.name}**: P = {workload.ranks}, M = {workload.microbatches}\n")
        print("| part | variant | step, s | to the usual | vision, GB | measured |")
        print("|---|---|---|---|---|---|")
        rows: dict[str, list[float]] = {}
        for name, part in PARTS.items():
            found = list(part(workload, asked.effort))
            rows |= {_label(name, variant): [variant.row.seconds] for variant in found}
            measured = _measured([x.row for x in found], asked) if asked.emulate else None
            reached &= _show(name, found, measured)
        panels.append(plots.Bars(f"{workload.name}: seconds of a step", rows))
        for line in weights(workload):
            print(line)
    if asked.plot:
        plots.bars(asked.plot, panels)
    print(f"\nthe usual choice is as quick as any that holds no more, within {TIE:.0%}: ", end="")
    print("PASS" if reached else "FAIL")
    return int(not reached)


def _label(part: str, variant: Variant) -> str:
    """What a plot calls a variant; a star marks the usual one."""
    return f"{'* ' * variant.usual}{part}: {variant.name}"


def owner_map(workload: Workload, effort: float) -> Iterator[Variant]:
    """Who runs each microbatch of the encoder, in the nested pipeline and at its ends."""
    for owners in ("round_robin", "slack", "balanced"):
        for system in (_OURS, _TRANSPOSE):
            asked = replace(system, owners=owners)
            yield _variant(f"{system.schedule}, {owners}", workload, asked, effort)
    yield _variant("nested/zb-h1, found by the search", workload, _OURS, effort, usual=True)


def window(workload: Workload, effort: float) -> Iterator[Variant]:
    """How many units of the encoder a rank may hold."""
    for units in (1, 2, 3, 4, 6, 8):
        asked = replace(_OURS, units=units)
        try:
            yield _variant(f"{units}", workload, asked, effort)
        except ScheduleError:
            print(f"| window | {units} | no order keeps to it | | | |")
    yield _variant("found", workload, _OURS, effort, usual=True)


def insertion(workload: Workload, effort: float) -> Iterator[Variant]:
    """When units enter the base rows of 1F1B, with round-robin owners and three units."""
    for name, policy in INSERTIONS.items():
        yield Variant(name, _listed(workload, policy))
    system = replace(_OURS, schedule="nested/1f1b", owners="round_robin", units=3)
    yield _variant("searched for", workload, system, effort, usual=True)


def filler(workload: Workload, effort: float) -> Iterator[Variant]:
    """What the weight gradients of the backbone do."""
    whole = replace(_OURS, schedule="nested/1f1b", split=False)
    yield _variant("one op with the input gradients", workload, whole, effort)
    beside = replace(_OURS, schedule="nested/1f1b")
    yield _variant("right after them", workload, beside, effort)
    yield _variant("fill gaps", workload, _OURS, effort, usual=True)


def tail(workload: Workload, effort: float) -> Iterator[Variant]:
    """Where encoder backwards run that keep nothing: with their forwards, or in the slack at the
    end."""
    again = replace(_TRANSPOSE, recompute=("vision",))
    row = simulated(workload, replace(again, owners="slack"), effort=effort)
    owners = _head_owners(workload, row)
    yield _variant("where their forwards ran", workload, replace(again, owners=owners), effort)
    yield Variant("in the slack at the end", row, usual=True)


def recompute(workload: Workload, effort: float) -> Iterator[Variant]:
    """Whether the encoder keeps its activations or computes them again."""
    yield _variant("kept", workload, _OURS, effort, usual=True)
    for system in (_OURS, replace(_TRANSPOSE, owners="slack")):
        asked = replace(system, recompute=("vision",))
        yield _variant(f"computed again, {system.schedule}", workload, asked, effort)


PARTS: dict[str, Part] = {
    "owner map": owner_map,
    "window": window,
    "insertion": insertion,
    "weight gradients": filler,
    "tail slack": tail,
    "recompute": recompute,
}


def weights(workload: Workload) -> Iterator[str]:
    """Weights that stay on every rank, against those that come in each step: arithmetic alone."""
    size = 2 * workload.encoder.parameters
    ranks, link = workload.ranks, workload.chip.link
    ring = 2 * (ranks - 1) / ranks * size / link
    yield (
        f"| weights | resident: gradients summed in a ring, once per step | +{ring:.3f} | | "
        f"{size / 1e9:.1f} of weights on each rank | |"
    )
    yield (
        f"| weights | broadcast before each step, gradients gathered on one rank after it "
        f"| +{2 * size / link:.3f} | | the same while it runs | |"
    )


def _variant(
    name: str, workload: Workload, system: System, effort: float, *, usual: bool = False
) -> Variant:
    return Variant(name, simulated(workload, system, effort=effort), usual)


def _head_owners(workload: Workload, row: Row) -> tuple[int, ...]:
    """The owners of the forwards, as the slack at the head wants them."""
    table, costs = row.found.table, row.found.costs
    count = range(workload.microbatches)
    seconds = [costs.compute(Op("vision", Kind.F, mb)) for mb in count]
    return slack(seconds, warmup_slack(table, costs))


def _listed(workload: Workload, policy: Policy) -> Row:
    """Units put into the base rows by one policy, without a search."""
    system = replace(_OURS, schedule="upfront/1f1b")
    row = simulated(workload, system, effort=0.1)
    cut, costs, count = row.found.table.cut, row.found.costs, workload.microbatches
    owners = {"vision": round_robin(workload.ranks, count)}
    owners |= {"image": owners["vision"]} if workload.generator else {}
    base = base_rows(cut, count, "nested/1f1b")
    problem = build(cut, count, costs, base=base, owners=owners, limits=Limits(modality=3))
    side = Side(cut, problem, False, [policy])
    found = listing(problem, side.urgency(policy))
    if not found.complete:
        raise AssertionError(f"{workload.name}: {policy} gets stuck")
    table = stated(Table(cut, problem.rows(found.ranks, found.starts), "nested/1f1b"))
    table = finished(table, costs)
    timeline = simulate(table, costs)
    return Row(system, workload, replace(row.found, table=table, timeline=timeline))


def _measured(rows: Sequence[Row], asked: argparse.Namespace) -> list[str]:
    factor = max(1.0, asked.unit / 1e3 / min(map(shortest, rows)))
    jobs = [(row.found.table, stretched(row.found.costs, factor)) for row in rows]
    steps = in_turns(jobs, asked.rounds, asked.fraction)
    return [spread([step.makespan / factor for step in found]) for found in steps]


def _show(part: str, variants: Sequence[Variant], measured: Sequence[str] | None) -> bool:
    """Print a part; whether its usual variant is not beaten by one that holds no more."""
    usual = next(variant.row for variant in variants if variant.usual)
    reached = True
    for at, (name, row, _) in enumerate(map(_fields, variants)):
        held = row.memory["vision"] / 1e9
        reached &= (
            usual.seconds <= row.seconds * (1 + TIE) or held > usual.memory["vision"] / 1e9 + 1e-9
        )
        cells = [part, name, f"{row.seconds:.3f}", f"{row.seconds / usual.seconds:.3f}"]
        cells += [f"{held:.1f}", measured[at] if measured else ""]
        print(f"| {' | '.join(cells)} |", flush=True)
    return reached


def _fields(variant: Variant) -> tuple[str, Row, bool]:
    return variant.name, variant.row, variant.usual


def _options() -> argparse.Namespace:
    made = parser(__doc__, "Mpipe B, BigMac understanding")
    made.add_argument("--plot", metavar="FILE.png", help="needs matplotlib")
    return given(made, [MPIPE_B, BIGMAC_U], BIGMAC_U)


if __name__ == "__main__":
    sys.exit(main())
