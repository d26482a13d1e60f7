"""Reordering: a renaming that keeps every rule, and orders that shorten the step."""

from functools import cache, partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe import passes
from fxpipe.costs import Costs
from fxpipe.cut import Kind
from fxpipe.errors import ScheduleError
from fxpipe.passes.reorder import POLICIES, best_order, order_by, reorder
from fxpipe.schedule import derive
from fxpipe.simulate import simulate
from fxpipe.table import Op, Table
from fxpipe.verify import verify
from tests.pure.cuts import Shape, build, shapes

ONE = Shape(encoders=(True,))


@cache
def table(schedule: str, ranks: int, microbatches: int, shape: Shape = ONE) -> Table:
    """The verified table; a replicated microbatch m is owned by rank m mod P."""
    cut, owners = build(schedule, ranks, shape), None
    if schedule.startswith("nested"):
        owners = "round_robin"
    return passes.run(derive(cut, microbatches, schedule, owners=owners))


@settings(max_examples=30, deadline=None)
@given(shapes(), st.integers(1, 4), st.permutations(range(6)))
def test_a_reordered_table_keeps_every_rule(shape: Shape, ranks: int, order: list[int]) -> None:
    plain = table("upfront/1f1b", ranks, 6, shape)
    moved = reorder(plain, order)
    verify(moved)
    back = reorder(moved, [order.index(mb) for mb in range(6)])
    assert back.rows == plain.rows
    assert simulate(moved).end == simulate(plain).end


def test_text_before_and_after() -> None:
    plain = table("upfront/1f1b", 1, 3, Shape())
    row = "rank 0: llm0.F2 llm0.W2 llm0.F0 llm0.W0 llm0.F1 llm0.W1"
    assert str(reorder(plain, (2, 0, 1))).splitlines()[-1] == row
    assert reorder(plain, (0, 1, 2)) == plain


def test_a_pass_among_others() -> None:
    cut = build("upfront/1f1b", 3, ONE)
    steps = (partial(reorder, order=(3, 1, 0, 2)), *passes.DEFAULT)
    moved = passes.run(derive(cut, 4, "upfront/1f1b"), steps)
    verify(moved)
    assert moved.only(["llm"])[0][0] == Op("llm0", Kind.F, 3)


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (1, 2, 3)])
def test_what_is_no_permutation_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match=r"no permutation of the microbatches 0\.\.2"):
        reorder(table("stage/1f1b", 1, 3), order)


def test_policies() -> None:
    sizes = (0, 0, 0, 9, 9, 9)
    assert order_by(sizes, "heavy-first") == (3, 4, 5, 0, 1, 2)
    assert order_by(sizes, "heavy-last") == (0, 1, 2, 3, 4, 5)
    assert order_by(sizes, "smooth") == (0, 3, 1, 4, 2, 5)
    with pytest.raises(ScheduleError, match="there are heavy-first, heavy-last, waves, smooth"):
        order_by(sizes, "random")
    assert order_by((), "smooth") == ()
    assert order_by((1, 2, 3, 4, 5), "waves", ranks=2) == (4, 3, 1, 2, 0)


@given(st.lists(st.floats(0, 100), max_size=24), st.integers(1, 8))
def test_a_policy_gives_a_permutation(sizes: list[float], ranks: int) -> None:
    for policy in POLICIES:
        assert sorted(order_by(sizes, policy, ranks)) == list(range(len(sizes)))


LAST = [0.0] * 12 + [4.0] * 4
ONE_OWNER = [4.0 * (mb % 4 == 0) for mb in range(16)]


@pytest.mark.parametrize(
    ("schedule", "images", "gain"),
    [
        ("stage/1f1b", LAST, 1.15),
        ("stage/1f1b", ONE_OWNER, 1.05),
        ("upfront/1f1b", ONE_OWNER, 1.5),
        ("nested/1f1b", ONE_OWNER, 1.2),
        ("nested/1f1b", LAST, 1.0),  # they are one wave already
    ],
)
def test_a_bad_order_is_mended(schedule: str, images: list[float], gain: float) -> None:
    """A quarter of the microbatches has all the images; they come last, or have one owner."""
    plain = table(schedule, 4, len(images))
    costs = Costs.uniform(plain.cut).scaled(plain.cut, {"enc0": tuple(images)})
    best = reorder(plain, best_order(plain, costs, images))
    assert simulate(plain, costs).end >= gain * simulate(best, costs).end


@pytest.mark.parametrize(
    ("schedule", "policy", "gain"),
    [("nested/1f1b", "waves", 1.05), ("upfront/1f1b", "smooth", 1.02), ("stage/1f1b", "smooth", 1)],
)
def test_policies_on_uneven_images(schedule: str, policy: str, gain: float) -> None:
    """The median over log-normal numbers of images."""
    plain, gains = table(schedule, 4, 24), []
    for seed in range(11):
        random = Random(seed)
        images = [random.lognormvariate(0, 1) for _ in range(24)]
        costs = Costs.uniform(plain.cut).scaled(plain.cut, {"enc0": tuple(images)})
        moved = reorder(plain, order_by(images, policy, 4))
        gains.append(simulate(plain, costs).end / simulate(moved, costs).end)
    assert sorted(gains)[5] >= gain
