"""What the table of roles names is there, and what of the config reaches the ranks of a command that trains one model.

What loops over the table is tested where it is.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config.command import AnyCommand
from grpo_dist.config.keys import leaf_keys, value_of
from grpo_dist.config.load import load_command
from grpo_dist.config.schema_roles import OptimConfig
from grpo_dist.engines.settings import RankSettings
from grpo_dist.plan.commands import COMMANDS, GRPO, REWARD_MODEL, SFT
from grpo_dist.plan.plan import make_plan
from grpo_dist.plan.roles import ROLES, SUPERVISED_ROLES, Role, models_of, roles_of, table_of
from grpo_dist.plugins.registry import load_attribute
from tests.adapters import write_adapter

ROWS = [*ROLES.values(), *SUPERVISED_ROLES.values()]
ALL = ("recipe=ppo", "reward_model.enable=true", "reward_model.model.path=builtin:tiny-qwen3")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name} {row.size_key}")
def test_code_that_a_row_names_is_there(row: Role) -> None:
    for kind in ("worker", "group"):
        assert inspect.isclass(load_attribute(getattr(row, kind), key=kind))


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_keys_and_models_of_the_rows_are_those_of_the_config(command: Any) -> None:
    """The policy is first among the models."""
    config, _ = load_command(list(ALL) if command is GRPO else [], command)
    assert [row.name for row in roles_of(config)] == (list(ROLES) if command is GRPO else [config.role])
    for row in roles_of(config):
        for key in filter(None, (row.section, row.size_key, row.fsdp)):
            value_of(config, key)
    for model in models_of(config):
        assert value_of(config, model.key) == model.path
    assert (models_of(config)[0].title, models_of(config)[0].path) == ("model", config.model_path)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_key_of_the_advice_is_one_of_the_command(command: AnyCommand) -> None:
    config, _ = load_command(list(ALL) if command is GRPO else [], command)
    advised = [
        make_plan(config).model(row, row.model(config)).room
        for row in table_of(config).values()
        if (row.present(config) or command is GRPO) and row.model(config) is not None
    ]
    assert len(advised) == (4 if command is GRPO else 1)
    for advice in advised:
        keys = re.findall(r"\w+(?:\.\w+)+", advice)
        assert len(keys) >= 2
        assert set(keys) <= set(leaf_keys(command.schema))


# --- ranks -----------------------------------------------------------------------------------------------------------
def settings(*overrides: str, command: Any = REWARD_MODEL) -> RankSettings:
    config = load_command([*overrides], command)[0]
    return make_plan(config, 100).ranks(config.role)


def test_the_head_of_a_reward_model_is_drawn_with_the_runs_seed_and_sft_may_train_factors(tmp_path: Path) -> None:
    """Exported adapters name their base model as the hub does, as the section has it wherever the model is."""
    model = settings("trainer.seed=7", "data.seed=9").model
    assert (model.num_labels, model.new_head_seed, model.small_new_head, model.lora) == (1, 7, False, None)
    assert (model.key, model.section) == ("model.path", "model")
    model = settings(command=SFT).model
    assert (model.num_labels, model.new_head_seed, model.lora) == (0, None, None)
    lora = settings("model.lora_rank=4", "model.lora_alpha=8", command=SFT).model.lora
    assert lora is not None
    assert (lora.lora_rank, lora.lora_alpha, lora.targets, lora.lora_adapter_path) == (4, 8.0, "all-linear", None)
    adapter = f"model.lora_adapter_path={write_adapter(tmp_path)}"
    lora = settings(adapter, "model.path=owner/name", command=SFT).model.lora
    assert lora is not None
    assert (lora.lora_adapter_path, lora.path) == (str(tmp_path), "owner/name")


@pytest.mark.parametrize(
    ("overrides", "warmup"),
    [
        (("optim.lr_warmup_steps_ratio=0.25",), 25),
        (("optim.lr_warmup_steps=3", "optim.lr_warmup_steps_ratio=0.25"), 3),
        (("optim.lr_warmup_steps=0", "optim.lr_warmup_steps_ratio=0.25"), 0),
        (("optim.lr_warmup_steps_ratio=0",), 0),
    ],
)
def test_warmup(overrides: tuple[str, ...], warmup: int) -> None:
    found = settings(*overrides)
    assert isinstance(found.optimizer, OptimConfig)
    assert (found.optimizer.warmup_steps(found.total_steps), found.total_steps) == (warmup, 100)


def test_numbers_of_the_optimizer_of_passes_and_of_memory() -> None:
    found: Any = settings(
        *("optim.lr=3e-4", "optim.betas=[0.8,0.95]", "optim.clip_grad=0.5", "data.micro_batch_size_per_gpu=6"),
        *("engine.param_offload=true", "engine.optimizer_offload=true", "engine.defer_grad_sync=true"),
        *("engine.dtype=bf16", "engine.fsdp_size=1"),
    )
    assert (found.optimizer.lr, found.optimizer.betas, found.grad_clip) == (3e-4, (0.8, 0.95), 0.5)
    assert (found.update.micro_batch_size, found.update.max_token_len) == (6, None)
    model, shards = found.model, found.model.fsdp_config
    assert (shards.param_offload, model.optimizer_offload, shards.defer_grad_sync) == (True, True, True)
    assert (model.model_dtype, model.compute_dtype, shards.fsdp_size) == ("fp32", "bf16", 1)
    by_tokens: Any = settings("data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=99")
    assert by_tokens.update.max_token_len == 99
    layouts = [settings(f"model.use_remove_padding={value}").model.layout for value in ("true", "false")]
    assert layouts == ["shared", "padded"]
