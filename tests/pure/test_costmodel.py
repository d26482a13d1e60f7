"""What encoders cost: numbers against simulations, and closed forms against both."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import sympy

from fxpipe import formulas
from fxpipe.costmodel import (
    Hiding,
    encoder_work,
    hidden_share,
    lower_bound,
    measured,
    observed,
    predicted,
    spill,
    warmup_slack,
)
from fxpipe.costs import Costs
from fxpipe.cut import Cut, Kind
from fxpipe.errors import ScheduleError
from fxpipe.formulas import Head, threshold
from fxpipe.schedule import derive
from fxpipe.simulate import simulate
from fxpipe.table import Op, Table
from tests.pure.cuts import Shape, build

OPTIMA = Path(__file__).parents[3] / "shared" / "reference" / "schedule_optima.json"
FROZEN = Shape(encoders=(False,))
TRAINED = Shape(encoders=(True,))


def costs_of(cut: Cut, encoder: float, latency: float = 0.0) -> Costs:
    numbers = {"enc0": (encoder, 2 * encoder), "llm": (1, 1, 1)}
    return Costs.of_regions(cut, numbers, latency=latency)


def upfront(ranks: int, mbs: int, shape: Shape, base: str = "gpipe") -> Table:
    return derive(build("upfront/gpipe", ranks, shape), mbs, f"upfront/{base}")


def test_work_and_slack_of_each_rank() -> None:
    table = upfront(3, 7, TRAINED)
    costs = costs_of(table.cut, 2.0, latency=0.25)
    assert encoder_work(table, costs) == (6, 4, 4)
    assert warmup_slack(table, costs) == (0, 1.25, 2.5)
    found = predicted(table, costs)
    assert found.spill == (6, 2.75, 1.5)
    assert found.pays == 6
    assert found.hidden_share == pytest.approx(3.75 / 14)
    assert (spill((1, 5), (2, 3)), hidden_share((), ())) == ((0, 2), 1)


def test_only_what_runs_before_the_pipeline_is_at_its_head() -> None:
    table = derive(build("nested/1f1b", 2, TRAINED), 8, "nested/1f1b")
    costs = costs_of(table.cut, 1.0)
    whole, head = (encoder_work(table, costs, head=only) for only in (False, True))
    assert whole == (4, 4)
    assert all(0 < some < every for some, every in zip(head, whole, strict=True))


def test_uneven_microbatches_count_where_they_are_owned() -> None:
    table = upfront(2, 4, TRAINED)
    costs = costs_of(table.cut, 1.0).scaled(table.cut, {"enc0": (40, 0, 1, 2)})
    assert encoder_work(table, costs) == (41, 2)


@pytest.mark.parametrize(("ranks", "mbs"), [(1, 1), (2, 5), (3, 3), (4, 8)])
def test_the_step_pays_the_greatest_spill(ranks: int, mbs: int) -> None:
    """A frozen encoder under round robin: the makespan is the backbone's and what is not hidden."""
    table = upfront(ranks, mbs, FROZEN)
    costs = costs_of(table.cut, 0.75, latency=0.5 * (ranks > 1))
    free = costs_of(table.cut, 0.0, costs.latency)
    late = simulate(table, costs).makespan - simulate(table, free).makespan
    # The encoder's outputs cross to rank 0 while it runs its own, but for the last one's latency.
    assert late <= predicted(table, costs).pays + 1e-9
    assert late >= predicted(table, costs).pays - costs.latency


def test_a_real_step_is_set_beside_its_forecast() -> None:
    table = upfront(2, 4, TRAINED)
    costs = costs_of(table.cut, 1.0)
    double = replace(costs, seconds={key: 2 * float(x) for key, x in costs.seconds.items()})
    step = replace(simulate(table, double), costs=None)
    assert observed(step).compute(Op("llm0", Kind.F, 3)) == 2
    found = measured(table, step)
    assert (found.work, found.slack) == ((4, 4), (0, 2))
    assert found.bubble == predicted(table, costs).bubble
    lines = Hiding((2, 2), (0, 1), (0.25, 0.125)).beside(found).splitlines()
    assert lines[0].split() == [
        *("rank", "E", "measured", "w", "measured", "spill", "measured", "bubble", "measured"),
    ]
    assert lines[2].split()[:7] == ["1", "2", "4", "1", "2", "1", "2"]


def test_the_bound_is_work_or_the_longest_chain() -> None:
    cut = build("nested/1f1b", 2, Shape(encoders=(True,), generators=(True,)))
    numbers = {"enc0": (1, 2), "llm": (1, 1, 1), "gen0": (1, 2)}
    costs = Costs.of_regions(cut, numbers)
    assert lower_bound(cut, costs, 8) == 8 * (3 + 6 + 3) / 2
    # enc F, llm F F, gen F B, llm B B, enc W; the generator's W is beside it.
    assert lower_bound(cut, costs, 1) == 1 + 2 + 1 + 1 + 2 + 2
    slow = replace(costs, latency=0.5)
    assert lower_bound(cut, slow, 1) == 10, "two of the transfers cannot be saved by any owner"
    late = replace(costs, seconds={**costs.seconds, ("enc0", Kind.R): 4})
    assert lower_bound(cut, late, 1) == 13
    uneven = costs.scaled(cut, {"enc0": (1, 9)})
    assert lower_bound(cut, uneven, 2) == 9 * 3 + 6
    assert lower_bound(cut, uneven, 9) == (9 * 9 + 5 * 3 + 4 * 27) / 2


@pytest.mark.skipif(not OPTIMA.exists(), reason="the reference instances are not here")
def test_the_bound_is_that_of_the_reference_instances() -> None:
    for case in json.loads(OPTIMA.read_text(encoding="utf-8"))["instances"]:
        encoder, generator = case["encoder_forward"], case["generator_forward"]
        shape = Shape(encoders=(True,) * (encoder > 0), generators=(True,) * (generator > 0))
        cut = build("nested/1f1b", case["ranks"], shape)
        numbers = {"enc0": (encoder, 2 * encoder), "gen0": (generator, 2 * generator)}
        costs = Costs.of_regions(cut, {**numbers, "llm": (1, 1, 1)})
        assert lower_bound(cut, costs, case["microbatches"]) == case["work_or_path_bound"]


@pytest.mark.parametrize(("ranks", "mbs"), list(product((1, 2, 4), (1, 4, 7))))
def test_round_robin_in_closed_form(ranks: int, mbs: int) -> None:
    """E, w, spill, share, makespan and bubble are those of the table."""
    table = upfront(ranks, mbs, TRAINED)
    costs = costs_of(table.cut, 0.5)
    found, timeline = predicted(table, costs), simulate(table, costs)
    head = Head(0.5, 1, 0, ranks, mbs)
    tail = Head(1.0, 1, 0, ranks, mbs)
    for rank in range(ranks):
        assert float(head.work(rank)) == found.work[rank]
        assert float(head.slack(rank)) == found.slack[rank]
        assert float(head.spill(rank)) == found.spill[rank]
    assert float(head.pays) == found.pays
    assert float(head.hidden_share) == pytest.approx(found.hidden_share)
    assert float(head.makespan(1, 1, tail)) == pytest.approx(timeline.makespan)
    for rank in range(ranks):
        assert float(head.bubble(rank, 1, 1, tail)) == pytest.approx(timeline.bubble(rank))


@pytest.mark.parametrize(("ranks", "mbs", "encoder"), list(product((1, 2, 5), (3, 8), (0.25, 4))))
def test_slack_owners_in_closed_form(ranks: int, mbs: int, encoder: float) -> None:
    """All work is given out, what is idle is filled first, and owners that are whole microbatches
    come within one encoder forward of it."""
    head = Head(encoder, 1, 0, ranks, mbs, owners="slack")
    every = range(ranks)
    assert float(sum(head.work(rank) for rank in every)) == pytest.approx(mbs * encoder)
    for rank in every:
        assert float(head.spill(rank)) == pytest.approx(
            max(0.0, float(head.work(rank) - head.slack(rank))), abs=1e-12
        )
    share = sum(min(float(head.work(r)), float(head.slack(r))) for r in every) / (mbs * encoder)
    assert float(head.hidden_share) == pytest.approx(share)
    load = [0.0] * ranks
    for _ in range(mbs):
        load[min(every, key=lambda rank: load[rank] - rank)] += encoder
    pays = max(load[rank] - rank for rank in every)
    assert float(head.pays) - 1e-9 <= max(pays, 0.0) <= float(head.pays) + encoder


def test_what_owners_can_be_is_said() -> None:
    with pytest.raises(ScheduleError, match="owners 'best' is unknown"):
        Head(1, 1, owners="best")


def llava() -> Head:
    """A vision tower of 24 layers before a pipeline, in symbols."""
    encoder = 24 * formulas.layer_seconds(formulas.patches, 1024, formulas.images)
    stage = (
        formulas.layers / formulas.ranks * formulas.layer_seconds(formulas.tokens, formulas.hidden)
    )
    hop = formulas.transfer(2 * formulas.tokens * formulas.hidden)
    return Head(encoder, stage, hop, owners="slack")


def test_how_many_patches_cost_nothing() -> None:
    """In closed form, with every other size a symbol; the same number by bisection."""
    free = sympy.Le(llava().pays, 0)
    found = threshold(free, formulas.patches)
    assert formulas.patches not in found.free_symbols
    numbers = {
        formulas.hidden: 4096,
        formulas.tokens: 4096,
        formulas.images: 2,
        formulas.layers: 32,
        formulas.ranks: 8,
        formulas.microbatches: 16,
        formulas.peak_flops: 4e14,
        formulas.bandwidth: 2e12,
        formulas.alpha: 1e-5,
        formulas.beta: 1e-11,
    }
    known = {symbol: sympy.sympify(number) for symbol, number in numbers.items()}
    most = int(found.xreplace(known))
    condition = free.xreplace(known)
    assert threshold(condition, formulas.patches) == most > 100
    assert condition.xreplace({formulas.patches: sympy.Integer(most)}) == sympy.true
    assert condition.xreplace({formulas.patches: sympy.Integer(most + 1)}) == sympy.false


def test_thresholds() -> None:
    x, a, n = sympy.Symbol("x"), sympy.Symbol("a", positive=True), sympy.Symbol("n", integer=True)
    assert threshold(sympy.Le(a * x, 6), x) == 6 / a
    assert threshold(sympy.Ge(6, a * x + 1), x) == 5 / a
    assert threshold(sympy.Le(x**2 + x, 6), x) == 2
    assert threshold(sympy.Le(2 * n, 5), n) == 2
    assert threshold(sympy.Le(sympy.Max(2 * x, x + 3) + 1, 10), x) == sympy.Rational(9, 2)
    assert threshold(sympy.Le(x, sympy.Max(3, a)), x) == sympy.Max(3, a)
    assert threshold(sympy.Le(sympy.Min(2 * x, x + 3), 10), x) == 7
    assert threshold(sympy.Le(3 * x - sympy.Min(2 * x, 8), 10), x) == 6
    assert threshold(sympy.Le(sympy.exp(x), 5), x) == pytest.approx(1.6094379, abs=1e-6)
    assert threshold(sympy.Le(n * sympy.log(n + 1), 100), n) == 29
    assert threshold(sympy.Le(sympy.exp(-x), 5), x) == sympy.oo
    assert threshold(sympy.Le(sympy.exp(x), sympy.Rational(1, 2)), x) == -sympy.oo
    assert threshold(sympy.Le(x**2 + 1, 0), x) == -sympy.oo
    assert threshold(sympy.true, x) == sympy.oo
    assert threshold(sympy.Le(a, 3).subs(a, 2), x) == sympy.oo


def test_thresholds_that_have_no_answer() -> None:
    x, a = sympy.Symbol("x"), sympy.Symbol("a", positive=True)
    with pytest.raises(ScheduleError, match="put numbers for a first"):
        threshold(sympy.Le(sympy.exp(a * x), 5), x)
    with pytest.raises(ScheduleError, match="falls as x grows"):
        threshold(sympy.Le(-a * x, 5), x)
    with pytest.raises(ScheduleError, match="no inequality"):
        threshold(sympy.Eq(x, 5), x)
