"""Commands that are called in the tests' own process."""

from collections.abc import Callable
from typing import Any

import pytest

from grpo_dist.cli.entry import main

Call = Callable[..., Any]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls `grpo-dist` with these words; it ends with `code` and shows no traceback. Returns what it has said."""

    def call(*words: object, code: int = 0) -> Any:
        assert main([*map(str, words)]) == code
        said = capsys.readouterr()
        # A library's log handler may still hold the stream of an earlier test, which logging tells with a traceback.
        assert "Traceback" not in said.err.replace("--- Logging error ---\nTraceback", "")
        return said

    return call
