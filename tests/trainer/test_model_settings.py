"""What a model's settings advise where a GPU is full: keys that are there, of the command whose role it is."""

from __future__ import annotations

import re

import pytest

from grpo_dist.config.command import AnyCommand
from grpo_dist.config.keys import leaf_keys
from grpo_dist.config.load import load_command
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT
from grpo_dist.plan.placement import placement
from grpo_dist.plan.roles import table_of
from grpo_dist.trainer.model_settings import model_settings

PPO = ("recipe=ppo", "reward_model.model.path=builtin:tiny-qwen3")


@pytest.mark.parametrize(("command", "overrides"), [(GRPO, PPO), (SFT, ()), (REWARD_MODEL, ())])
def test_every_key_of_the_advice_is_one_of_the_command(command: AnyCommand, overrides: tuple[str, ...]) -> None:
    config, _ = load_command(list(overrides), command)
    advised = [
        model_settings(config, row, placement(config)).room
        for row in table_of(config).values()
        if (row.present(config) or command is GRPO) and row.model(config) is not None
    ]
    assert len(advised) == (4 if command is GRPO else 1)
    for advice in advised:
        keys = re.findall(r"\w+(?:\.\w+)+", advice)
        assert len(keys) >= 2
        assert set(keys) <= set(leaf_keys(command.schema))
