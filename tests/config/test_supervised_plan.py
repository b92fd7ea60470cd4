"""The plan of a command that trains one model: what is shown before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from grpo_dist.config.load import load_command
from grpo_dist.config.supervised import REWARD_MODEL, SFT
from grpo_dist.config.supervised_plan import format_plan, format_summary
from tests.messages import says

OWN = "model.path=Qwen/Qwen3-0.6B"


def plan(*overrides: str, command: Any = REWARD_MODEL) -> str:
    return format_plan(*load_command([*overrides], command))


def row(text: str, label: str) -> str:
    (line,) = (line for line in text.splitlines() if line.strip().startswith(f"{label}  "))
    return line.strip().removeprefix(label).strip()


def test_the_built_in_run() -> None:
    text = plan()
    assert row(text, "model") == "builtin:tiny-qwen3"
    says(row(text, "train data"), "builtin:arithmetic_pairs/train")
    says(row(text, "length"), "1 epoch", "64 rows", "lr 0.001")
    says(row(text, "ranks"), "2 ranks", "CPU", "weights fp32", "compute fp32")
    says(row(text, "passes"), 128, 64)
    assert row(text, "logs") == "jsonl, console, tensorboard"
    says(row(text, "rank"), "weights", "gradients", "optimizer", "GiB")
    says(row(text, "rank, CPU memory"), "GiB")


@pytest.mark.parametrize("command", [REWARD_MODEL, SFT], ids=["reward_model", "sft"])
def test_the_printed_config_is_the_whole_config(command: Any) -> None:
    config, notes = load_command(["trainer.seed=5"], command)
    printed = format_plan(config, notes).split("\n\n")[0].partition("\n")[2]
    assert command.schema.model_validate(yaml.safe_load(printed)) == config


def test_steps_tokens_and_gpus() -> None:
    more = ("trainer.total_training_steps=7", "data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=32768")
    text = plan(OWN, "trainer.n_gpus_per_node=8", "data.val_files=null", *more)
    says(row(text, "length"), "7 training steps", "64 rows", "lr 1e-05")
    says(row(text, "ranks"), "8 ranks", "8 GPUs", "weights fp32", "compute bf16")
    says(row(text, "passes"), "32,768")
    assert row(text, "validation data") == "none"


def test_sizes_that_are_not_known_are_not_guessed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("grpo_dist.config.supervised_plan.model_config_at_hand", lambda path: None)
    says(row(plan("model.path=some/model"), "rank"), "unknown", "config.json")


def test_notes_are_shown_in_the_plan_and_in_the_summary() -> None:
    config, notes = load_command(["trainer.test_freq=-1"], REWARD_MODEL)
    assert len(notes) == 1
    assert notes[0] in format_plan(config, notes)
    summary = format_summary(config, notes)
    assert f"note: {notes[0]}" in summary
    assert "resolved config" not in summary
    assert len(summary.splitlines()) < 12


def test_validation_alone_holds_weights_alone() -> None:
    text = row(plan("trainer.val_only=true"), "rank")
    says(text, "weights", "GiB")
    assert "optimizer" not in text
