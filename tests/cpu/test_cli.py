"""The command line's tools on text, and the demo's parts that need no second process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fxpipe.cli import main
from fxpipe.costs import Costs
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
    costs = tmp_path / "costs.json"
    costs.write_text(Costs.uniform(Table.parse(table.read_text()).cut, {"llm0": 40.0}).to_json())
    _, dearer, _ = said(capsys, monkeypatch, "simulate", table, "--costs", costs)
    assert float(dearer.split()[1]) >= 3 * 3 * 40 > float(out.split()[1])
    assert json.loads(trace.read_text())["traceEvents"]


def test_simulate_takes_what_the_check_of_a_plan_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, table = tmp_path / "cut.txt", tmp_path / "table.txt"
    cut.write_text(CUT.replace("FBW, rank 0, cost 1", "FBW, rank 0, cost 7"))
    table.write_text(said(capsys, monkeypatch, "plan", cut, "--schedule", "1f1b")[1])
    _, out, _ = said(capsys, monkeypatch, "simulate", table)
    _, checked, _ = said(capsys, monkeypatch, "plan", table, "--check", "--json")
    assert float(out.split()[1]) == json.loads(checked)["makespan"] >= 8 * 3 * 7


def test_the_demo_names_the_package_that_it_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxpipe.cli.find_spec", lambda name: None)
    status, _, err = said(capsys, monkeypatch, "demo")
    assert status == 1
    assert "needs transformers" in err
    assert "fxpipe[demo]" in err


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


REGIONS = [
    "--ranks=2",
    "--microbatches=4",
    "--region=vision=encoder:1,2",
    "--region=llm=backbone:1,1,1",
]


def planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str | Path
) -> dict[str, Any]:
    """What `fxpipe plan WORDS --json` prints."""
    status, out, err = said(capsys, monkeypatch, "plan", *words, "--json")
    assert (status, err) == (0, "")
    return dict(json.loads(out))


def test_plan_of_regions_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = planned(capsys, monkeypatch, *REGIONS, "--schedule=upfront/1f1b")
    table = Table.parse(found["rows"])
    assert str(table) == found["rows"]
    assert table.microbatches == 4
    assert (found["makespan"], found["lower_bound"]) == (20, 18)
    assert found["bubble"] == pytest.approx([0.1, 0.1])
    assert found["peak_live"] == {"vision": [2, 2], "llm": [2, 1]}
    assert found["owners"] == {"vision": [0, 1, 0, 1]}
    assert (found["E"], found["w"], found["spill"]) == ([2, 2], [0, 1], [2, 1])

    file = tmp_path / "table.txt"
    file.write_text(found["rows"])
    again = planned(capsys, monkeypatch, file, "--check")
    assert {key: again[key] for key in ("valid", "makespan", "lower_bound", "owners")} == {
        "valid": True,
        "makespan": 20,
        "lower_bound": 18,
        "owners": {"vision": [0, 1, 0, 1]},
    }
    costly = planned(capsys, monkeypatch, file, "--check", *REGIONS[2:], "--latency=1")
    assert costly["makespan"] > 20


def test_plan_of_regions_as_a_grid(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    words = (*REGIONS, "--schedule=upfront/1f1b")
    status, out, _ = said(capsys, monkeypatch, "plan", *words)
    assert status == 0
    assert out == (
        "       0         5         10        15\n"
        "rank 0 v0v2F0F1..B0W0F2B1W1F3B2W2..B3W3V0--V2--\n"
        "rank 1 v1v3..F0B0W0F1B1W1F2B2W2F3B3W3V1--V3--..\n"
        "\n"
        "vision v:F V:W   llm F:F B:B W:W\n"
        "one column is 0.5 s\n"
        "\n"
        "schedule upfront/1f1b\n"
        "makespan 20 s, lower bound 18 s (11.1% above it), mean bubble 10.0%\n"
        "\n"
        "        bubble  live vision  live llm  E  w  spill\n"
        "rank 0   10.0%            2         2  2  0      2\n"
        "rank 1   10.0%            2         1  2  1      1\n"
        "\n"
        "owners vision: 0 1 0 1\n"
    )


QUICK = ("--effort=0.02", "--keep=vision=2", "--keep=llm=8")


def test_plan_chooses_and_shows_its_front(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = planned(capsys, monkeypatch, *REGIONS, *QUICK)
    chosen = [point for point in found["front"] if point["chosen"]]
    assert [point["schedule"] for point in chosen] == [found["schedule"]]
    assert chosen[0]["seconds"] == found["makespan"]
    assert chosen[0]["bytes"] == max(found["peak_bytes"])
    assert {"owners", "window", "recompute", "chunks", "units", "fits", "best"} < set(chosen[0])

    small = planned(capsys, monkeypatch, *REGIONS, *QUICK, "--memory=12")
    assert max(small["peak_bytes"]) <= 12 < max(found["peak_bytes"])
    assert small["makespan"] > found["makespan"]

    status, out, _ = said(capsys, monkeypatch, "plan", *REGIONS, *QUICK, "--memory=12")
    assert status == 0
    head, front = out.split(" schedules tried; > chosen, ")
    assert f"\nschedule {small['schedule']}\n" in head
    assert len(front.splitlines()) <= 15
    assert [line.startswith(">") for line in front.splitlines()].count(True) == 1


def test_what_recomputes_takes_longer_and_keeps_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*REGIONS, *QUICK, "--schedule=upfront/1f1b")
    plain = planned(capsys, monkeypatch, *words)
    again = planned(capsys, monkeypatch, *words, "--recompute=vision", "--recompute=llm")
    assert again["makespan"] > plain["makespan"]
    assert max(again["peak_bytes"]) < max(plain["peak_bytes"])
    file = tmp_path / "table.txt"
    file.write_text(again["rows"])
    checked = planned(capsys, monkeypatch, file, "--check", *REGIONS[2:])
    assert checked["makespan"] == again["makespan"]


@pytest.mark.parametrize("check", [False, True])
def test_check_says_what_is_broken(
    check: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "table.txt"
    rows = planned(capsys, monkeypatch, *REGIONS, "--schedule=upfront/1f1b")["rows"]
    bare = "\n".join(line for line in rows.splitlines() if not line.startswith(("live", "sched")))
    file.write_text(bare.replace(" llm1.W1", ""))
    broken = "complete: llm1.W1 is missing; add it to the row of rank 1"
    words = ("--json",) if check else ()
    status, out, err = said(capsys, monkeypatch, "plan", file, "--check", *words)
    assert status == 1
    if check:
        assert json.loads(out) == {"valid": False, "broken": [broken]}
    else:
        assert err == f"TableError: {broken}\n"


def test_plan_of_a_csv_of_actions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "actions.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    found = planned(capsys, monkeypatch, file, "--ranks=2", "--region=llm=backbone:1,2")
    assert found["makespan"] == 9
    assert "rank 1: llm0.F0<0 llm1.F0 llm0.F1<0 llm1.B0 llm1.B0>0" in found["rows"]
    status, _, err = said(capsys, monkeypatch, "plan", file)
    assert status == 1
    assert err.startswith("OptionError: the file is no cut and no table")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to plan; give a FILE, or regions"),
        (("--check",), "--check needs a FILE"),
        (("--region=llm=backbone:1",), "--ranks is missing"),
        ((*REGIONS, "--shard=llm"), "--shard llm is the backbone, which always is"),
        ((*REGIONS, "--shard=x"), "--shard x names no region; regions that can be sharded: vision"),
        ((*REGIONS, "--recompute=x"), "--recompute x names no region; regions that can recompute:"),
        ((*REGIONS, "--memory=9"), "--memory needs to know what is kept; say it with --keep"),
        ((*REGIONS, "--memory=9", "--schedule=nested/1f1b"), "--memory is for --schedule auto"),
        ((*REGIONS, "--owners=all"), "--owners 'all' is unknown; write one of round_robin, slack"),
        ((*REGIONS, "--owners=0,1"), "--owners names 2 ranks for 4 microbatches"),
        ((*REGIONS, "--owners=0,1,2,0"), "--owners names rank 2; expected ranks of 0..1"),
        ((*REGIONS, "--scale=vision=1,1,1,1,1"), "--scale vision has 5 factors for 4 microbatches"),
    ],
)
def test_wrong_options(
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status, _, err = said(capsys, monkeypatch, "plan", *words)
    assert status == 1
    assert err.startswith(f"OptionError: {message}")
    assert err.count("\n") == 1


def test_plan_imports_no_torch_and_for_json_no_rich() -> None:
    code = (
        "import sys; from fxpipe.cli import main\n"
        "try: main()\n"
        "finally: print([x for x in ('torch', 'numpy', 'rich.console') if x in sys.modules],"
        " file=sys.stderr)"
    )
    words = [sys.executable, "-c", code, "plan", *REGIONS, "--json"]
    ended = subprocess.run(words, capture_output=True, text=True, check=True)
    assert ended.stderr == "[]\n"
    assert json.loads(ended.stdout)["valid"]


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
