"""When the reward model is retrained, and on what; with groups that only write down what they are asked."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_dist.config.load import load_config
from grpo_dist.engines.settings import LabelSettings
from grpo_dist.errors import DataError
from grpo_dist.protocol import DataProto, Mean, Sum
from grpo_dist.trainer.retraining import Retraining
from tests.messages import refuses

RETRAIN = "reward_model.retrain"


class Ranks:
    """Two ranks of a reward model."""

    def __init__(self) -> None:
        self.workers, self.steps = [None, None], []  # type: ignore[var-annotated]

    async def train(self, parts: list[DataProto], objective: object, step: int) -> dict[str, Any]:
        assert objective == LabelSettings()
        self.steps.append((step, [str(uid).partition(": ")[2] for part in parts if len(part) for uid in part["uid"]]))
        return {"reward_model/loss": Sum(float(len(self.steps))), "reward_model/accuracy": Mean(1.0, 2)}


def retraining(tmp_path: Path, *overrides: str) -> tuple[Retraining, Ranks]:
    """Each step samples six answers to a question of its own, the even ones right."""
    config = load_config(
        [
            "recipe=deepseekmath_iterative",
            "reward_model.model.path=builtin:tiny-qwen3",
            f"trainer.default_local_dir={tmp_path}",
            f"{RETRAIN}.freq=2",
            f"{RETRAIN}.train_batch_size=8",
            "reward_model.replay_share=0.5",
            *overrides,
        ]
    )[0]
    ranks = Ranks()

    async def write(batch: Any, path: str, conversations: dict[str, Any]) -> None:
        rows = [{"prompt": conversations["p"], "completions": [f"#### {i}"], "labels": [i % 2 == 0]} for i in range(6)]
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))

    return Retraining(config, ranks, SimpleNamespace(write_judged=write)), ranks  # type: ignore[arg-type]


def end(made: Retraining, step: int) -> dict[str, float]:
    task = SimpleNamespace(messages=[{"role": "user", "content": f"{step}+1=?"}])
    return asyncio.run(made.end_step(step, None, [SimpleNamespace(uid="p", task=task)]))  # type: ignore[arg-type, list-item]


def test_after_each_iteration_on_its_responses_and_a_share_of_those_before(tmp_path: Path) -> None:
    """12 rows in the first, 12 + 6 in the second, 8 a batch, twice over; a mean over the optimizer steps."""
    made, ranks = retraining(tmp_path, f"{RETRAIN}.train_epochs=2")
    assert (end(made, 1), ranks.steps) == ({}, [])
    first = end(made, 2)
    assert [(step, len(rows)) for step, rows in ranks.steps] == [(2, 8), (2, 4), (2, 8), (2, 4)]
    assert first["reward_model/loss"] == pytest.approx((1 + 2 + 3 + 4) / 4)
    assert (first["reward_model/fresh_rows"], first["reward_model/replayed_rows"]) == (12, 0)
    epochs = [sorted(row for _, rows in ranks.steps[i : i + 2] for row in rows) for i in (0, 2)]
    assert epochs[0] == epochs[1], "each row once an epoch"
    assert ranks.steps[0] != ranks.steps[2], "in another order"
    end(made, 3)
    second = end(made, 4)
    assert [(step, len(rows)) for step, rows in ranks.steps[4:]] == [(4, 8), (4, 8), (4, 2)] * 2
    assert (second["reward_model/fresh_rows"], second["reward_model/replayed_rows"]) == (12, 6)


def test_a_resumed_run_trains_on_the_same_rows(tmp_path: Path) -> None:
    whole, never_stopped = retraining(tmp_path)
    for step in range(1, 5):
        end(whole, step)
    again, ranks = retraining(tmp_path)
    again.resumed_from(tmp_path / "global_step_3", 3)
    end(again, 4)
    assert ranks.steps == never_stopped.steps[2:]
    elsewhere, _ = retraining(tmp_path / "elsewhere")
    elsewhere.resumed_from(tmp_path / "global_step_3", 3)
    assert sorted(file.name for file in (tmp_path / "elsewhere" / "replay").iterdir()) == [
        "1.jsonl",
        "2.jsonl",
        "3.jsonl",
    ]
    (tmp_path / "replay" / "1.jsonl").unlink()
    with refuses(DataError, "reward_model.replay_share", "replay/1.jsonl", "step 1"):
        again.resumed_from(tmp_path / "global_step_3", 3)
    without, _ = retraining(tmp_path, "reward_model.replay_share=0")
    without.resumed_from(tmp_path / "global_step_3", 3)
    (tmp_path / "replay" / "3.jsonl").unlink()
    with refuses(DataError, "replay/3.jsonl"):
        without.resumed_from(tmp_path / "global_step_3", 3)


def test_long_responses_are_left_out_and_counted(tmp_path: Path) -> None:
    made, ranks = retraining(tmp_path, "reward_model.max_length=1", f"{RETRAIN}.freq=1")
    with refuses(DataError, "reward_model.max_length=1"):
        end(made, 1)
    assert ranks.steps == []
