"""Tables on an emulated machine: what took how long, and how a step with a dead rank ends."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fxpipe.beside import beside
from fxpipe.cli import app
from fxpipe.costs import Costs
from fxpipe.cut import Kind
from fxpipe.emulator import Emulator, finished
from fxpipe.errors import RankError, TableError
from fxpipe.schedule import derive
from fxpipe.simulate import simulate
from fxpipe.table import Op, Table
from tests import handmade

UNIT = 0.03
LATE = 1.6  # of a busy machine: nothing is measured here


def costs(latency: float = 0.0) -> Costs:
    """Of the handmade cut: encoders take two units, R a half; llm1's kept bytes are known."""
    forward = dict.fromkeys(["vision"], 2.0)
    found = Costs.uniform(handmade.cut(3), forward)
    seconds: Any = {key: UNIT * amount for key, amount in found.seconds.items()}
    seconds["vision", Kind.R] = UNIT / 2
    sent: Any = {(f"llm{r}", kind): 1e4 for r in range(3) for kind in (Kind.F, Kind.B)}
    kept: Any = {("llm1", Kind.F): 100.0}
    return Costs(seconds, latency=latency, bytes=sent, kept=kept)


@pytest.fixture(scope="module")
def emulator() -> Any:
    with Emulator(3) as running:
        yield running


def test_ops_take_what_the_costs_say(emulator: Emulator) -> None:
    table = derive(handmade.cut(3), 4, "nested/1f1b", costs=costs(), effort=0.1)
    table = finished(table, costs())
    first, second = emulator.run(table, costs(), steps=2)
    predicted = simulate(table, costs())
    taken = {(span.rank, span.op): span.seconds for span in predicted.compute}
    for timeline in (first, second):
        assert timeline.makespan >= predicted.makespan
        assert timeline.makespan < LATE * predicted.makespan
        assert all(span.seconds >= taken[span.rank, span.op] for span in timeline.compute)
        for rank, row in enumerate(table.rows):
            ran = sorted((s for s in timeline.compute if s.rank == rank), key=lambda s: s.start)
            assert [span.op for span in ran] == [op for op in row if not op.way]
    assert len(first.transfers) == len(predicted.transfers)
    units = {(peak.rank, peak.stage): peak.units for peak in first.peaks}
    assert units == {(r, s): predicted.peak([s], r) for r, s in units}
    seen = beside(table, costs(), (first, second))
    assert seen.bytes
    assert seen.simulated.peak == seen.measured.peak
    assert 0 <= seen.excess < LATE - 1


def test_a_value_crosses_its_link_in_time(emulator: Emulator) -> None:
    """Two values at once: the second one's bytes wait for those of the first."""
    slow = replace(costs(latency=UNIT), bandwidth=1e4 / UNIT)
    table = finished(derive(handmade.cut(3), 2, "upfront/gpipe", costs=slow), slow)
    (timeline,) = emulator.run(table, slow, fraction=0.5)
    ends = {span.op: (span.start, span.end) for span in timeline.spans}
    for at in (0, 1):
        made, read = ends[Op("llm0", Kind.F, at)], ends[Op("llm1", Kind.F, at)]
        assert read[0] >= made[1] + 2 * UNIT


def test_a_table_for_other_ranks_is_refused(emulator: Emulator) -> None:
    table = derive(handmade.cut(2), 2, "nested/1f1b")
    with pytest.raises(TableError, match="the table has 2 ranks, and 3 processes run"):
        emulator.run(table, costs())


def _never() -> tuple[Table, Costs]:
    table = derive(handmade.cut(2), 2, "nested/1f1b")
    return table, Costs({("llm0", Kind.F): 0.01, ("llm1", Kind.F): 3600.0})


def test_a_dead_rank_ends_the_step() -> None:
    with Emulator(2) as running:
        (victim,) = [p for p in running.processes if p.name == "rank1"]
        timer = threading.Timer(1.5, victim.kill)
        timer.start()
        with pytest.raises(RankError, match="rank 1 has died, with exit code -9"):
            running.run(*_never())
        assert not running.processes
        with pytest.raises(RankError, match="an earlier step failed"):
            running.run(*_never())


def test_an_op_that_fails_ends_the_step() -> None:
    large = Costs({}, bytes={("llm0", Kind.F): 1e18})
    with Emulator(2) as running, pytest.raises(RankError, match=r"rank [01] failed in llm0.F0"):
        running.run(derive(handmade.cut(2), 2, "nested/1f1b"), large)


def test_run_table(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    table, times = derive(handmade.cut(2), 2, "nested/1f1b"), Costs.uniform(handmade.cut(2))
    (tmp_path / "table.txt").write_text(str(table))
    (tmp_path / "costs.json").write_text(times.to_json())
    words = [*map(str, ("run-table", tmp_path / "table.txt", "--costs", tmp_path / "costs.json"))]
    said = CliRunner().invoke(app, [*words, "--scale", "0.01", "--steps", "1", "--json"])
    found = json.loads(said.stdout)
    assert len(found["steps"]) == 1
    assert found["measured"]["seconds"] >= found["simulated"]["seconds"]
    assert "peak_units" in found["measured"]
    said = CliRunner().invoke(app, [*words, "--scale", "0.01", "--steps", "1"])
    assert said.stdout.startswith("step: simulated ")
    refused = CliRunner().invoke(app, [*words, "--ranks", "3"])
    assert "2 rows; leave it out" in str(refused.exception)
