"""What compiling costs: a LLaVA of transformers on the meta device, deeper and deeper.

    taskset -c 0 python -m benchmarks.compiling [--layers 25 50 100] [--encoder 24] [--ranks 8]

For each number of decoder layers, CPU seconds of torch.export alone, of all of `fxpipe.compile`
with its table, of differentiation, the number of pieces that were traced, and resident memory. Each
depth runs in a process of its own. `--one` is such a process.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn
from torch.export import Dim

import fxpipe
from fxpipe import lower, tracing

IMAGE = 299


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[25, 50, 100])
    parser.add_argument("--encoder", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--one", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.one:
        print(json.dumps(measure(given.layers[0], given.encoder, given.ranks)))
        return
    for layers in given.layers:
        command = [sys.executable, "-m", "benchmarks.compiling", "--one"]
        sizes = ["--layers", str(layers), "--encoder", str(given.encoder)]
        command += [*sizes, "--ranks", str(given.ranks)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(done.stdout.strip().splitlines()[-1], flush=True)


def measure(layers: int, encoder: int, ranks: int) -> dict[str, float]:
    """The figures of one depth."""
    model, batch = llava(layers, encoder)
    exporting = cpu_seconds(lambda: export(model, batch))
    spent, traces = [0.0], [0]
    lower.differentiate = timed(lower.differentiate, spent)  # type: ignore[assignment]
    tracing._trace = timed(tracing._trace, [0.0], traces)
    found: dict[str, fxpipe.Pipe] = {}

    def run() -> None:
        pipe = fxpipe.compile(model, batch, schedule="nested/1f1b", ranks=ranks, backend="local")
        assert pipe.table.cut.ranks == ranks
        found["pipe"] = pipe

    whole = cpu_seconds(run)
    return {
        "layers": layers,
        "nodes": len(found["pipe"].captured.graph.graph.nodes),
        "export": round(exporting, 1),
        "compile": round(whole, 1),
        "differentiate": round(spent[0], 1),
        "pieces traced": traces[0],
        "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def timed(function: Callable[..., Any], spent: list[float], count: list[int] | None = None) -> Any:
    """The function, which adds its CPU seconds to `spent` and its calls to `count`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result: list[Any] = []
        spent[0] += cpu_seconds(lambda: result.append(function(*args, **kwargs)))
        if count is not None:
            count[0] += 1
        return result[0]

    return call


def cpu_seconds(function: Callable[[], Any]) -> float:
    """Of this process, while the function runs."""
    start = time.process_time()
    function()
    return time.process_time() - start


def export(model: nn.Module, batch: dict[str, torch.Tensor]) -> object:
    """torch.export with the dimensions that fxpipe leaves open."""
    shapes = {k: dict.fromkeys(range(v.dim()), Dim.AUTO) for k, v in batch.items()}
    return torch.export.export(Loss(model), (batch,), dynamic_shapes=(shapes,), strict=False)


class Loss(nn.Module):
    """The model's loss alone: its caches are no outputs that torch.export knows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss


def llava(layers: int, encoder: int, **text: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model without memory, and a microbatch. text: sizes of the decoder."""
    import transformers as t

    vision = t.CLIPVisionConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=encoder, image_size=64
    )
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 8} | text
    decoder = t.LlamaConfig(num_hidden_layers=layers, vocab_size=IMAGE + 1, **sizes)
    config = t.LlavaConfig(vision_config=vision, text_config=decoder, image_token_id=IMAGE)
    with torch.device("meta"):
        model = t.LlavaForConditionalGeneration(config)
        ids = torch.zeros(2, 16, dtype=torch.int64)
        pixels = torch.zeros(2, 3, 64, 64)
    mask = torch.ones_like(ids)
    return model, {"input_ids": ids, "attention_mask": mask, "labels": ids, "pixel_values": pixels}


if __name__ == "__main__":
    main()
