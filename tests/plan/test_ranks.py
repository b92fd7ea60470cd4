"""What parts of the config reach what the ranks are built from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config.command import AnyCommand
from grpo_dist.config.keys import leaf_keys
from grpo_dist.config.load import load_command
from grpo_dist.config.schema_roles import OptimConfig
from grpo_dist.engines.settings import RankSettings
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT
from grpo_dist.plan.plan import make_plan
from grpo_dist.plan.roles import table_of
from tests.adapters import write_adapter


def settings(*overrides: str, command: Any = REWARD_MODEL, steps: int = 100) -> RankSettings:
    config = load_command([*overrides], command)[0]
    return make_plan(config, steps).ranks(config.role)


def test_a_reward_model_gets_a_head_of_one_output_drawn_with_the_runs_seed() -> None:
    model = settings("trainer.seed=7", "data.seed=9").model
    assert (model.num_labels, model.new_head_seed, model.small_new_head, model.lora) == (1, 7, False, None)
    assert (model.key, model.section) == ("model.path", "model")


def test_a_language_model_keeps_its_output_layer_and_may_get_factors() -> None:
    model = settings(command=SFT).model
    assert (model.num_labels, model.new_head_seed, model.lora) == (0, None, None)
    lora = settings("model.lora_rank=4", "model.lora_alpha=8", command=SFT).model.lora
    assert lora is not None
    assert (lora.lora_rank, lora.lora_alpha, lora.targets, lora.lora_adapter_path) == (4, 8.0, "all-linear", None)


def test_exported_adapters_name_their_base_model(tmp_path: Path) -> None:
    """By the name of the hub, which the section has wherever the model is on a machine."""
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


def test_numbers_of_the_optimizer_and_of_passes() -> None:
    found = settings(
        "optim.lr=3e-4", "optim.betas=[0.8,0.95]", "optim.clip_grad=0.5", "data.micro_batch_size_per_gpu=6"
    )
    assert found.optimizer is not None
    assert (found.optimizer.lr, found.optimizer.betas, found.grad_clip) == (3e-4, (0.8, 0.95), 0.5)
    assert found.update is not None
    assert (found.update.micro_batch_size, found.update.max_token_len) == (6, None)
    by_tokens = settings("data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=99")
    assert by_tokens.update is not None
    assert by_tokens.update.max_token_len == 99


@pytest.mark.parametrize(
    ("override", "layout"), [("model.use_remove_padding=true", "shared"), ("model.use_remove_padding=false", "padded")]
)
def test_layouts(override: str, layout: str) -> None:
    assert settings(override).model.layout == layout


def test_memory_and_types() -> None:
    changes = ("engine.param_offload=true", "engine.optimizer_offload=true", "engine.defer_grad_sync=true")
    model = settings(*changes, "engine.dtype=bf16", "engine.fsdp_size=1").model
    assert (model.fsdp_config.param_offload, model.optimizer_offload, model.fsdp_config.defer_grad_sync) == (
        True,
        True,
        True,
    )
    assert (model.model_dtype, model.compute_dtype, model.fsdp_config.fsdp_size) == ("fp32", "bf16", 1)


PPO = ("recipe=ppo", "reward_model.model.path=builtin:tiny-qwen3")


@pytest.mark.parametrize(("command", "overrides"), [(GRPO, PPO), (SFT, ()), (REWARD_MODEL, ())])
def test_every_key_of_the_advice_is_one_of_the_command(command: AnyCommand, overrides: tuple[str, ...]) -> None:
    config, _ = load_command(list(overrides), command)
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
