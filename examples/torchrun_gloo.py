"""The same script on every rank, as under torchrun; an ordinary optimizer on this rank's part.

torchrun --nproc-per-node 2 examples/torchrun_gloo.py
python examples/torchrun_gloo.py       # starts the line above
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpipe

WIDTH = 32


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, WIDTH] -> the same."""
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Regressor(nn.Module):
    """A chain of blocks that learns a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of x [batch, 4] against y [batch]."""
        return nn.functional.mse_loss(self.head(self.blocks(self.embed(x))).squeeze(1), y)


def microbatch() -> dict[str, Tensor]:
    """Eight rows, and the sum of each."""
    x = torch.randn(8, 4)
    return {"x": x, "y": x.sum(1)}


def main() -> None:
    """What each rank runs. On accelerators write "nccl" and move model and batch to the device."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # every rank builds the same weights, and draws the same batches
    pipe = fxpipe.compile(
        Regressor(), example=microbatch(), schedule="nested/1f1b", ranks=2, backend="gloo"
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(pipe.step([microbatch() for _ in range(4)]).loss.item())
        optimizer.step()

    rank = dist.get_rank()
    names = ", ".join(name for name, _ in pipe.named_parameters())
    lines: list[str | None] = [None, None]
    dist.all_gather_object(lines, f"rank {rank} trains {names}")
    if rank == 0:
        print("\n".join(str(pipe.table).splitlines()[-2:]))
        print("\n".join(map(str, lines)))
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {len(losses)} steps")
        assert losses[-1] < losses[0]
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        os.execv(sys.executable, [sys.executable, *command])
    main()
