"""Columns of a case as tensors, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.form import Values


def column(values: Values) -> Tensor:
    """Numbers as float32, as trainers have them; what is missing is nan."""
    return torch.tensor(with_nan(values))


def with_nan(values: Values) -> Values:
    """Numbers as floats; nan for what is missing."""
    if isinstance(values, list):
        return [with_nan(item) for item in values]
    return float("nan") if values is None else float(values)


def columns(inputs: dict[str, Any]) -> dict[str, Any]:
    """All columns of a case: `index` as it is, scores by name as tensors by name."""
    result: dict[str, Any] = {}
    for name, values in inputs.items():
        if isinstance(values, dict):
            result[name] = {key: column(scores) for key, scores in values.items()}
        else:
            result[name] = values if name == "index" else column(values)
    return result


def rows(values: Tensor | None) -> Values:
    """Numbers of a tensor."""
    assert values is not None
    return values.detach().double().tolist()
