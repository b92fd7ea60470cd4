"""The staleness map's cells by hand, the picture, and that every cell is a run that is accepted."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from benchmarks.staleness import CHOICES, STALENESS, draw, summary
from grpo_dist.plan.commands import load_config


def result(choice: str, staleness: int, seed: int, reward: float) -> dict[str, object]:
    cell = {"choice": choice, "max_staleness": staleness, "seed": seed}
    return cell | {"reward": reward, "accuracy": 0.5, "staleness": 1.5, "minutes": 1.0}


def test_cells_by_hand(tmp_path: Path) -> None:
    """3 seeds with 0.1, 0.2, 0.3: deviation 0.1, so 4.30 * 0.1 / sqrt(3). One seed has no interval."""
    results = [result("TIS", 4, seed, seed / 10) for seed in (1, 2, 3)] + [result("none", 64, 1, 0.25)]
    first, second = table = summary(results)
    assert (first["choice"], first["max_staleness"], first["seeds"], first["reward"]) == ("none", 64, 1, 0.25)
    assert math.isnan(first["+-"])
    assert (second["reward"], second["+-"]) == (pytest.approx(0.2), pytest.approx(0.2483, abs=1e-4))
    draw(table, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def overrides(choice: str) -> list[str]:
    return [f"{key}={'null' if value is None else value}" for key, value in CHOICES[choice].items()]


@pytest.mark.parametrize(("choice", "staleness"), list(itertools.product(CHOICES, STALENESS)))
def test_every_cell_is_a_run(choice: str, staleness: int) -> None:
    config = load_config([*overrides(choice), f"trainer.max_staleness={staleness}"])[0]
    assert config.rollout_is == ("token" if choice == "TIS" else None) or choice == "GSPO"
