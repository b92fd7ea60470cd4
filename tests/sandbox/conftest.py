from __future__ import annotations

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.sandbox import SandboxSettings, check


@pytest.fixture(scope="session")
def bwrap() -> None:
    """For tests that run programs in bubblewrap."""
    try:
        check(SandboxSettings())
    except ConfigError as error:
        pytest.skip(str(error))
