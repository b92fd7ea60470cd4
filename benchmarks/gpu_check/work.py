"""What a part is given, and the model that several of them read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.results import Findings
from benchmarks.gpu_check.scale import Scale


@dataclass(frozen=True)
class Work:
    """What a part is given.

    Attributes:
        device: "cuda" or "cpu".
        scale: of everything.
        folder: of the model, and for what a part writes besides its result.
        found: where its figures go.
        used_before: GiB of the GPU that were taken before this process had loaded anything; None: not known.
    """

    device: str
    scale: Scale
    folder: Path
    found: Findings
    used_before: float | None = None

    @property
    def model(self) -> Path:
        """The model's folder."""
        return self.folder / "model"

    @property
    def model_config(self) -> dict[str, Any]:
        """The model's config.json."""
        config: dict[str, Any] = json.loads((self.model / "config.json").read_text(encoding="utf-8"))
        return config

    @property
    def compute(self) -> str:
        """The type that a run computes in on this device."""
        return "bf16" if self.device == "cuda" else "fp32"

    def figure_of(self, part: str, what: str) -> float | None:
        """What another part has found before; None if it has not."""
        try:
            result = json.loads((self.folder / f"{part}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return next((each["value"] for each in result["figures"] if each["what"] == what), None)
