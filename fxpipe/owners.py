"""Owner maps: which rank runs each microbatch of a replicated region.

round_robin    microbatch m on rank m mod P: equal counts, whatever it costs
slack          the first P one to a rank; then the rank that has filled the least of its slack
balanced       dearest microbatch first, each to the rank with the least work so far

slack is where the idle time of a pipeline is: a rank waits before its first forward, and after its
last backward (Mpipe, arXiv 2607.03229, section 4.3). What does not fit any more goes where it
spills least.
"""

from collections.abc import Mapping, Sequence

from fxpipe.errors import ScheduleError

MAPS = ("round_robin", "slack", "balanced")
_FULL = 1 + 1e-9


def round_robin(ranks: int, microbatches: int) -> tuple[int, ...]:
    """`0 1 2 0 1 2`."""
    return tuple(mb % ranks for mb in range(microbatches))


def slack(
    seconds: Sequence[float], idle: Sequence[float], *, backward: bool = False
) -> tuple[int, ...]:
    """The rank of each microbatch, by seconds of each microbatch and idle seconds of each rank.

    The first P microbatches go one to a rank, in order: they are needed at once, and fill nothing.
    Each next one goes to the rank whose slack is filled least as a fraction, the lower one of
    equals; where it fits nowhere, to where it spills least. backward: of backwards that run apart
    from their forwards, the last P are the ones that come last, and fill nothing.
    """
    ranks, count = len(idle), len(seconds)
    alone = range(max(0, count - ranks), count) if backward else range(min(ranks, count))
    owners = [0] * count
    filled = [0.0] * ranks
    for at, mb in enumerate(alone):
        owners[mb] = at
    for mb in range(alone.start) if backward else range(alone.stop, count):
        need = seconds[mb]
        fits = [rank for rank in range(ranks) if 0 < need + filled[rank] <= idle[rank] * _FULL]
        if fits:
            owners[mb] = min(fits, key=lambda rank: (filled[rank] / idle[rank], rank))
        else:
            owners[mb] = min(range(ranks), key=lambda rank: (filled[rank] - idle[rank], rank))
        filled[owners[mb]] += need
    return tuple(owners)


def balanced(seconds: Sequence[float], ranks: int) -> tuple[int, ...]:
    """Longest processing time first."""
    owners = [0] * len(seconds)
    work = [0.0] * ranks
    for mb in sorted(range(len(seconds)), key=lambda mb: (-seconds[mb], mb)):
        owners[mb] = min(range(ranks), key=lambda rank: (work[rank], rank))
        work[owners[mb]] += seconds[mb]
    return tuple(owners)


def owners_of(
    rule: str | Sequence[int] | None, seconds: Sequence[float], idle: Sequence[float]
) -> tuple[int, ...]:
    """The owners by the name of a map, or as they are given. Raises ScheduleError."""
    ranks, microbatches = len(idle), len(seconds)
    match rule:
        case "round_robin":
            return round_robin(ranks, microbatches)
        case "slack":
            return slack(seconds, idle)
        case "balanced":
            return balanced(seconds, ranks)
        case str() | None:
            raise _unknown(rule)
    if len(rule) != microbatches or not all(0 <= rank < ranks for rank in rule):
        raise ScheduleError(
            f"owners {tuple(rule)}: expected a rank of 0..{ranks - 1} for each of {microbatches} "
            "microbatches"
        )
    return tuple(rule)


def check_named(rule: str | Sequence[int] | None) -> None:
    """Raises ScheduleError for the name of a map that is not there."""
    if isinstance(rule, str) and rule not in MAPS:
        raise _unknown(rule)


def _unknown(rule: str | None) -> ScheduleError:
    return ScheduleError(f"owner map {rule!r} is unknown; there are {', '.join(MAPS)}")


Given = str | Sequence[int] | Mapping[str, str | Sequence[int]] | None


def of_region(given: Given, region: str) -> str | Sequence[int] | None:
    """What was given for a region: one rule for all regions, or one for each."""
    return given.get(region) if isinstance(given, Mapping) else given
