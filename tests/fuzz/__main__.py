"""Many random models: python -m tests.fuzz --models 2000 --seed 1 --jobs 2 [--spec 'Spec(...)']

Prints every model that is not right as it is found, and at the end how many were right, refused
(by kind of message), wrong, or did not end. `--smaller` makes each wrong one as small as can be.
"""

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context

import torch

from tests.fuzz import spec as specs_module
from tests.fuzz.draw import drawn
from tests.fuzz.judge import CRASH, HANG, INVALID, RIGHT, WRONG, Verdict, judge
from tests.fuzz.spec import Spec, smaller

BAD = (WRONG, CRASH, HANG)


def smallest(spec: Spec, verdict: Verdict) -> Spec:
    """The smallest spec with the same kind of verdict that single steps lead to."""
    for other in smaller(spec):
        assert isinstance(other, Spec)
        found = judge(other)
        if found.kind == verdict.kind and found.about[:40] == verdict.about[:40]:
            return smallest(other, verdict)
    return spec


def _judged(models: int, start: int, jobs: int) -> Iterator[tuple[Spec, Verdict]]:
    """Each spec with its verdict, in order; in so many processes."""
    numbers = range(start * 1_000_000, start * 1_000_000 + models)
    if jobs == 1:
        yield from map(_judge, numbers)
    else:
        with get_context("spawn").Pool(jobs, _quiet, maxtasksperchild=200) as pool:
            yield from pool.imap(_judge, numbers)


def _judge(number: int) -> tuple[Spec, Verdict]:
    spec = drawn(number)
    return spec, judge(spec)


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def hunt(models: int, start: int, shrink: bool, jobs: int = 1) -> Counter[tuple[str, str]]:
    """Judge random models; what is found, by kind."""
    counts: Counter[tuple[str, str]] = Counter()
    begun = time.perf_counter()

    for number, (spec, verdict) in enumerate(_judged(models, start, jobs)):
        key = verdict.kind, verdict.about
        counts[key] += 1
        if verdict.kind not in (RIGHT, INVALID) and (counts[key] <= 2 or verdict.kind in BAD):
            print(f"{number} {verdict.kind}: {verdict.text[:600]}\n    {spec}", flush=True)
            if shrink and verdict.kind in BAD and counts[key] == 1:
                print(f"    smallest: {smallest(spec, verdict)}", flush=True)
        if number % 50 == 49:
            print(f"-- {number + 1} models, {time.perf_counter() - begun:.0f} s", flush=True)
    return counts


def report(counts: Counter[tuple[str, str]]) -> str:
    """Counts and shares; shares are of the models that eager runs."""
    valid = sum(n for (kind, _), n in counts.items() if kind != INVALID)
    lines = [f"{valid} models, and {sum(counts.values()) - valid} that eager does not run"]
    for (kind, about), number in sorted(counts.items(), key=lambda item: -item[1]):
        share = "" if kind == INVALID else f" ({100 * number / max(valid, 1):.1f} %)"
        lines.append(f"{number:6} {kind}{share} {about}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--smaller", action="store_true")
    parser.add_argument("--spec", help="judge this one model")
    args = parser.parse_args()
    _quiet()
    if args.spec:
        spec = eval(args.spec, vars(specs_module))
        verdict = judge(spec)
        print(verdict)
        if args.smaller:
            print(smallest(spec, verdict))
        return
    print(report(hunt(args.models, args.seed, args.smaller, args.jobs)))


if __name__ == "__main__":
    main()
