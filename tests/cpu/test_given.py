"""Tables and actions that are there already: they run, or the first difference is named."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe.actions import write_actions
from fxpipe.costs import Costs
from fxpipe.cut import Kind
from fxpipe.device import Device
from fxpipe.errors import FxpipeError, ScheduleError
from fxpipe.simulate import simulate
from fxpipe.table import Table
from tests import models
from tests.layouts import AnyOrder, any_order, laid_out


@pytest.fixture(scope="module")
def pipe() -> fxpipe.Pipe:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = models.AnyRegions([True], [True]).double()
    return fxpipe.compile(
        model, model.batch(4)[0], schedule="stage/1f1b", ranks=4, backend="local", microbatches=4
    )


@pytest.fixture
def gradients(pipe: fxpipe.Pipe) -> Iterator[list[torch.Tensor]]:
    model: Any = pipe.model
    pipe.model.zero_grad()
    for mb in model.batch(4):
        (model(**mb) / 4).backward()
    found = [parameter.grad for parameter in model.parameters()]
    pipe.model.zero_grad()
    yield found


def check(pipe: fxpipe.Pipe, gradients: list[torch.Tensor]) -> None:
    model: Any = pipe.model
    pipe.step(model.batch(4))
    for parameter, grad in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-12, atol=1e-15)


def bare(table: Table) -> Table:
    """Without transfers and reductions."""
    rows = (tuple(op for op in row if not op.way and op.kind is not Kind.R) for row in table.rows)
    return replace(table, rows=tuple(rows))


def test_a_table_its_text_and_its_file_run(
    pipe: fxpipe.Pipe, gradients: list[torch.Tensor], tmp_path: Path
) -> None:
    table = fxpipe.passes.run(any_order(pipe.cut, 4, seed=5))
    file = tmp_path / "table.txt"
    file.write_text(str(table), encoding="utf-8")
    for schedule in (table, str(table), file, str(file)):
        given = pipe.reschedule(schedule)
        assert given.table == table
        pipe.model.zero_grad()
        check(given, gradients)


def test_what_a_table_lacks_is_added(pipe: fxpipe.Pipe, gradients: list[torch.Tensor]) -> None:
    given = pipe.reschedule(str(bare(pipe.table)))
    assert any(op.way for op in given.table.rows[0])
    check(given, gradients)


def test_costs_and_names_of_values_may_differ(
    pipe: fxpipe.Pipe, gradients: list[torch.Tensor]
) -> None:
    cut = pipe.cut
    stages = tuple(replace(stage, cost=1.0) for stage in cut.stages)
    seams = tuple(replace(s, values=("h",), grads=("h",) * bool(s.grads)) for s in cut.seams)
    rough = replace(pipe.table, cut=replace(cut, stages=stages, seams=seams))
    check(pipe.reschedule(str(bare(rough))), gradients)


def test_actions_of_torch_run(
    pipe: fxpipe.Pipe, gradients: list[torch.Tensor], tmp_path: Path
) -> None:
    how = AnyOrder({"vision": 0, "generator": 1}, (0, 1, 1, 0), seed=1)
    file = tmp_path / "actions.csv"
    file.write_text(write_actions(bare(laid_out(pipe, how).table)), encoding="utf-8")
    given = pipe.reschedule(file)
    assert [stage.rank for stage in given.cut.stages] == [0, 0, 1, 1, 0, 1]
    check(given, gradients)


def test_compile_takes_ranks_and_microbatches_from_a_table(pipe: fxpipe.Pipe) -> None:
    found = fxpipe.compile(pipe.model, schedule=str(pipe.table), backend="local")
    assert (found.backend.ranks, found._steps.microbatches) == (4, 4)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("llm1 of llm: FBW", "llm1 of llm: FB", r"stage llm1 is .*: FB, .* table, and .*: FBW, "),
        ("llm1 of llm: FBW, rank 2", "llm1 of llm: FBW, rank 1", r"llm1\.F0 belongs on rank 1"),
        ("vision", "audio", r"regions audio .* this model has vision"),
        ("llm0 -> llm1: add_5*", "llm0 -> llm1: add_5", r"seam llm0 -> llm1 is without gradients"),
        ("seam vision -> llm0", "shared llm0 llm1\nseam vision -> llm0", r"shared is llm0 llm1 "),
    ],
)
def test_a_table_of_another_cut_is_refused(
    pipe: fxpipe.Pipe, old: str, new: str, message: str
) -> None:
    text = str(pipe.table)
    assert old in text
    with pytest.raises(FxpipeError, match=message):
        print(pipe.reschedule(text.replace(old, new)).table)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": ("llm",)}, "a given table decides recompute itself"),
        ({"chunks": 2, "owners": "slack"}, "a given table decides chunks, owners itself"),
        ({"ranks": 3}, "the table is for 4 ranks; there are 3"),
    ],
)
def test_options_that_a_table_decides_are_refused(
    pipe: fxpipe.Pipe, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        pipe.reschedule(str(pipe.table), **options)


def test_another_number_of_microbatches_is_refused(pipe: fxpipe.Pipe) -> None:
    model: Any = pipe.model
    with pytest.raises(ScheduleError, match="the table runs 4 microbatches; the step has 3"):
        pipe.reschedule(str(pipe.table)).step(model.batch(3))


def test_a_memory_budget_needs_auto(pipe: fxpipe.Pipe) -> None:
    with pytest.raises(ScheduleError, match="use schedule='auto', or leave memory_budget out"):
        pipe.reschedule("nested/1f1b", memory_budget=1e9)


def peak(table: Table, costs: Costs) -> float:
    timeline = simulate(table, costs)
    return max(timeline.peak_bytes(rank) for rank in range(table.cut.ranks))


def test_auto_keeps_a_memory_budget(pipe: fxpipe.Pipe, gradients: list[torch.Tensor]) -> None:
    device = Device(1e9, 1e9)
    wide = pipe.reschedule("auto", memory_budget=1e9, costs=device)
    costs = wide._variants.reckon(device)
    most = peak(wide.table, costs)
    tight = pipe.reschedule("auto", memory_budget=0.8 * most, costs=device)
    assert peak(tight.table, costs) <= 0.8 * most
    check(tight, gradients)
    with pytest.raises(ScheduleError, match="bytes"):
        _ = pipe.reschedule("auto", memory_budget=1000.0).table


def test_actions_for_too_few_stages_are_refused(pipe: fxpipe.Pipe) -> None:
    with pytest.raises(ScheduleError, match=r"stages \[0, 1\]; expected 0, 1, \.\.\. for vision"):
        pipe.reschedule("0F0,0B0\n1F0,1B0\n")
