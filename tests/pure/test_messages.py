"""Which text is part of a message, by its place in the source."""

import sys
from typing import Any

import pytest

from fxpipe.messages import in_message


class Number:
    """Notes whether it is written down in a message."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def __repr__(self) -> str:
        self.found.append(in_message(sys._getframe(1)))
        return "7"


class Reporter:
    """Functions that are called as those which report."""

    @staticmethod
    def _check(condition: bool, message: Any = "") -> bool:
        if callable(message):
            message()
        return condition

    warning = info = _check


def test_arguments_of_checks_and_errors_are_messages() -> None:
    number, log = Number(), Reporter()
    log._check(True, f"one {number}")
    log._check(
        True,
        f"over {number} lines {number}",
    )
    log._check(True, lambda: f"later {number}")
    log.warning(True, "%s and %s" % (1, number))  # noqa: UP031
    log.info(True, "{}".format(number) + str(number))  # noqa: UP032
    with pytest.raises(ValueError, match="bad: 7"):
        raise ValueError(f"bad: {number}")
    assert number.found == [True] * 8


def test_what_may_be_computed_from_is_none() -> None:
    number, log = Number(), Reporter()
    table = {f"{number}": True}
    log._check(table[f"{number}"], "text of a condition")
    kept = log.info(True, f"{number}")
    assert f"{number}" == "7" and kept, "text of a condition"
    exec(compile("str(number)", "<no source>", "exec"), {"number": number})
    assert number.found == [False] * 5
