from __future__ import annotations

import os
import shutil

import pytest


@pytest.fixture(scope="session")
def bwrap() -> None:
    """For tests that run programs in bubblewrap, which continuous integration must have."""
    if shutil.which("bwrap") is None and not os.environ.get("CI"):
        pytest.skip("apt-get install bubblewrap")
