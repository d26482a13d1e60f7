"""What a model's code reads beside its modules: class attributes, globals, closures and defaults.

    surroundings(values, classes) -> Surroundings

Code is followed from function to function, by the names that it mentions, and into the classes of
the objects that it meets. That of torch, numpy and the standard library is not: it keeps books of
its own, and gives the same for the same arguments.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import setitem
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

Space = Mapping[str, Any]
_CLOSED = {*sys.stdlib_module_names, "torch", "numpy", "fxpipe"}
_OPEN = "__main__"  # a script is not the library's module of that name
# Of each class of a module, or of a custom autograd function.
_BEGIN = ("forward", "backward", "setup_context")
# What runs without being named. (Not `__init__`: from there code leads into half of all libraries.)
_UNNAMED = ("__call__", "__getattr__", "__getitem__")
CONTAINERS = (dict, list, tuple, set, frozenset)
LARGE = 256  # a container outside of the modules that holds more is a cache


@dataclass(frozen=True)
class Surroundings:
    """spaces: the names that code reads in each namespace; classes: those of the model's modules,
    and of other objects; cells: what functions enclose; defaults: those of their parameters;
    mentioned: all names in code, wherever they lead."""

    spaces: dict[int, tuple[Space, dict[str, None]]] = field(default_factory=dict)
    classes: dict[type, None] = field(default_factory=dict)
    cells: dict[int, CellType] = field(default_factory=dict)
    defaults: list[object] = field(default_factory=list)
    mentioned: dict[str, None] = field(default_factory=dict)

    def named(self) -> Iterator[tuple[Space, tuple[str, ...]]]:
        """Every namespace with the names that count in it."""
        return ((space, tuple(names)) for space, names in self.spaces.values() if names)


def surroundings(values: Iterable[object], classes: Iterable[type]) -> Surroundings:
    """All that these functions and objects, and the forward of these classes, may read."""
    search = _Search()
    for cls in classes:
        search.enter(cls)
    search.pending += values
    while search.pending or search.fresh:
        while search.pending:
            search.follow(search.pending.pop())
        search.name()
    return search.found


class _Search:
    """What was found so far; pending: values to look at; names: those that code mentions, of which
    the fresh ones were not looked for in the classes yet."""

    def __init__(self) -> None:
        self.found = Surroundings()
        self.pending: list[object] = []
        self.names = dict.fromkeys(_BEGIN)
        self.fresh: dict[str, None] = {}
        self._seen: set[object] = set()

    def follow(self, value: object) -> None:
        """Note what code behind a value reads."""
        if type(value) in CONTAINERS:
            self._open(value)
        elif not isinstance(value, ModuleType):
            self.enter(value if isinstance(value, type) else type(value), _UNNAMED)
        for function in _functions(value):
            if self._is_new(id(function)) and not _is_closed(function):
                own = dict.fromkeys(_names(function.__code__))
                self.pending += _read(function, own, self.found)
                self.fresh |= own

    def enter(self, given: type, also: tuple[str, ...] = ()) -> None:
        """Look for names in a class and its bases from now on. also: for these as well."""
        if _is_closed(given) or not self._is_new((given, also)):
            return
        for cls in (base for base in given.__mro__ if not _is_closed(base)):
            names = () if cls in self.found.classes else self.names
            self.found.classes[cls] = None
            self.pending += _noted(cls, (*names, *also), self.found)

    def name(self) -> None:
        """Look for the names that are new in every class."""
        new = [name for name in self.fresh if name not in self.names]
        self.names |= self.fresh
        self.found.mentioned.update(self.fresh)
        self.fresh = {}
        self.pending += [v for cls in self.found.classes for v in _noted(cls, new, self.found)]

    def _open(self, container: Any) -> None:
        if len(container) <= LARGE and self._is_new(id(container)):
            self.pending += container.values() if isinstance(container, dict) else container

    def _is_new(self, key: object) -> bool:
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new


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
    contents += _noted(function.__globals__, names, found)
    contents += _imported(function, names)
    return [*contents, *_inside(contents, names, found)]


def _imported(function: FunctionType, names: Iterable[str]) -> list[object]:
    """The modules that a function may import while it runs; those of its package without it."""
    package = (function.__globals__.get("__package__") or "").split(".")
    above = [".".join(package[:depth]) + "." for depth in range(1, len(package) + 1)]
    full = (before + name for name in names for before in ("", *above))
    return [sys.modules[name] for name in full if name in sys.modules]


def _inside(values: Iterable[object], names: Iterable[str], found: Surroundings) -> list[object]:
    """What modules and classes hold by these names, and those that they hold."""
    read: list[object] = []
    pending, seen = list(values), set[int]()
    while pending:
        value = pending.pop()
        if (
            isinstance(value, (ModuleType, type))
            and not is_library(value)
            and id(value) not in seen
        ):
            seen.add(id(value))
            more = _noted(value, names, found)
            read += more
            pending += more
    return read


def is_library(value: object) -> bool:
    """Whether a module, or a class, or the class of an object is of a library that keeps books."""
    if isinstance(value, ModuleType):
        top = value.__name__.partition(".")[0]
        return top in _CLOSED and top != _OPEN
    return _is_closed(value if isinstance(value, type) else type(value))


def _noted(owner: object, names: Iterable[str], found: Surroundings) -> list[object]:
    """The values of those names that a namespace has, all of which count from now on."""
    space: Space = owner if isinstance(owner, dict) else vars(owner)
    here = [name for name in names if name in space]
    key = id(owner if isinstance(owner, type) else space)  # that of a class is made anew each time
    known = found.spaces.setdefault(key, (space, {}))[1]
    known.update(dict.fromkeys(here))
    return [space[name] for name in here]


def _names(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in code, perhaps as text, and in the code inside it."""
    yield from (name for name in code.co_names if not name.startswith("__"))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isidentifier() and constant[:2] != "__":
            yield constant


def content(cell: CellType) -> object:
    """What a function encloses in a cell; one that nothing was put in has no content."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


class Slot(NamedTuple):
    """A place that code reads, to be looked at and to be filled."""

    get: Callable[[], Any]
    put: Callable[[Any], None]


def slots(found: Surroundings) -> Iterator[Slot]:
    """The globals, class attributes and cells that code reads."""
    classes = {id(cls): cls for cls in found.classes}
    for key, (space, names) in found.spaces.items():
        owner = classes.get(key)
        for name in names if isinstance(space, dict) or owner is not None else ():
            fill = partial(setattr, owner) if owner is not None else partial(setitem, space)
            yield Slot(partial(space.get, name), partial(fill, name))
    for cell in found.cells.values():
        yield Slot(partial(content, cell), partial(setattr, cell, "cell_contents"))
