"""The end of a process that has run a pipe."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

PROGRAM = """
import atexit, os

@atexit.register  # before fxpipe's own: it runs after them
def report():
    tasks = (f"/proc/self/task/{task}/comm" for task in os.listdir("/proc/self/task"))
    names = [open(task).read().strip() for task in tasks]
    print("threads of gloo:", sum("gloo" in name for name in names))

import torch
import torch.distributed as dist
import fxpipe

store = dist.FileStore(os.environ["STORE"], 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
pipe = fxpipe.compile(model, (torch.ones(1, 2),), ranks=1, backend="gloo", loss_fn=torch.sum)
pipe.step([(torch.ones(1, 2),)])
dist.destroy_process_group()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed by Linux")
def test_no_thread_outlives_a_pipe_that_lives_to_the_end(tmp_path: Path) -> None:
    """One that lets go of a tensor while the interpreter ends would take the process down."""
    environment = {**os.environ, "STORE": str(tmp_path / "store")}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "threads of gloo: 0"
