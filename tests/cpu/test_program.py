"""Programs: their text, their lifetimes, what they let go of, and how long they take to emit."""

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe import passes
from fxpipe.backends import choose
from fxpipe.cut import Cut
from fxpipe.delivery import arrivals, carried
from fxpipe.program import emit
from fxpipe.runtime import run_step
from fxpipe.schedule import derive
from fxpipe.table import Op, Table
from tests import handmade

pytestmark = pytest.mark.cpu

CHAIN = """
ranks 2
region llm backbone sharded
stage llm0 of llm: FW, rank 0, cost 1
stage llm1 of llm: FBW, rank 1, cost 1
seam llm0 -> llm1: hidden*
rank 0: llm0.F0 llm0.F0>1 llm1.B0<1 llm0.W0
rank 1: llm0.F0<0 llm1.F0 llm1.B0 llm1.B0>0 llm1.W0
"""

PROGRAM = """
def forward(self, rank, mb0):
    llm0_F0 = self.llm0_F(rank, mb0, ())
    llm0_F0_llm1 = llm0_F0[0]
    llm0_F0_losses = llm0_F0[1]
    llm0_F0_kept = llm0_F0[2];  llm0_F0 = None
    llm0_F0_to1 = rank.send(1, (llm0_F0_llm1,), 'llm0.F0>1');  llm0_F0_llm1 = None
    llm1_B0_from1 = rank.post(1, mb0, 'B', (('llm0', 'llm1'),), 'llm1.B0<1')
    llm1_B0_in = rank.wait(llm1_B0_from1);  llm1_B0_from1 = None
    llm1_B0_llm0 = llm1_B0_in[0];  llm1_B0_in = None
    llm0_W0 = self.llm0_W(rank, mb0, None, llm0_F0_kept, (llm1_B0_llm0,));  \
mb0 = llm0_F0_kept = llm1_B0_llm0 = None
    llm0_F0_to1_over = rank.sent(llm0_F0_to1);  llm0_F0_to1 = llm0_F0_to1_over = None
    gradients = self.gradients(rank, (llm0_W0,), ());  rank = llm0_W0 = None
    return ({'llm0.F0': llm0_F0_losses}, gradients)
"""


def _variants(ranks: int) -> list[dict[str, Any]]:
    return [dict(handmade.stages(ranks))]


def test_a_program_reads_as_its_row() -> None:
    program = emit(Table.parse(CHAIN), 0, _variants(2), handmade.parameters(2))
    assert str(program) == PROGRAM.strip()
    assert tuple(map(str, program.table.rows[program.rank])) == (
        "llm0.F0",
        "llm0.F0>1",
        "llm1.B0<1",
        "llm0.W0",
    )


def test_receives_are_posted_ahead_only_where_asked() -> None:
    table = handmade.table(2, 4)
    code = [str(emit(table, 1, _variants(2), handmade.parameters(2), ahead=n)) for n in (0, 1)]
    posts = [[line for line in text.splitlines() if "rank.post(0" in line] for text in code]
    assert posts[0] == posts[1]
    first = [text.index("rank.post(0") for text in code]
    assert first[1] <= first[0]


def test_a_transfer_carries_every_seam_between_two_ranks() -> None:
    table = handmade.table(2, 2)
    sends = [op for op in table.rows[1] if op.way == ">" and op.stage == "vision"]
    assert [seam.target for seam in carried(table, sends[0], 1)] == ["llm0"]
    returns = next(op for op in table.rows[1] if str(op) == "llm1.B0>0")
    assert [seam.source for seam in carried(table, returns, 1)] == ["vision", "llm0"]


def test_a_send_is_over_when_its_answer_is_there() -> None:
    assert arrivals(Table.parse(CHAIN)) == ({3: (1,)}, {})


def test_sends_that_nobody_answers_wait_in_a_window() -> None:
    cut = [line.replace("FBW", "F").replace("FW", "F") for line in CHAIN.splitlines()[:-2]]
    text = "\n".join(cut).replace("hidden*", "hidden")
    table = passes.run(derive(Cut.parse(text), 64, "stage/gpipe"))
    over = arrivals(table)[0]
    assert len(over) == 64 - 12
    assert all(len(sends) == 1 and sends[0] < index for index, sends in over.items())


def test_kept_values_die_with_their_last_op() -> None:
    stages, alive = _variants(1)[0], []

    class Watched(handmade.Opaque):
        def F(self, *args: Any) -> Any:  # noqa: N802
            sent, losses, kept = super().F(*args)
            alive.append([weakref.ref(v) for v in kept if isinstance(v, Tensor)])
            held = [index for index, refs in enumerate(alive) if any(ref() for ref in refs)]
            counts.append(len(held))
            return sent, losses, kept

    counts: list[int] = []
    llm = stages["llm0"]
    stages["llm0"] = Watched(llm.stage, llm.function, llm.state, llm.trained, llm.ends)
    table, backend = handmade.table(1, 6), choose("local", 1)
    programs = {0: emit(table, 0, [stages], handmade.parameters(1))}
    step = run_step(backend, programs, handmade.batch(6), torch.float64)
    assert counts == [1] * 6
    peak = next(peak for peak in step.timeline.peaks if peak.stage == "llm0")
    assert (peak.rank, peak.units) == (0, 1)


def test_counted_units_do_not_grow_with_microbatches() -> None:
    def peaks(microbatches: int) -> dict[tuple[int, str], int]:
        step = handmade.run(choose("local", 2), microbatches)
        return {(peak.rank, peak.stage): peak.units for peak in step.timeline.peaks}

    assert peaks(8) == peaks(64)


def test_counted_units_are_those_of_the_spans() -> None:
    for schedule in ("nested/1f1b", "upfront/gpipe"):
        timeline = handmade.run(choose("local", 2), 8, schedule).timeline
        for peak in timeline.peaks:
            assert peak.units in (
                timeline.peak([peak.stage], peak.rank),
                timeline.peak([peak.stage], peak.rank) - 1,  # a unit starts when F ends
            )


def test_emission_is_linear() -> None:
    def seconds(microbatches: int) -> float:
        table, state = handmade.table(2, microbatches), handmade.parameters(2)
        start = time.process_time()
        emit(table, 0, _variants(2), state, ahead=1)
        return time.process_time() - start

    # What other tests have left in memory makes a collection slow: it is no part of emission.
    gc.collect()
    gc.disable()
    try:
        few, many = (min(seconds(count) for _ in range(3)) for count in (100, 400))
    finally:
        gc.enable()
    assert many < 8 * few


@pytest.mark.parametrize("ranks", [1, 2])
def test_inductor_gets_a_plain_list_and_the_kept_one_is_emptied(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[type] = []

    def compiled(graph: Any, dynamic: bool) -> Any:
        def call(state: Any, feed: Any, kept: Any, *rest: Any) -> Any:
            seen.append(type(kept))
            return graph(state, feed, kept, *rest)

        assert dynamic
        return call

    monkeypatch.setattr(torch, "compile", compiled)
    table, stages = handmade.table(ranks, 2), _variants(ranks)
    state = handmade.parameters(ranks)
    programs = {r: emit(table, r, stages, state, engine="inductor") for r in range(ranks)}
    step = run_step(choose("local", ranks), programs, handmade.batch(2), torch.float64)
    assert torch.equal(step.losses, handmade.run(choose("local", ranks), 2).losses)
    assert set(seen) == {tuple, list}


def test_a_group_leaves_out_what_no_variant_of_the_step_trains() -> None:
    frozen = dict(handmade.stages(2))
    vision = frozen["vision"]
    frozen["vision"] = handmade.Opaque(
        "vision", vision.function, vision.state, (), vision.ends, vision.copies
    )
    both = [dict(handmade.stages(2)), frozen]
    table, state, backend = handmade.table(2, 3), handmade.parameters(2), choose("local", 2)
    programs = {rank: emit(table, rank, both, state) for rank in range(2)}
    batch = handmade.batch(3)
    for mb in batch:
        mb.variant = 1
    assert "vision.w" not in run_step(backend, programs, batch, torch.float64).gradients
    batch[0].variant = 0
    mixed = run_step(backend, programs, batch, torch.float64).gradients
    assert mixed["vision.w"].abs().sum() > 0
    assert Op.parse("vision.R") in table.rows[0]
