"""What a model's code reads beside its modules: class attributes, globals, closures and defaults.

    surroundings(functions, classes) -> Surroundings

Code is followed from function to function, by the names that it mentions. That of torch, numpy and
the standard library is not: it keeps books of its own, and gives the same for the same arguments.
"""

import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

Space = Mapping[str, Any]
_CLOSED = {*sys.stdlib_module_names, "torch", "numpy", "fxpipe"}
_OPEN = "__main__"  # a script is not the library's module of that name
_BEGIN = ("forward",)  # of each class of a module


@dataclass(frozen=True)
class Surroundings:
    """spaces: the names that code reads in each namespace; classes: those of the model's modules;
    cells: what functions enclose; defaults: those of their parameters."""

    spaces: dict[int, tuple[Space, dict[str, None]]] = field(default_factory=dict)
    classes: dict[type, None] = field(default_factory=dict)
    cells: dict[int, CellType] = field(default_factory=dict)
    defaults: list[object] = field(default_factory=list)

    def named(self) -> Iterator[tuple[Space, tuple[str, ...]]]:
        """Every namespace with the names that count in it."""
        return ((space, tuple(names)) for space, names in self.spaces.values() if names)


def surroundings(functions: Iterable[object], classes: Iterable[type]) -> Surroundings:
    """All that these functions, and the forward of these classes, may read."""
    found = Surroundings()
    for cls in (base for given in classes for base in given.__mro__ if not _is_closed(base)):
        found.classes[cls] = None
    pending, names = list(functions), dict.fromkeys(_BEGIN)
    seen: set[int] = set()
    while pending or names:
        pending += [v for cls in found.classes for v in _noted(cls, names, found)]
        names = {}
        while pending:
            for function in _functions(pending.pop()):
                if id(function) not in seen and not _is_closed(function):
                    seen.add(id(function))
                    own = dict.fromkeys(_names(function.__code__))
                    pending += _read(function, own, found)
                    names |= own
    return found


def _is_closed(code: type | FunctionType) -> bool:
    top = (code.__module__ or "").partition(".")[0]
    return top in _CLOSED and top != _OPEN


def _functions(value: object) -> Iterator[FunctionType]:
    """The functions that run when a value is called or looked up."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, functools.partial):
        yield from _functions(value.func)
    elif isinstance(value, property):
        yield from _functions(value.fget)
    elif isinstance(value, (MethodType, classmethod, staticmethod)):
        yield from _functions(value.__func__)
    elif isinstance(value, functools.cached_property):
        yield from _functions(value.func)
    else:
        yield from _functions_behind(value)


def _functions_behind(value: object) -> Iterator[FunctionType]:
    """The function that a cache or another wrapper keeps."""
    inner = None if isinstance(value, (type, ModuleType)) else vars_of(value).get("__wrapped__")
    if inner is not None:
        yield from _functions(inner)


def vars_of(value: object) -> Space:
    """The attributes of an object; none where it has no room for any."""
    found: Space = getattr(value, "__dict__", {})
    return found


def _read(function: FunctionType, names: Iterable[str], found: Surroundings) -> list[object]:
    """Note what a function reads by these names; what of it may be code."""
    contents = []
    for cell in function.__closure__ or ():
        found.cells[id(cell)] = cell
        contents.append(content(cell))
    found.defaults.extend(x for x in (function.__defaults__, function.__kwdefaults__) if x)
    contents += [*(function.__defaults__ or ()), *vars(function).values()]
    inside = _noted(function.__globals__, names, found)
    for value in [*inside, *contents]:
        if isinstance(value, (ModuleType, type)) and not is_library(value):
            contents += _noted(value, names, found)
    return [*inside, *contents]


def is_library(value: object) -> bool:
    """Whether a module, or a class, or the class of an object is of a library that keeps books."""
    if isinstance(value, ModuleType):
        top = value.__name__.partition(".")[0]
        return top in _CLOSED and top != _OPEN
    return _is_closed(value if isinstance(value, type) else type(value))


def _noted(owner: object, names: Iterable[str], found: Surroundings) -> list[object]:
    """The values of those names that a namespace has, all of which count from now on."""
    space: Space = owner if isinstance(owner, dict) else vars(owner)
    here = [name for name in names if name in space and not name.startswith("__")]
    key = id(owner if isinstance(owner, type) else space)  # that of a class is made anew each time
    known = found.spaces.setdefault(key, (space, {}))[1]
    known.update(dict.fromkeys(here))
    return [space[name] for name in here]


def _names(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in code, perhaps as text, and in the code inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


def content(cell: CellType) -> object:
    """What a function encloses in a cell; one that nothing was put in has no content."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
