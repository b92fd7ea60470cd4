"""A machine without a network."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest


def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Refuse every connection, and every question for an address, from now on; returns those that are tried."""
    tried: list[Any] = []

    def refuse(*target: Any, **_: Any) -> NoReturn:
        tried.append(target)
        raise ConnectionRefusedError(f"no network: {target}")

    for name in ("socket.connect", "socket.connect_ex", "getaddrinfo"):
        monkeypatch.setattr(f"socket.{name}", refuse)
    return tried
