"""Numbers that the code before a boundary has read: they must not be used behind it."""

from collections.abc import Callable
from typing import Any, Protocol

from fxpipe.frames import calling_line


class Border(Protocol):
    """Knows whether the boundary has been called."""

    crossed: bool


class LeakError(Exception):
    """The suffix reads what the prefix has made, other than through the boundary's arguments."""


class Read(int):
    """An integer that the prefix has read from a tensor or a shape: it must not get across."""

    border: Border

    def __new__(cls, value: int, border: Border) -> "Read":
        made = super().__new__(cls, value)
        made.border = border
        return made

    def refuse(self) -> None:
        """Raises LeakError once the boundary is behind."""
        if self.border.crossed:
            raise LeakError(
                f"{calling_line()} uses the number {int.__repr__(self)}, which was read before the "
                "boundary: it differs between microbatches"
            )


def _arithmetic(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def run(self: Read, *others: Any) -> Any:
        self.refuse()
        made = plain(self, *others)
        return Read(made, self.border) if type(made) is int else made

    return run


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod"),
    *("truediv", "rtruediv", "pow", "rpow", "neg", "lt", "le", "gt", "ge", "eq", "ne", "bool"),
):
    setattr(Read, f"__{_name}__", _arithmetic(f"__{_name}__"))
Read.__hash__ = int.__hash__  # type: ignore[method-assign]
