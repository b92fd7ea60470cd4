"""A stand-in for the hub's `datasets.load_dataset`, and the prompts of a file that a task has written."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.data import load_prompts
from grpo_dist.data.prompts import Prompt

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


def prompts_of(file: Path) -> list[Prompt]:
    """The rows of a file that a task has written, as a run reads them."""
    names = {"key": "f", "prompt_key": "prompt", "reward_fn_key": "data_source"}
    return load_prompts([str(file)], max_samples=-1, shuffle_seed=None, **names)
