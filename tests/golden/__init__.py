"""Cases computed with verl's own functions; see README.md."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch


@cache
def _all() -> list[dict[str, Any]]:
    files = [Path(__file__).parent / name for name in ("verl_core_algos.json", "verl_critic.json")]
    return [case for file in files for case in json.loads(file.read_text())["cases"]]


def cases(kind: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """The cases of one kind whose method is among `names`; fails if there are none for a name."""
    found = [case for case in _all() if case["kind"] == kind and case["name"] in names]
    assert {case["name"] for case in found} == set(names)
    return found


@cache
def correction() -> dict[str, Any]:
    """The inputs that all cases of the rollout correction share, and the cases."""
    return json.loads((Path(__file__).parent / "verl_correction.json").read_text())


def tensors(values: dict[str, Any]) -> dict[str, Any]:
    """Number lists as tensors, other values unchanged."""
    return {k: v if k == "index" else torch.tensor(v) for k, v in values.items()}
