"""A stand-in for the hub's `datasets.load_dataset`."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

Asked = list[tuple[str, str, str]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[dict[str, Any]]], Asked]:
    """Have the hub serve these rows for every split; returns the list of (name, config, split) that are asked for."""

    def serve(rows: list[dict[str, Any]]) -> Asked:
        asked: Asked = []

        def load_dataset(name: str, config: str, *, split: str) -> list[dict[str, Any]]:
            asked.append((name, config, split))
            return rows

        hub = types.ModuleType("datasets")
        hub.load_dataset = load_dataset  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", hub)
        return asked

    return serve
