"""fxpipe: a compiler from a plain multimodal module to one pipeline program per rank.

The table half (cut, table, verify, schedule, simulate, trace) imports no torch; what needs it is
loaded when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fxpipe.cut import Cut
from fxpipe.table import Op, Table

if TYPE_CHECKING:
    from fxpipe.evaluation import Evaluation
    from fxpipe.pipe import Pipe, compile
    from fxpipe.steps import Result

__all__ = ["Cut", "Evaluation", "Op", "Pipe", "Result", "Table", "compile"]
__version__ = "0.1.0"

_LAZY = {
    "Evaluation": "fxpipe.evaluation",
    "Pipe": "fxpipe.pipe",
    "Result": "fxpipe.steps",
    "compile": "fxpipe.pipe",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        globals().update({lazy: getattr(import_module(m), lazy) for lazy, m in _LAZY.items()})
        return globals()[name]
    raise AttributeError(f"module 'fxpipe' has no attribute {name!r}")
