"""A plain model with an encoder and a backbone, compiled for two ranks that live in this process.

python examples/quickstart_local.py
"""

import torch
from torch import Tensor, nn

import fxpipe

WIDTH, WORDS = 32, 50


class Block(nn.Module):
    """A residual block. Regions are found as chains of equal blocks; names do not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, WIDTH] -> the same."""
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Captioner(nn.Module):
    """Ordinary PyTorch: nothing in it knows of pipelines."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(48, WIDTH)
        self.vision = nn.Sequential(Block(), Block())
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        """The loss of the words [batch, tokens] after an image [batch, patches, 48]."""
        features = self.vision(self.patches(image))
        x = torch.cat([features, self.embed(words)], dim=1)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x[:, features.shape[1] : -1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def microbatch(tokens: int) -> dict[str, Tensor]:
    """One microbatch; captions differ in length between microbatches."""
    return {"image": torch.randn(2, 9, 48), "words": torch.randint(WORDS, (2, tokens))}


def main() -> None:
    """Compile, look at every level, run one step, and compare it with eager."""
    torch.manual_seed(0)
    model = Captioner()
    batch = [microbatch(tokens) for tokens in (5, 9, 7, 12)]
    pipe = fxpipe.compile(model, example=batch[0], schedule="nested/1f1b", ranks=2, backend="local")

    result = pipe.step(batch)
    print("the cut: regions, stages, and the seams between them\n")
    print(pipe.cut)
    print("\nthe operator table\n")
    for line in str(pipe.table).splitlines()[-2:]:
        print(line)
    print("\nthe program of rank 0, the first lines\n")
    print("\n".join(pipe.program(0).code.strip().splitlines()[:12]))
    print("\nwhere every module went, and why\n")
    print(pipe.explain())

    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    losses = [model(**mb) / len(batch) for mb in batch]
    for loss in losses:
        loss.backward()
    print(f"\nloss {result.loss:.7f}, in eager {sum(losses):.7f}")
    apart = max((ours[n] - p.grad).abs().max().item() for n, p in model.named_parameters())
    print(f"largest difference of a gradient: {apart:.1e}")
    assert apart < 1e-5


if __name__ == "__main__":
    main()
