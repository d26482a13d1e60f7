"""One architecture, trained for one step under several schedules, against eager."""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import fxpipe
from benchmarks.reference import Reference, rounding, unchanged
from benchmarks.zoo import ALL
from benchmarks.zoo.architecture import Architecture, Microbatch
from fxpipe import tracer
from fxpipe.cut import Cut
from fxpipe.errors import FxpipeError

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Setting:
    """How a step is run: `nested/1f1b on 4`, `nested/1f1b on 2 over gloo`."""

    schedule: str
    ranks: int
    backend: str = "local"

    def __str__(self) -> str:
        return f"{self.schedule} on {self.ranks}{' over gloo' * (self.backend == 'gloo')}"


@dataclass(frozen=True)
class Run:
    """One step: its stages and seam values, and how far it is from eager.

    loss: the relative difference; gradient: the worst one, and of which parameter or buffer
    """

    setting: str
    stages: int = 0
    values: int = 0
    loss: float = 0.0
    gradient: float = 0.0
    worst: str = ""
    error: str = ""


@dataclass
class Trained:
    """What was found of an architecture; plain values, so that it can be written as JSON.

    equal: what the differing microbatches failed with, if equal ones were taken instead; regions:
    `name:role`; apart: modules that are in no region of their role; rung: that of the example's
    graph, with what it holds for, and that of the last, if it is another; captures: how many graphs
    the microbatches took; rounding: how far eager is from eager in float64; capture, compile: CPU
    seconds for the example; export: those of `torch.export` alone, in the try that traced it
    """

    name: str
    dtype: str
    equal: str = ""
    regions: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)
    rung: str = ""
    captures: int = 0
    nodes: int = 0
    rounding: float = 0.0
    export: float = 0.0
    capture: float = 0.0
    compile: float = 0.0
    runs: list[Run] = field(default_factory=list)


@contextmanager
def clocked(module: ModuleType, name: str) -> Iterator[list[float]]:
    """CPU seconds of each call of a module's function, as its module calls it."""
    called, seconds = vars(module)[name], []

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.process_time()
        try:
            return called(*args, **kwargs)
        finally:
            seconds.append(time.process_time() - begun)

    setattr(module, name, timed)
    try:
        yield seconds
    finally:
        setattr(module, name, called)


def train(
    name: str, architecture: Architecture, dtype: str, settings: Sequence[Setting]
) -> Trained:
    """A step of an architecture under each of the settings; over gloo, of the one of that name."""
    found = Trained(name, dtype)
    model = architecture.build(DTYPES[dtype])
    batch = architecture.microbatches(DTYPES[dtype])
    local = [setting for setting in settings if setting.backend == "local"]
    pipe = _first(found, model, batch, (local or [replace(settings[0], backend="local")])[0])
    if pipe is None:
        found.runs = [replace(found.runs[0], setting=str(setting)) for setting in settings]
        return found
    _describe(found, pipe, architecture.parts)
    batch = batch if not found.equal else batch[:1] * len(batch)
    expected = Reference.of(model, batch)
    found.rounding = rounding(architecture, expected, len(batch) if found.equal else 0)
    found.runs = [_run(pipe, setting, batch, expected) for setting in local]
    for setting in settings:
        if setting.backend == "gloo":
            found.runs.append(_over_gloo(found, setting))
    return found


def _first(
    found: Trained, model: nn.Module, batch: Sequence[Microbatch], setting: Setting
) -> fxpipe.Pipe | None:
    """The model compiled, and run once: with its microbatches, or else with equal ones."""
    try:
        graph, opaque = clocked(tracer, "capture"), clocked(tracer, "capture_opaque")
        with graph as seconds, opaque as more, clocked(torch.export, "export") as exports:
            begun = time.process_time()
            pipe = fxpipe.compile(
                model, batch[0], schedule=setting.schedule, ranks=setting.ranks, backend="local"
            )
            found.compile = time.process_time() - begun
        found.rung = _rung(pipe)
        found.capture, found.export = sum([*seconds, *more]), exports[-1]
    except Exception as error:
        found.runs = [Run(str(setting), error=said(error))]
        return None
    try:
        with unchanged(model):
            pipe.step(batch)
    except Exception as error:
        found.equal = said(error)
    return pipe


def said(error: Exception) -> str:
    """An error in one line; one that is none of fxpipe's is a crash."""
    crash = "" if isinstance(error, FxpipeError) else "crash: "
    return f"{crash}{type(error).__name__}: {' '.join(str(error).split())}"


def _run(
    pipe: fxpipe.Pipe, setting: Setting, batch: Sequence[Microbatch], expected: Reference
) -> Run:
    model = pipe.model
    try:
        pipe = pipe.reschedule(setting.schedule, setting.ranks, setting.backend)
        model.zero_grad()
        with unchanged(model):
            loss = float(pipe.step(list(batch)).loss)
            names = [*dict(pipe.named_parameters()), *pipe.state_dict()]
            gradient, worst = expected.far(model, names)
    except Exception as error:
        return Run(str(setting), error=said(error))
    far = abs(loss - expected.loss) / abs(expected.loss)
    values = sum(len(seam.values) for seam in pipe.cut.seams)
    return Run(str(setting), len(pipe.cut.stages), values, far, gradient, worst)


def _describe(found: Trained, pipe: fxpipe.Pipe, parts: Mapping[str, str]) -> None:
    found.nodes = len(pipe.captured.graph.graph.nodes)
    found.rung = " → ".join(dict.fromkeys([found.rung, _rung(pipe)]))
    found.captures = pipe.captures
    found.regions = [f"{region.name}:{region.role}" for region in pipe.cut.regions]
    found.apart = sorted(_apart(pipe.cut, _held(pipe), parts))


def _rung(pipe: fxpipe.Pipe) -> str:
    """1: a graph for all values; 2: one for the values of some inputs; 3: an opaque stage."""
    last = pipe.captured
    if last.prefix is not None:
        return f"3 (before {last.prefix.boundary})"
    return f"2 ({', '.join(last.values)})" if last.values else "1"


def _held(pipe: fxpipe.Pipe) -> dict[str, list[str]]:
    """For each parameter that is used, the stages that use it."""
    held: dict[str, list[str]] = {}
    for stage, graphs in pipe.graphs.items():
        for name in set(graphs.state) & dict(pipe.model.named_parameters()).keys():
            held.setdefault(name, []).append(stage)
    return held


def _apart(cut: Cut, held: Mapping[str, list[str]], parts: Mapping[str, str]) -> set[str]:
    """The modules of which some parameter is used in no region of the role that they should have.

    A parameter counts for the longest name that it begins with.
    """
    apart = set()
    for name, stages in held.items():
        part = max((p for p in parts if f"{name}.".startswith(f"{p}.")), key=len, default=None)
        if part and parts[part] not in {str(cut.role(stage)) for stage in stages}:
            apart.add(part)
    return apart


def _over_gloo(found: Trained, setting: Setting) -> Run:
    """The same step in processes, each of which compares what is its own."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn: Any = vars(mp)["spawn"]  # untyped
            spawn(_process, (found, setting, folder), nprocs=setting.ranks)
        except Exception as error:
            return Run(str(setting), error=said(error))
        files = [Path(folder) / f"run{rank}.json" for rank in range(setting.ranks)]
        runs = [Run(**json.loads(file.read_text())) for file in files]
    return max(runs, key=lambda run: (bool(run.error), run.gradient))


def _process(rank: int, found: Trained, setting: Setting, folder: str) -> None:
    torch.set_num_threads(1)
    store = vars(dist)["FileStore"](f"{folder}/store", setting.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setting.ranks)
    architecture, dtype = ALL[found.name], DTYPES[found.dtype]
    model, batch = architecture.build(dtype), architecture.microbatches(dtype)
    batch = batch[:1] * len(batch) if found.equal else batch
    pipe = fxpipe.compile(model, batch[0], schedule=setting.schedule, backend="gloo")
    run = _run(pipe, setting, batch, Reference.of(model, batch))
    Path(f"{folder}/run{rank}.json").write_text(json.dumps(asdict(run)))
    dist.barrier()
    dist.destroy_process_group()
