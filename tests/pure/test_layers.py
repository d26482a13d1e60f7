"""The import levels go one way, the table half needs no torch, and nothing grows too long."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("fxpipe", "passes", "backends")
GRAPH = 4  # the level of a module that is not named here
SCHEDULING = (
    "units",
    "bases",
    "skeletons",
    "actions",
    "owners",
    "pipeline",
    "ends",
    "nest",
    "free",
    "waves",
)
ENGINE = ("problem", "numbering", "listing", "policies", "search", "polish")
PLACING = ("nest", "free", "schedule")
PLANNING = ("front", "choices", "planner")
SKETCH = ("sketch", "rates", "figures", "marks", "grid", "summary", "beside")
CHECKS = ("rendezvous", "rules", "verify")
ORDERS = ("given", "scheduler")
STATE = ("building", "python_chance", "torch_chance", "chance", "updates")
EXPORT = (
    "torch_functions",
    "torch_patches",
    "symbols",
    "datasizes",
    "functions",
    "concrete",
    "libraries",
    "surroundings",
    "faithful",
    "replaced",
    "advice",
    "scout",
    "exporting",
    "readings",
    "prefix",
    "boundary",
    "history",
    "prefix_chance",
    "undone",
    "opaque",
    "opaque_run",
    "dry",
)
CAPTURE = (
    "torch_internals",
    "torch_functions",
    "torch_modes",
    "frames",
    "unseeded",
    "messages",
    "trees",
    "packed",
    "outsiders",
    "torch_autograd",
    "derivations",
    "remembered",
    "inputs",
    "wanted",
    "sizes",
    "dataflow",
    "spans",
    "state",
    *STATE,
    *EXPORT,
    "refusals",
    "capture",
    "solving",
    "trial",
    "rungs",
)
WRITES = ("passes.running_statistics", "passes.draws", "passes.buffer_updates")
STAGES = (
    "asides",
    "split",
    "bundles",
    "forwarding",
    "bind",
    "lower",
    "roofline",
)
REWRITES = tuple(
    f"passes.{name}"
    for name in (
        "scatters",
        "functionalise",
        "inline_no_grad",
        "inline_vmap",
        "loss_terms",
        "off_meta",
        "one_input",
        "bindings",
    )
)
ASSIGNMENT = tuple(
    f"passes.{name}" for name in ("chains", "finer", "seeds", "regions", "stages", "follow")
)
STEP = ("changes", "streams")
COSTS = ("timeline", "costs", "device", "simulate", "costmodel", "formulas")
TRACES = ("tracing", "strides", "stitching", "opaque_joint")
DIFFERENTIATION = ("copying", "partition", "pieces", *TRACES, "joint")
LEVELS = (
    ("errors", "cut", "table"),
    (*COSTS, *CHECKS, "trace", *SCHEDULING, *ENGINE, *PLACING, *PLANNING, *SKETCH),
    ("passes", "forecast", "passes.communicate", "passes.reduce", "passes.reorder", *ORDERS),
    (*CAPTURE, *WRITES, *REWRITES),
    (*STAGES, *STEP, *DIFFERENTIATION, *ASSIGNMENT),
    (
        "program",
        "modules",
        "stageop",
        "accumulation",
        "groupop",
        "emulation",
        "delivery",
        "meter",
        "report",
    ),
    ("backends", "runtime", "emulator"),
    (
        "",
        "mode",
        "union",
        "copies",
        "holding",
        "agreement",
        "memory",
        "tracer",
        "variants",
        "explain",
        "steps",
        "evaluation",
        "pipe",
    ),
    ("cli", "demo"),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
TABLE_HALF = 2


@cache
def sources() -> dict[str, Path]:
    """Files by module: `passes.reduce`, `demo.data`; the package itself is the empty name."""
    return {
        _module(file.relative_to(ROOT)): file
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not any(part.is_symlink() for part in file.parents)
    }


def _module(file: Path) -> str:
    parts = list(file.with_suffix("").parts)
    parts = parts[1:] if parts[0] == "fxpipe" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def level(module: str) -> int:
    """The level of a module, or of the closest package around it; a pass may be of the graph."""
    if module.startswith("passes."):
        return LEVEL.get(module, GRAPH)
    names = [module, module.partition(".")[0], module.partition("_")[0]]
    return next((LEVEL[name] for name in names if name in LEVEL), GRAPH)


def imports(file: Path, *, top_only: bool = False) -> Iterator[str]:
    """Full names of what a file imports."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: import by full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inner(name: str) -> str | None:
    """The module of this project that an imported name lies in."""
    if name.partition(".")[0] != "fxpipe":
        return None
    module = name.partition(".")[2]
    while module not in sources() and module:
        module = module.rpartition(".")[0]
    return module


@pytest.mark.parametrize("module", sources())
def test_imports_go_one_way(module: str) -> None:
    for name in imports(sources()[module]):
        other = inner(name)
        if other is not None and other != module:
            assert level(other) <= level(module), f"{module or 'fxpipe'} imports {name}"


def test_imports_have_no_cycle() -> None:
    graph = {
        module: {
            other for name in imports(file, top_only=True) if (other := inner(name)) is not None
        }
        - {module}
        for module, file in sources().items()
    }
    assert list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("module", [name for name in sources() if level(name) <= TABLE_HALF])
def test_the_table_half_imports_no_torch(module: str) -> None:
    for name in imports(sources()[module]):
        assert name.partition(".")[0] not in ("torch", "transformers", "numpy"), f"imports {name}"


@pytest.mark.parametrize("module", sources())
def test_files_and_functions_are_short(module: str) -> None:
    lines = sources()[module].read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 300, "split it by level"
    long = [number for number, line in enumerate(lines, 1) if len(line) > 100]
    assert not long, f"lines {long} have over 100 columns"
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 40, f"{node.name} has {length} lines"
