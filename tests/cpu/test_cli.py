"""The command line's tools on text, and the demo's parts that need no second process."""

import json
import sys
from pathlib import Path

import pytest

from fxpipe.cli import main
from fxpipe.demo import data, show, worker
from fxpipe.demo.baseline import plans
from fxpipe.table import Table

CUT = """
ranks 2
region vision encoder replicated
region llm backbone sharded
stage vision of vision: FW, owner, cost 1
stage llm0 of llm: FBW, rank 0, cost 1
stage llm1 of llm: FBW, rank 1, cost 1
seam vision -> llm0: features*
seam llm0 -> llm1: hidden*
shared vision
"""


def said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str | Path
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `fxpipe WORDS`."""
    monkeypatch.setattr(sys, "argv", ["fxpipe", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_plan_verify_simulate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, table, trace = tmp_path / "cut.txt", tmp_path / "table.txt", tmp_path / "trace.json"
    cut.write_text(CUT)
    status, out, _ = said(capsys, monkeypatch, "plan", cut, "--microbatches", "3")
    assert status == 0
    assert Table.parse(out).microbatches == 3
    table.write_text(out)

    status, out, _ = said(capsys, monkeypatch, "verify", table)
    assert status == 0
    assert "2 ranks, 3 microbatches" in out

    status, out, _ = said(capsys, monkeypatch, "simulate", table, "--trace", trace)
    assert status == 0
    assert out.startswith("makespan ")
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("verify",), "TableError: complete: llm1.W1 is missing"),
        (("plan", "--schedule", "nested/2f2b"), "ScheduleError: schedule 'nested/2f2b' is unknown"),
    ],
)
def test_errors_have_no_traceback(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut, table = tmp_path / "cut.txt", tmp_path / "table.txt"
    cut.write_text(CUT)
    table.write_text(said(capsys, monkeypatch, "plan", cut)[1].replace(" llm1.W1", ""))
    status, _, err = said(capsys, monkeypatch, words[0], table, *words[1:])
    assert status == 1
    assert err.startswith(message)
    assert "Traceback" not in err


def test_tokenizer_round_trip() -> None:
    text = data.caption(7)
    ids = data.TOKENIZER.encode(text)
    assert data.TOKENIZER.decode([*ids, data.END, ids[0]]) == text == "a handwritten seven"


def test_a_step_is_the_same_in_every_process_and_its_lengths_differ() -> None:
    digits = data.load()
    first, again = (data.step_of(digits, 3, 8, 4, patches=4) for _ in range(2))
    assert all((a[name] == b[name]).all() for a, b in zip(first, again, strict=True) for name in a)
    assert len({mb["input_ids"].shape[1] for mb in first}) > 1
    for mb in first:
        padding = mb["attention_mask"] == 0
        assert (mb["input_ids"][padding] == data.PAD).all()
        assert (mb["labels"][padding] == data.IGNORED).all()
        assert ((mb["labels"] != data.IGNORED).sum(1) == 4).all()  # a handwritten seven <end>


def test_plans_of_the_baseline_cover_all_layers() -> None:
    assert plans(4, 2) == [tuple(map(range, (0, at), (at, 4))) for at in range(4)]
    assert all(len(plan) == 4 and plan[-1].stop == 4 for plan in plans(4, 4))


@pytest.mark.parametrize(
    ("losses", "faithful", "falling"),
    [((4.0, 1.0), True, True), ((4.0, 1.001), False, True), ((4.0, 3.0), False, False)],
)
def test_outcome_says_what_the_exit_status_is(
    losses: tuple[float, ...], faithful: bool, falling: bool
) -> None:
    sample = show.Sample(picture="", digit="one", said="", right=0, count=1)
    outcome = show.Outcome((4.0, 1.0), losses, worker.Compiled((), (), ()), (), sample)
    assert (outcome.faithful, outcome.falling) == (faithful, falling)
