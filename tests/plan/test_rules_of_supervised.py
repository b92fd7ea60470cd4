"""A command that trains one model: what is wrong with its keys or between them, and what follows from them."""

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
OWN = "model.path=Qwen/Qwen3-0.6B"
GPUS = f"{OWN} trainer.n_gpus_per_node=2 trainer.nnodes=2"
NODES = (OWN, "trainer.n_gpus_per_node=8", "trainer.nnodes=2")


def load(*overrides: str, command: Any = REWARD_MODEL) -> SupervisedConfig:
    return load_command(" ".join(overrides).split(), command)[0]


# What is asked for, and what the only problem names.
REFUSED = {
    "trainer.val_only=true data.val_files=null": "trainer.val_only=true data.val_files",
    "model=hf": "model.path=Qwen/Qwen3-0.6B",
    "data=files data.max_length=64": "data.train_files=",
    f"{GPUS} cluster.world_size=5": "cluster.world_size=5 trainer.nnodes=2 trainer.n_gpus_per_node=2 4 null",
    "engine.fsdp_size=2 cluster.world_size=3": "engine.fsdp_size=2 cluster.world_size=3 divisor -1",
    "data.use_dynamic_bsz=true data.max_token_len_per_gpu=63 data.max_length=64":
        "data.max_token_len_per_gpu=63 data.max_length=64 raise",
    "data.max_length=513": "data.max_length=513 model.path=builtin:tiny-qwen3 512 positions max_position_embeddings",
}  # fmt: skip


@COMMANDS
@pytest.mark.parametrize("run", REFUSED)
def test_what_does_not_fit_is_refused_with_keys_values_and_remedy(run: str, command: Any, elsewhere: None) -> None:
    with refuses(ConfigError, *REFUSED[run].split()) as caught:
        load(run, command=command)
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


def test_your_own_model_and_rows_leave_the_built_in_settings_behind(tmp_path: Path) -> None:
    (rows := tmp_path / "rows.jsonl").write_text('{"prompt": "1+1?", "chosen": "2", "rejected": "3"}\n')
    assert [load_command([], command)[1] for command in (REWARD_MODEL, SFT)] == [[], []]
    given = [OWN, f"data.train_files={rows}", "trainer.resume_from_path=x"]
    config, told = load_command(given, REWARD_MODEL)
    for parts in (["model=hf", "model.path"], ["data=files", "data.train_files"], ["trainer.resume_from_path=x"]):
        says(told, *parts)
    assert (config.optim.lr, config.data.max_length, config.data.val_files) == (1e-5, 2048, ())
    assert config.model.enable_gradient_checkpointing


@COMMANDS
def test_help_names_the_files_with_all_keys_and_its_examples_are_valid(command: Any, elsewhere: None) -> None:
    text = usage(command)
    assert text.count(f"grpo-dist {command.name}") == 1 + len(command.examples)
    assert all(str(file) in text for file in command.files)
    for group, options in command.group_options().items():
        assert all(f"{group}={option}" in text for option in options)
    for _, overrides in command.examples:
        load(overrides, "trainer.dry_run=config", command=command)


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
WRONG = {"data.train_batch_size=0": "1", "data.max_length=many": "number", "data.micro_batch_size_per_gpu=0": "1"}
WRONG |= {"optim.clip_grad=0": "0", "engine.dtype=int8": "fp32, bf16", "optim.lr_scheduler_type=cosin": "cosine"}
WRONG |= {"trainer.nccl_timeout=0": "1", "cluster.world_size=0": "1"}
# Names, and a key of the same command.
NAMES = {"trainer.max_steps=1": "trainer.total_training_steps", "data.train_bach_size=1": "data.train_batch_size"}


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
