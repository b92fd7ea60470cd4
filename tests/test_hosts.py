"""The names by which a machine alone is asked."""

from __future__ import annotations

import pytest

from grpo_dist.hosts import is_this_machine


@pytest.mark.parametrize(
    "host", ["", "localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:8000", "127.8.9.1", "[::1]:8000"]
)
def test_this_machine(host: str) -> None:
    assert is_this_machine(host)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]",
     "[::1", "evil.example@127.0.0.2.x", "0.0.0.0", " ", "2130706433"],
)  # fmt: skip
def test_others(host: str) -> None:
    assert not is_this_machine(host)
