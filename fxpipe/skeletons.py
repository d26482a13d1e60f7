"""Base schedules: for each station of a pipeline, the order of its microbatches' two phases.

A skeleton is a function (station, stations, microbatches, lead) -> phases, and knows no stages. A
phase (Kind.F, 3) is the forward of microbatch 3, (Kind.B, 3) its whole backward. `lead` is how many
more microbatches than the last station needs are in flight, where a backward waits for a group.
"""

from collections.abc import Callable

from fxpipe.cut import Kind

Phase = tuple[Kind, int]
Skeleton = Callable[[int, int, int, int], tuple[Phase, ...]]


def gpipe(station: int, stations: int, microbatches: int, lead: int = 0) -> tuple[Phase, ...]:
    """All forwards, then all backwards: `F0 F1 F2 B0 B1 B2` on every station."""
    return tuple((kind, mb) for kind in (Kind.F, Kind.B) for mb in range(microbatches))


def one_f_one_b(station: int, stations: int, microbatches: int, lead: int = 0) -> tuple[Phase, ...]:
    """1F1B: warmup, then a backward for each forward: `F0 F1 B0 F2 B1 B2` on station 0 of 2.

    Holds at most stations - station + lead microbatches.
    """
    warmup = min(microbatches, stations - station + lead)
    phases: list[Phase] = [(Kind.F, mb) for mb in range(warmup)]
    for mb in range(microbatches):
        phases.append((Kind.B, mb))
        if mb + warmup < microbatches:
            phases.append((Kind.F, mb + warmup))
    return tuple(phases)


BASES: dict[str, Skeleton] = {"gpipe": gpipe, "1f1b": one_f_one_b}
