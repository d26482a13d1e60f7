"""Goldens, and the groups of tests: a test belongs to the group of its directory."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Times are no property: machines differ. Where only a change may fail, examples are the same ones.
settings.register_profile("any", deadline=None)
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile(os.environ.get("FXPIPE_EXAMPLES", "any"))

GROUPS = ("pure", "cpu", "dist", "gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for group in GROUPS:
            if group in item.path.parent.parts:
                item.add_marker(group)


class Golden:
    """Compares text with a file of tests/golden, or writes it with --update-golden."""

    def __init__(self, update: bool) -> None:
        self.update = update
        self.folder = Path(__file__).parent / "golden"

    def check(self, name: str, text: str) -> None:
        file = self.folder / f"{name}.txt"
        if self.update:
            file.write_text(f"{text}\n", encoding="utf-8")
        assert file.exists(), f"{file.name} is missing; run pytest --update-golden"
        assert f"{text}\n" == file.read_text(encoding="utf-8")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(bool(request.config.getoption("--update-golden")))
