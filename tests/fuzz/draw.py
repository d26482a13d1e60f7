"""Random specs, as strategies of hypothesis: what comes first of each choice is the simplest."""

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fxpipe.schedule import AUTO, PLACEMENTS, Schedule
from fxpipe.skeletons import PATTERNS, base
from tests.fuzz import ops_modules, ops_state  # noqa: F401
from tests.fuzz.ops import OPS
from tests.fuzz.spec import Encoder, Generator, Microbatch, Run, Spec

NAMES = st.sampled_from(list(OPS))
WEIGHTED = st.sampled_from(
    [name for name, op in OPS.items() if op.parts and not name.startswith(("save", "own", "un"))]
)
# As in any model, a block has weights.
BLOCK = st.builds(
    lambda one, more, at: (*more[:at], one, *more[at:]),
    WEIGHTED,
    st.lists(NAMES, max_size=1).map(tuple),
    st.integers(0, 1),
)
LOOSE = st.lists(NAMES, max_size=1).map(tuple)


@st.composite
def _blocks(draw: st.DrawFn, least: int, most: int) -> tuple[tuple[str, ...], ...]:
    """All blocks alike, as in most models, or alternating, or each its own."""
    count = draw(st.integers(least, most))
    kinds = draw(st.lists(BLOCK, min_size=1, max_size=draw(st.sampled_from([1, 1, 2, count]))))
    return tuple(kinds[i % len(kinds)] for i in range(count))


JOINS = ["add", "cat", "scatter", "cross", "deep", "detached"]
ENCODER = st.builds(Encoder, _blocks(1, 2), st.sampled_from(JOINS), st.booleans())
GENERATOR = st.builds(
    Generator, _blocks(1, 2), st.sampled_from(["mean", "last", "scores", "detached"]), st.booleans()
)


@st.composite
def _run(draw: st.DrawFn, blocks: int) -> Run:
    placement = draw(st.sampled_from(PLACEMENTS))
    name = draw(st.sampled_from(["1f1b", *PATTERNS, AUTO]))
    schedule = "auto" if name == AUTO else f"{placement}/{name}"
    chunks = 1 if name == AUTO else base(Schedule.parse(schedule).base).default_chunks
    ranks = draw(st.integers(1, max(1, min(4, blocks // chunks))))
    recompute = draw(st.sampled_from([0, 0, 0, 1, 2, 3, 7]))
    return Run(schedule, ranks, recompute, draw(st.booleans()), draw(st.booleans()))


@st.composite
def _microbatches(draw: st.DrawFn) -> tuple[Microbatch, ...]:
    """Mostly of one or two kinds: each other relation of sizes may be a trace."""
    kinds = draw(
        st.lists(
            st.builds(
                Microbatch,
                st.integers(1, 3),
                st.integers(1, 4),
                st.sampled_from([2, 1, 3, 0]),
                st.sampled_from([True, True, True, False]),
                st.sampled_from([0.5, 0.5, 0.5, 2.0]),
                st.sampled_from([False, False, False, True]),
            ),
            min_size=1,
            max_size=draw(st.sampled_from([1, 2, 2, 3])),
        )
    )
    return tuple(draw(st.sampled_from(kinds)) for _ in range(draw(st.integers(1, 5))))


PARTS = ["backbone", "encoder0", "encoder1", "generator0", "embed", "head", "backbone.0", "shared"]


@st.composite
def specs(draw: st.DrawFn, small: bool = False) -> Spec:
    """Any model; a small one has at most one encoder, one generator and two backbone blocks."""
    blocks = draw(_blocks(1, 2 if small else 4))
    encoders = draw(st.lists(ENCODER, max_size=1 if small else 2))
    generators = draw(st.lists(GENERATOR, max_size=1 if small else 2))
    counts = {"encoder": len(encoders), "generator": len(generators)}
    frozen = [
        name
        for name in draw(st.lists(st.sampled_from(PARTS), max_size=2, unique=True))
        if name[-1] not in "01" or "." in name or int(name[-1]) < counts.get(name[:-1], 0)
    ]
    return Spec(
        blocks,
        tuple(encoders),
        tuple(generators),
        draw(LOOSE),
        draw(LOOSE),
        (
            draw(st.sampled_from(LOSSES)),
            *draw(st.lists(st.sampled_from([*LOSSES, "weights"]), max_size=1)),
        ),
        draw(st.sampled_from(["sum", "weighted", "product", "root", "mean", "largest"])),
        draw(st.sampled_from(["tensor", "object", "dict"])),
        draw(st.booleans()),
        draw(st.sampled_from([0, 0, 0, 1])),
        tuple(frozen),
        draw(st.integers(0, 2)),
        draw(st.sampled_from(["flat", "list", "dict", "absent", "strided"])),
        draw(st.sampled_from([False, False, False, True])),
        draw(_microbatches()),
        tuple(draw(st.lists(_run(len(blocks)), min_size=1, max_size=2))),
    )


LOSSES = ["ce", "squares", "counted", "ignore"]


def drawn(number: int, small: bool = False) -> Spec:
    """The random spec of a number. Of two examples the first is always the simplest there is."""
    found: list[Spec] = []

    @seed(number)
    @settings(
        max_examples=2,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(specs(small))
    def note(spec: Spec) -> None:
        found.append(spec)

    note()
    return found[-1]
