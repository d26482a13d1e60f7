"""Text that nothing is computed from: arguments of checks, errors, warnings and logs.

A trace need not hold for the numbers that are written down in it.
"""

import ast
import linecache
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from types import CodeType, FrameType
from typing import Any

# Functions that report; called for nothing else where their result is not used.
_REPORTS = {"print", "warn", "warning", "warning_once", "info", "info_once", "debug"}
_CHECKS = ("_check", "torch_compilable_check")
_ERRORS = ("Error", "Exception", "Warning")
_WRITERS = {"str", "repr", "format", "join"}
_PARTS = (ast.JoinedStr, ast.FormattedValue, ast.BinOp, ast.Tuple, ast.keyword, ast.Lambda)
Span = tuple[int, int, int, int]  # first line, first column, last line, last column


def in_message(frame: FrameType) -> bool:
    """Whether what a frame evaluates now is text of a report, by its source; False without any."""
    return _in_message(frame.f_code, frame.f_lasti)


@cache
def _in_message(code: CodeType, instruction: int) -> bool:
    positions = next(islice(code.co_positions(), instruction // 2, None), None)
    if positions is None or None in positions:
        return False
    first, last, begin, end = positions
    path = _path(_tree(code.co_filename), (first or 0, begin or 0, last or 0, end or 0))
    return _reports(path)


@cache
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None


def _path(node: ast.AST | None, span: Span) -> list[ast.AST]:
    """The nodes around a part of the source, the innermost first."""
    path: list[ast.AST] = []
    while node is not None:
        path.append(node)
        node = next((child for child in _children(node) if _covers(child, span)), None)
    return path[::-1]


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Those with a place in the source; in place of others, theirs."""
    for child in ast.iter_child_nodes(node):
        if hasattr(child, "end_lineno"):
            yield child
        else:
            yield from _children(child)


def _covers(node: Any, span: Span) -> bool:
    first, last = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    return first <= span[:2] and span[2:] <= last


def _reports(path: Sequence[ast.AST]) -> bool:
    """Whether text in the first node goes into a report, and nowhere else."""
    for inner, node, around in zip([None, *path], path, [*path[1:], None], strict=False):
        if isinstance(node, ast.Assert):
            return node.msg is inner
        if isinstance(node, ast.Call) and _name(node.func) not in _WRITERS:
            return _is_report(_name(node.func), around)
        if inner is not None and not isinstance(node, (ast.Call, *_PARTS)):
            return False
    return False


def _is_report(name: str, around: ast.AST | None) -> bool:
    """Whether a call of this name, in that node, reports alone."""
    if name.endswith(_ERRORS):
        return isinstance(around, ast.Raise)
    return isinstance(around, ast.Expr) and (name in _REPORTS or name.startswith(_CHECKS))


def _name(function: ast.expr) -> str:
    """Of a called function, without what it is an attribute of."""
    match function:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""
