"""Runs over gloo: the bits of a local run, and the end of a step in which a rank fails."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fxpipe.backends import choose
from fxpipe.errors import BackendError, RankError
from tests import handmade

pytestmark = pytest.mark.dist

CASES = [
    (microbatches, schedule)
    for microbatches in (1, 3, 8)
    for schedule in ("nested/1f1b", "upfront/gpipe", "upfront/1f1b")
]


def processes(body: Callable[..., None], ranks: int, folder: Path) -> list[Any]:
    """What `body(rank, ranks)` returned in each of several processes."""
    mp.spawn(_start, (body, ranks, folder), nprocs=ranks)
    return [torch.load(folder / f"result{rank}", weights_only=False) for rank in range(ranks)]


def _start(rank: int, body: Callable[..., Any], ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.save(body(rank, ranks), folder / f"result{rank}")
    dist.barrier()
    dist.destroy_process_group()


def _steps(rank: int, ranks: int) -> Any:
    steps = {case: handmade.run(choose("gloo"), *case) for case in CASES}
    spans = len(steps[8, "nested/1f1b"].timeline.spans)
    with pytest.raises(BackendError, match=f"the world has {ranks} ranks; start 5 processes"):
        choose("gloo", ranks=5)
    return {case: (step.losses, step.gradients) for case, step in steps.items()}, spans


def _same_bits(found: list[Any], ranks: int) -> None:
    torch.set_num_threads(1)
    for case in CASES:
        local = handmade.run(choose("local", ranks), *case)
        seen = set()
        for steps, spans in found:
            losses, gradients = steps[case]
            assert torch.equal(losses, local.losses)
            assert all(torch.equal(grad, local.gradients[n]) for n, grad in gradients.items())
            seen |= gradients.keys()
            if case == (8, "nested/1f1b"):
                assert spans == len(local.timeline.spans)
        assert seen == local.gradients.keys()


def _broken(end: Callable[[], Any]) -> Callable[[dict[str, Any]], None]:
    class Broken(handmade.Opaque):
        def B(self, *args: Any) -> Any:  # noqa: N802
            return end()

    def change(stages: dict[str, Any]) -> None:
        llm1 = stages["llm1"]
        stages["llm1"] = Broken(llm1.stage, llm1.function, llm1.state, llm1.trained, llm1.ends)

    return change


def _fail() -> None:
    raise ArithmeticError("no such luck")


def _failures(rank: int, ranks: int) -> Any:
    """A step in which rank 1 fails, another on the same backend, and one on a new backend."""
    backend, messages, seconds = choose("gloo"), [], []
    for change in (_broken(_fail), lambda stages: None):
        start = time.monotonic()
        with pytest.raises(RankError) as error:
            handmade.run(backend, 4, change=change)
        messages.append(str(error.value))
        seconds.append(time.monotonic() - start)
    return messages, seconds, handmade.run(choose("gloo"), 2).losses


def _say_failures(found: list[Any], ranks: int) -> None:
    again = handmade.run(choose("local", ranks), 2).losses
    for (first, second), seconds, losses in found:
        assert "rank 1 failed in llm1.B0: ArithmeticError: no such luck" in first
        assert "an earlier step failed" in second
        assert max(seconds) < 4
        assert torch.equal(losses, again)


def test_gloo_gives_the_bits_of_local(tmp_path: Path) -> None:
    _same_bits(processes(_steps, 2, tmp_path), 2)


def _both(rank: int, ranks: int) -> Any:
    return _steps(rank, ranks), _failures(rank, ranks)


def test_four_ranks_give_the_bits_of_local_and_fail_together(tmp_path: Path) -> None:
    found = processes(_both, 4, tmp_path)
    _same_bits([steps for steps, _ in found], 4)
    _say_failures([failures for _, failures in found], 4)


def _die(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    change = _broken(lambda: os._exit(0)) if rank == 1 else lambda stages: None
    with pytest.raises(RankError) as error:
        handmade.run(choose("gloo"), 4, change=change)
    (folder / f"message{rank}").write_text(str(error.value))
    os._exit(0)


def _tables_differ(rank: int, ranks: int) -> str:
    backend = choose("gloo")
    with pytest.raises(RankError) as error:
        handmade.run(backend, 3 + rank, "nested/1f1b")
    return str(error.value)


def test_ranks_with_different_tables_say_so(tmp_path: Path) -> None:
    for message in processes(_tables_differ, 2, tmp_path):
        assert "have different tables; give all ranks the same model, batch" in message


def test_a_rank_that_dies_leaves_nobody_waiting(tmp_path: Path) -> None:
    mp.spawn(_die, (tmp_path,), nprocs=2)
    message = (tmp_path / "message0").read_text()
    assert "rank 0, llm1.B0<1:" in message and "died" in message
