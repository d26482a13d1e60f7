"""The options that the benchmarks on the papers' workloads have in common."""

import argparse

from benchmarks.workloads import WORKLOADS, Workload


def parser(docstring: str, usual: str) -> argparse.ArgumentParser:
    """A command line. usual: which workloads there are without --names."""
    made = argparse.ArgumentParser(description=docstring.splitlines()[0])
    made.add_argument("--quick", action="store_true", help="one workload and little effort")
    made.add_argument("--names", help=f"of workloads, as in 'Mpipe B,Mpipe A'; by default {usual}")
    made.add_argument("--effort", type=float, help="of each search; 1, or 0.1 with --quick")
    made.add_argument("--emulate", action="store_true", help="run on emulated chips as well")
    made.add_argument("--unit", type=float, default=50.0, help="ms of the shortest backbone op")
    made.add_argument("--rounds", type=int, default=3, help="of emulated steps")
    made.add_argument(
        "--fraction", type=float, default=1 / 64, help="of the transfers' bytes that travel"
    )
    return made


def given(
    made: argparse.ArgumentParser, usual: list[Workload], quick: Workload
) -> argparse.Namespace:
    """What was asked for. usual, quick: the workloads where none is named."""
    found = made.parse_args()
    found.effort = found.effort or (0.1 if found.quick else 1.0)
    known = {workload.name: workload for workload in WORKLOADS}
    names = found.names.split(",") if found.names else []
    unknown = [name for name in names if name not in known]
    if unknown:
        made.error(f"no workload is called {unknown[0]!r}; there are {', '.join(known)}")
    found.workloads = [known[name] for name in names] or ([quick] if found.quick else usual)
    return found
