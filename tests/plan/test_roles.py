"""What the rows of the table of roles name is there; what loops over them is tested where it is."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from grpo_dist.config.keys import value_of
from grpo_dist.config.load import load_command
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import SFTConfig
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT, load_config
from grpo_dist.plan.roles import ROLES, SUPERVISED_ROLES, Role, models_of, roles_of
from grpo_dist.plugins.registry import load_attribute

ROWS = [*ROLES.values(), *SUPERVISED_ROLES.values()]
ALL = ("recipe=ppo", "reward_model.enable=true", "reward_model.model.path=builtin:tiny-qwen3")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name} {row.size_key}")
def test_code_that_a_row_names_is_there(row: Role) -> None:
    worker, group = load_attribute(row.worker, key="worker"), load_attribute(row.group, key="group")
    assert inspect.isclass(worker)
    assert inspect.isclass(group)


@pytest.mark.parametrize("command", [GRPO, SFT, REWARD_MODEL], ids=lambda command: command.name)
def test_keys_and_models_of_the_rows_are_those_of_the_config(command: Any) -> None:
    config, _ = load_command(list(ALL) if command is GRPO else [], command)
    for row in roles_of(config):
        for key in filter(None, (row.section, row.size_key, row.fsdp)):
            value_of(config, key)
    for model in models_of(config):
        assert value_of(config, model.key) == model.path


def test_a_run_has_the_roles_that_its_config_asks_for() -> None:
    every, _ = load_config(list(ALL))
    assert [row.name for row in roles_of(every)] == list(ROLES)
    few, _ = load_config(["actor_rollout_ref.actor.use_kl_loss=false"])
    assert [row.name for row in roles_of(few)] == ["actor", "rollout", "reward"]
    assert [model.title for model in models_of(few)] == ["model"]
    assert [row.name for row in ROLES.values() if row.follows] == ["ref", "reward_model", "critic"]
    sft, _ = load_command([], SFT)
    assert [row.name for row in roles_of(sft)] == ["sft"]


def test_the_policy_is_first_among_the_models() -> None:
    for config in (load_config(list(ALL))[0], load_command([], SFT)[0]):
        first = models_of(config)[0]
        assert isinstance(config, RunConfig | SFTConfig)
        assert (first.title, first.path) == ("model", config.model_path)
