"""A command that trains one model: what is wrong with its keys or between them, and what follows from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config.command import usage
from grpo_dist.config.load import load_command
from grpo_dist.config.schema_job import SupervisedConfig
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import REWARD_MODEL, SFT
from grpo_dist.plan.placement import slots
from tests.messages import refuses, says

COMMANDS = pytest.mark.parametrize("command", [REWARD_MODEL, SFT], ids=["reward_model", "sft"])
GPUS = "model.path=Qwen/Qwen3-0.6B trainer.n_gpus_per_node=2 trainer.nnodes=2"

OWN = "model.path=Qwen/Qwen3-0.6B"
NODES = (OWN, "trainer.n_gpus_per_node=8", "trainer.nnodes=2")


def load(*overrides: str, command: Any = REWARD_MODEL) -> SupervisedConfig:
    return load_command(" ".join(overrides).split(), command)[0]


def notes(overrides: str = "", command: Any = REWARD_MODEL) -> list[str]:
    return load_command(overrides.split(), command)[1]


REFUSED: dict[str, tuple[str, list[str]]] = {
    "validation of nothing": ("trainer.val_only=true data.val_files=null", ["trainer.val_only=true", "data.val_files"]),
    "no model": ("model=hf", ["model.path=Qwen/Qwen3-0.6B"]),
    "no rows": ("data=files data.max_length=64", ["data.train_files="]),
    "more ranks than GPUs": (
        f"{GPUS} cluster.world_size=5",
        ["cluster.world_size=5", "trainer.nnodes=2", "trainer.n_gpus_per_node=2", "there are 4", "null"],
    ),
    "copies that do not fill the ranks": (
        "engine.fsdp_size=2 cluster.world_size=3",
        ["engine.fsdp_size=2", "cluster.world_size=3", "divisor", "-1"],
    ),
    "a budget below a row": (
        "data.use_dynamic_bsz=true data.max_token_len_per_gpu=63 data.max_length=64",
        ["data.max_token_len_per_gpu=63", "data.max_length=64", "raise"],
    ),
    "rows beyond the positions": (
        "data.max_length=513",
        ["data.max_length=513", "model.path=builtin:tiny-qwen3", "512 positions", "max_position_embeddings"],
    ),
}


@COMMANDS
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_keys_values_and_remedy(
    case: str, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides, parts = REFUSED[case]
    with refuses(ConfigError, *parts) as caught:
        load(overrides, command=command)
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]
    assert len(str(caught.value).splitlines()) == 2, str(caught.value)


def test_what_just_fits_is_taken(tmp_path: Path) -> None:
    load(f"{GPUS} cluster.world_size=4 engine.fsdp_size=2")
    load("data.use_dynamic_bsz=true data.max_token_len_per_gpu=64 data.max_length=64")
    load("data.max_token_len_per_gpu=63 data.max_length=64")  # no effect
    load("data.max_length=512")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert load(f"data.train_files={tmp_path}/rows.jsonl").data.max_length == 512, "the positions of the built-in model"
    load("data.max_length=513 +model.override_config.max_position_embeddings=513")


def test_keys_without_the_effect_that_they_name_are_told() -> None:
    assert notes() == notes(command=SFT) == []
    (note,) = notes("trainer.resume_from_path=x")
    assert note.startswith("trainer.resume_from_path")


def test_your_own_model_and_rows_leave_the_built_in_settings_behind(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1?", "chosen": "2", "rejected": "3"}) + "\n")
    config, told = load_command(["model.path=Qwen/Qwen3-0.6B", f"data.train_files={rows}"], REWARD_MODEL)
    says(told, "model=hf", "model.path")
    says(told, "data=files", "data.train_files")
    assert (config.optim.lr, config.data.max_length, config.data.val_files) == (1e-5, 2048, ())
    assert config.model.enable_gradient_checkpointing


@COMMANDS
def test_help_names_the_files_with_all_keys_and_its_examples_are_valid(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As dry runs of the config: models and files are elsewhere."""
    text = usage(command)
    assert text.count(f"grpo-dist {command.name}") == 1 + len(command.examples)
    assert all(str(file) in text for file in command.files)
    for group, options in command.group_options().items():
        assert all(f"{group}={option}" in text for option in options)
    monkeypatch.chdir(tmp_path)
    for _, overrides in command.examples:
        load(overrides, "trainer.dry_run=config", command=command)


# --- ranks, types and single keys -----------------------------------------------------------------------------------


@COMMANDS
@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [((), 2), ((OWN,), 1), (("cluster.world_size=3",), 3), (NODES, 16), ((*NODES, "cluster.world_size=4"), 4)],
)
def test_the_number_of_ranks(command: Any, overrides: tuple[str, ...], ranks: int) -> None:
    config = load(*overrides, command=command)
    assert config.world_size == ranks
    seats = [seat for slot in slots(config) for seat in slot.seats]
    assert [seat.role for seat in seats] == [config.role] * ranks


# What is refused, and what may be.
WRONG = {
    "data.train_batch_size=0": "1",
    "data.max_length=many": "number",
    "data.micro_batch_size_per_gpu=0": "1",
    "optim.clip_grad=0": "0",
    "engine.dtype=int8": "fp32, bf16",
    "optim.lr_scheduler_type=cosin": "cosine",
    "trainer.nccl_timeout=0": "1",
    "cluster.world_size=0": "1",
}
# Names, and a key of the same command.
NAMES = {
    "trainer.max_steps=1": "trainer.total_training_steps",
    "data.train_bach_size=1": "data.train_batch_size",
}


@COMMANDS
def test_what_is_wrong_is_said_with_key_and_value(command: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*WRONG, *NAMES, command=command)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == len(WRONG | NAMES)
    for override, part in (WRONG | NAMES).items():
        key = override.partition("=")[0]
        told = f"{key}:" if override in NAMES else override
        (line,) = (line for line in lines if told in line)
        says(line.replace(override, ""), part)
    assert "actor_rollout_ref" not in str(caught.value)
