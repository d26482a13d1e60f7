"""Base schedules by name: homes of the stages of a pipeline, and the order of every rank.

    base("ZBVZeroBubble")                           zb-v: names of ours and of torch, in any case
    homes(base("zb-v"), 2)                          (0, 1, 1, 0): the rank of each stage, in order
    pattern_rows(base("1f1b"), (0, 1), 2)[1]        F B W of stage 1, microbatch 0, then of 1

A base knows how many stages there are, and nothing else of a cut.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fxpipe.bases import Place, Step, breadth_first, dualpipe_v, one_f_one_b, zb_v, zero_bubble
from fxpipe.cut import Kind
from fxpipe.errors import ScheduleError

Pattern = tuple[tuple[Kind, int, int], ...]  # kind, stage, microbatch


@dataclass(frozen=True)
class Base:
    """How a pipeline of sharded stages is laid out and run.

    torch: the name of the same schedule in torch.distributed.pipelining, if it has one.
    order: the steps of a rank (see `bases`). chunks: stages per rank; None is any number.
    shape: the stages go round all ranks again and again (loop), or there and back (v).
    splits: weight gradients (W) may stand apart from the gradients of the inputs (B).
    """

    name: str
    torch: str | None
    order: Callable[[Place], Iterator[Step]]
    chunks: int | None = 1
    default_chunks: int = 1
    shape: Literal["loop", "v"] = "loop"
    splits: bool = False

    def __str__(self) -> str:
        return self.name


_ALL = (
    Base("gpipe", "GPipe", breadth_first),
    Base("looped-bfs", "LoopedBFS", breadth_first, None, 2),
    Base("1f1b", "1F1B", one_f_one_b),
    Base("interleaved", "Interleaved1F1B", one_f_one_b, None, 2),
    Base("zb-h1", None, zero_bubble, splits=True),
    Base("interleaved-zb", "InterleavedZeroBubble", zero_bubble, None, 2, splits=True),
    Base("zb-v", "ZBVZeroBubble", zb_v, 2, 2, "v", splits=True),
    Base("dualpipe-v", "DualPipeV", dualpipe_v, 2, 2, "v", splits=True),
)
PATTERNS: dict[str, Base] = {base.name: base for base in _ALL}
_KNOWN = PATTERNS | {base.torch.lower(): base for base in _ALL if base.torch}


def base(name: str) -> Base:
    """The base of this name, ours or torch's, in any case. Raises ScheduleError."""
    found = _KNOWN.get(name.strip().lower())
    if found is None:
        raise ScheduleError(
            f"base schedule {name!r} is unknown; expected one of {', '.join(PATTERNS)}, or torch's "
            f"name of one: {', '.join(x.torch for x in _ALL if x.torch)}"
        )
    return found


def homes(base: Base, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """The rank of each stage: `0 1 2 0 1 2` in a loop, `0 1 2 2 1 0` in a v. Raises ScheduleError.

    chunks: stages per rank; what the base needs, or else its default, if None.
    """
    count = base.default_chunks if chunks is None else chunks
    if ranks < 1 or count < 1 or base.chunks not in (None, count):
        instead = "" if base.chunks is None else "; interleaved takes any number"
        raise ScheduleError(
            f"{base.name} on {ranks} ranks with chunks={count}, that many stages on each; expected "
            f"at least one rank and {base.chunks or 'at least 1'} on each{instead}"
        )
    return _laid(base, range(ranks), count)


def _laid(base: Base, ranks: Sequence[int], chunks: int) -> tuple[int, ...]:
    turned = base.shape == "v"
    return tuple(
        rank for chunk in range(chunks) for rank in ranks[:: -1 if turned and chunk % 2 else 1]
    )


def pattern_rows(
    base: Base, homes: Sequence[int], microbatches: int, lead: int = 0
) -> tuple[Pattern, ...]:
    """For each rank up to the last one that holds a stage, its steps. Raises ScheduleError.

    Every stage has F, B and W of every microbatch, and W directly follows B if the base does not
    split. lead: how many more microbatches are in flight, so that gradients may come back from
    behind the last stage for groups of lead + 1 microbatches.
    """
    ranks = tuple(dict.fromkeys(homes))
    _check(base, homes, ranks, microbatches, lead)
    chunks = len(homes) // len(ranks)
    rows: list[Pattern] = [()] * (max(ranks) + 1)
    for index, rank in enumerate(ranks):
        stages = [stage for stage, home in enumerate(homes) if home == rank]
        steps = base.order(Place(index, len(ranks), chunks, microbatches, lead))
        rows[rank] = tuple(_number(steps, stages, microbatches))
    return tuple(rows)


def _check(
    base: Base, homes: Sequence[int], ranks: Sequence[int], microbatches: int, lead: int
) -> None:
    if microbatches < 1 or lead < 0:
        raise ScheduleError(
            f"{base.name} for {microbatches} microbatches, {lead} of them ahead; expected one "
            "microbatch or more, and none or more ahead"
        )
    chunks = len(homes) // max(1, len(ranks))
    if not homes or base.chunks not in (None, chunks) or _laid(base, ranks, chunks) != (*homes,):
        raise ScheduleError(
            f"{base.name} cannot run stages on ranks {', '.join(map(str, homes)) or 'none'}; it "
            f"wants {base.chunks or 'equally many'} on each rank in the shape of a {base.shape}, "
            f"as in {', '.join(map(str, _laid(base, ranks or (0, 1), base.default_chunks)))}"
        )


def _number(
    steps: Iterable[Step], stages: Sequence[int], microbatches: int
) -> Iterator[tuple[Kind, int, int]]:
    """The n-th step of a kind and chunk is for microbatch n, if there is one."""
    counts: Counter[Step] = Counter()
    for step in steps:
        mb = counts[step]
        counts[step] += 1
        if mb < microbatches:
            kind, chunk = step
            yield kind, stages[chunk], mb
