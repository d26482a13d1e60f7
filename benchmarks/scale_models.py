"""One deep model on the meta device, compiled by fxpipe or split by torch; for `benchmarks.scale`.

measure(way, layers)    one row; `way` is one of `scale.WAYS`
"""

import resource
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline

import fxpipe
from benchmarks import compiling
from benchmarks.compiling import cpu_seconds

STAGES = 8
# 0.3 B parameters a layer, so that a hundred are 30 B.
WIDE = {"hidden_size": 5120, "intermediate_size": 15360, "num_attention_heads": 40}


class Text(nn.Module):
    """A causal language model of transformers, and the loss of its next token."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        import transformers as t

        config = t.LlamaConfig(num_hidden_layers=layers, num_key_value_heads=8, **WIDE)
        self.model = t.LlamaForCausalLM(config)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=labels, use_cache=False).loss
        return loss


def measure(way: str, layers: int) -> dict[str, Any]:
    """CPU seconds until there are eight stages; fxpipe's are differentiated and scheduled."""
    torch.set_num_threads(1)
    if way == "fxpipe, LLaVA":
        model, batch = compiling.llava(layers, 24, **WIDE)
    else:
        with torch.device("meta"):
            model, ids = Text(layers), torch.zeros(2, 16, dtype=torch.int64)
        batch = {"ids": ids, "labels": ids}
    found: list[int] = []
    row = {"way": way, "layers": layers, "parameters": sum(p.numel() for p in model.parameters())}
    split = torch_split if way == "torch" else fxpipe_split
    try:
        seconds = cpu_seconds(lambda: found.append(split(model, batch, layers)))
    except Exception as error:  # the reason is the row
        if way != "torch":
            raise
        return row | {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return row | {"seconds": seconds, "MiB": peak, "stages": found[0]}


def fxpipe_split(model: nn.Module, batch: dict[str, Tensor], layers: int) -> int:
    """The number of backbone stages of the compiled pipe, each with its graphs."""
    pipe = fxpipe.compile(model, batch, schedule="nested/1f1b", ranks=STAGES, backend="local")
    if pipe.table.cut.ranks != STAGES or len(pipe.graphs) != len(pipe.cut.stages):
        raise RuntimeError(f"no eight stages with graphs:\n{pipe.cut}")
    return sum(stage.rank is not None for stage in pipe.cut.stages)


def torch_split(model: nn.Module, batch: dict[str, Tensor], layers: int) -> int:
    """The number of stages of torch's pipe, cut before every eighth of the layers."""
    places = [round(at * layers / STAGES) for at in range(1, STAGES)]
    spec = {f"model.model.layers.{at}": SplitPoint.BEGINNING for at in places}
    pipe: Any = pipeline(model, mb_args=(), mb_kwargs=batch, split_spec=spec)
    if pipe.num_stages != STAGES:
        raise RuntimeError(f"torch made {pipe.num_stages} stages")
    return int(pipe.num_stages)
