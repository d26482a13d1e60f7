"""The trace of a timeline, and the files of FXPIPE_DUMP."""

import json
from pathlib import Path

import pytest

from fxpipe import passes
from fxpipe.schedule import derive
from fxpipe.simulate import simulate
from fxpipe.table import Table
from fxpipe.trace import perfetto, write_perfetto
from tests.pure.cuts import Shape, build

TABLE = passes.run(derive(build("nested/1f1b", 2, Shape(encoders=(True,))), 4))


def test_a_trace_has_slices_arrows_and_counters(tmp_path: Path) -> None:
    timeline = simulate(TABLE)
    file = write_perfetto(timeline, tmp_path / "step.perfetto.json")
    events = json.loads(file.read_text())["traceEvents"]
    by_phase = {phase: [e for e in events if e["ph"] == phase] for phase in "MXsfC"}
    assert len(by_phase["X"]) == len(timeline.compute)
    assert {e["args"].get("name") for e in by_phase["M"]} >= {"rank 0", "rank 1"}
    assert {e["cat"] for e in by_phase["X"]} == {"enc0", "llm", "reduce"}
    assert len(by_phase["s"]) == len(by_phase["f"]) == len(timeline.transfers)
    assert max(e["args"]["units"] for e in by_phase["C"] if e["name"] == "live enc0, rank 0") == 2


def test_arrows_leave_their_value_and_reach_its_reader() -> None:
    timeline = simulate(TABLE)
    events = perfetto(timeline)["traceEvents"]
    slices = {(e["tid"], e["name"]): e for e in events if e["ph"] == "X"}
    for leave in (e for e in events if e["ph"] == "s"):
        source = slices[leave["tid"], leave["name"]]
        assert source["ts"] <= leave["ts"] < source["ts"] + source["dur"]
        arrive = next(e for e in events if e["ph"] == "f" and e["id"] == leave["id"])
        assert arrive["tid"] != leave["tid"]
        assert arrive["ts"] >= source["ts"] + source["dur"]


def test_passes_dump_numbered_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPIPE_DUMP", str(tmp_path / "dump"))
    table = passes.run(derive(TABLE.cut, 4))
    files = sorted((tmp_path / "dump").iterdir())
    assert [file.name for file in files] == ["00_derive.txt", "01_communicate.txt", "02_reduce.txt"]
    assert Table.parse(files[-1].read_text()) == table
