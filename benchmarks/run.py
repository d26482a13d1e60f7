"""Every benchmark that has bars, one after the other.

    python -m benchmarks.run --quick            # small versions of all, in a few minutes
    python -m benchmarks.run [--only seeds,headroom]

Exit code 1 when any of them misses a bar, ends in an error, or takes too long; says which.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

# What each is called with beside --quick, and in its place.
SUITE: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "seeds": (("--quick",), ("--emulate",)),
    "predicted": (("--quick",), ()),
    "ablations": (("--quick",), ("--emulate",)),
    "headroom": (("--quick",), ()),
    "real": (("--quick",), ("--inductor",)),
    "memory": ((), ()),
    "memory_growth": (("--quick",), ()),
    "loss_parity": (("--quick",), ()),
    "scale": (("--quick",), ()),
    "sweep": (("--quick",), ()),
    "overhead": (("--ms", "10", "--rounds", "1"), ()),
}
# Their bars hold on an idle machine only; a quick run shows the figures and forgives a miss.
IDLE = ("overhead", "real")
_QUICK, _FULL = 300.0, 7200.0  # seconds of one


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small versions")
    parser.add_argument("--only", help=f"some of {','.join(SUITE)}")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(SUITE)
    missed = []
    for name in names:
        begun = time.monotonic()
        reached = run(name, quick=given.quick)
        verdict = "PASS" if reached else "FAIL"
        print(f"== {name}: {verdict} ({time.monotonic() - begun:.0f} s)", flush=True)
        if not reached and not (given.quick and name in IDLE):
            missed.append(name)
    print(f"missed a bar: {', '.join(missed)}" if missed else "every bar is reached")
    return int(bool(missed))


def run(name: str, *, quick: bool) -> bool:
    """Whether a benchmark reaches its bars."""
    print(f"== {name}", flush=True)
    words = [sys.executable, "-m", f"benchmarks.{name}", *SUITE[name][0 if quick else 1]]
    try:
        return not subprocess.run(words, timeout=_QUICK if quick else _FULL).returncode
    except subprocess.TimeoutExpired:
        print(f"{name} did not end in time")
        return False


if __name__ == "__main__":
    sys.exit(main())
