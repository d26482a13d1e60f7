"""What `benchmarks.seeds` prints: rows of a workload, the papers' claims beside ours, the sweep."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.systems import BASELINES, BY_NAME, PAPERS, Row, simulated, with_microbatches
from benchmarks.workloads import Workload
from fxpipe.cut import Kind

_GB = 1e9
_FLAT = 1.02
_SWEPT = ("upfront", PAPERS[1], "nested/zb-h1", "nested/zb-v")
# Which of the papers' methods each claim is made of.
_METHODS = {"Mpipe": (PAPERS[0], "transpose, slack"), "BigMac": PAPERS[1:]}


def lines(name: str, rows: Mapping[str, Row]) -> Iterator[str]:
    """One workload as a markdown table."""
    work = next(iter(rows.values())).workload
    shares = ", ".join(f"{region} {share:.1%}" for region, share in work.share.items())
    yield f"**{name}**: {work.ranks} ranks of {work.chip.name}, {work.microbatches} microbatches, "
    yield f"share of the work: {shares}. Peak activations of each region on any rank."
    yield ""
    heads = ["system", "step, s", *(f"{base} / it" for base in BASELINES), "bubble", "MFU"]
    regions = list(work.models)
    yield f"| {' | '.join([*heads, *(f'{x}, GB' for x in regions), 'over the bound'])} |"
    yield "|---" * (len(heads) + len(regions) + 1) + "|"
    bound = rows["auto"].bound
    for row in rows.values():
        cells = [row.system.name, f"{row.seconds:.3f}"]
        cells += [f"{rows[base].seconds / row.seconds:.2f}" for base in BASELINES]
        cells += [f"{row.bubble:.1%}", f"{row.mfu(row.seconds):.2f}"]
        cells += [f"{row.memory[region] / _GB:.1f}" for region in regions]
        yield f"| {' | '.join([*cells, f'{row.seconds / bound - 1:.1%}'])} |"


def published(marks: Iterable[Mapping[str, Row]]) -> Iterator[str]:
    """The papers' ratios beside those of our own writing of their methods."""
    yield "| workload | baseline | published | here, baseline on its own ranks / inside / upfront |"
    yield "|---|---|---|---|"
    for rows in marks:
        work = rows["auto"].workload
        drawn = isinstance(rows["stage"].found.costs.seconds["vision", Kind.F], tuple)
        methods = next(x for name, x in _METHODS.items() if work.name.startswith(name))
        ours = min(rows[method].seconds for method in methods)
        for base, (low, high) in work.published.items():
            bases = ("stage", "inside") if base == "stage" else (base,)
            found = " / ".join(f"{rows[x].seconds / ours:.2f}" for x in bases)
            name = f"{work.name}{', drawn' if drawn else ''}"
            claim = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
            yield f"| {name} | {base} | {claim} | {found} |"


def notes(workloads: Sequence[Workload]) -> Iterator[str]:
    """What is assumed, and where sizes are from; the sum of gradients over side-by-side pipes."""
    for work in workloads:
        sizes = "; ".join(f"{model.name}: {model.source}" for model in work.models.values())
        chip = f"{work.chip.name}: {work.chip.source}"
        yield f"{work.name}: assumed: {work.assumed}. {sizes}. {chip}."
        if work.replicas > 1:
            yield (
                f"  the gradients' sum over {work.replicas} pipelines, a ring over the same links, "
                f"would add {work.gradient_seconds:.3f} s to the end of each of these steps"
            )


def batch_sweep(workload: Workload, effort: float) -> tuple[list[str], bool]:
    """Peak activations of all regions on a rank while the batch grows eightfold."""
    counts = [workload.ranks * times for times in (4, 8, 16, 32)]
    text = [f"| {workload.name}: GB on a rank | {' | '.join(f'M = {count}' for count in counts)} |"]
    text += ["|---" * (1 + len(counts)) + "|"]
    flat = True
    for name in _SWEPT:
        peaks = []
        for count in counts:
            row = simulated(with_microbatches(workload, count), BY_NAME[name], effort=effort)
            timeline = row.found.timeline
            peaks.append(max(map(timeline.peak_bytes, range(workload.ranks))))
        flat &= name == "upfront" or peaks[-1] <= _FLAT * peaks[0]
        text.append(f"| {name} | {' | '.join(f'{peak / _GB:.1f}' for peak in peaks)} |")
    text.append(f"flat within 2 %, but upfront: {'PASS' if flat else 'FAIL'}")
    return text, flat
