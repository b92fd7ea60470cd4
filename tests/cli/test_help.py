"""`grpo-dist help KEY`: a key is found by a part of its name, with its default, meaning, and the groups that set it."""

import re
from pathlib import Path

import pytest

from grpo_dist.cli.help import COMMON, explain, matches
from grpo_dist.config.command import all_keys
from grpo_dist.config.keys import leaf_keys
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import COMMANDS, GRPO
from tests.cli.conftest import Call
from tests.messages import refuses, says

ACTOR = "actor_rollout_ref.actor"
LR = f"{ACTOR}.optim.lr"


@pytest.mark.parametrize("typed", ["lr", LR, f"{LR}=3", "optim.lr"])
def test_a_key_is_told_with_its_default_and_its_groups(typed: str, call: Call) -> None:
    told = call("help", typed).out.split("\n\n")[0]
    assert told.startswith(f"{LR}\n  Peak learning rate")
    says(told, "default: 1e-06", "model=tiny: 0.0001", "model=qwen3_8b: 1e-06")


def test_other_keys_groups_and_commands(call: Call) -> None:
    clip = "actor_rollout_ref.actor.clip_ratio", "critic.cliprange_value", "recipe=dapo: 0.2"
    says(call("help", "clip").out, *clip)
    says(call("help", "recipe").out, "recipe=dapo", "* recipe=grpo")
    for typed, key in ((["lr"], "optim.lr"), (["batch", "size"], "data.train_batch_size")):
        assert call("help", "sft", *typed).out.startswith(f"{key}\n")
    says(call("help", "data.messages_key", code=2).err, "data.messages_key", "sft data.messages_key")


@pytest.mark.parametrize(
    ("typed", "first"),
    [
        ("batch size", ["data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"]),
        ("batch", ["data.train_batch_size"]),
        ("size train", ["data.train_batch_size"]),  # in any order
        ("gradient checkpointing", ["actor_rollout_ref.model.enable_gradient_checkpointing"]),
        ("gpu memory", ["actor_rollout_ref.rollout.gpu_memory_utilization", "cluster.gpu_memory_gib"]),
        ("kl", [f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"]),
        ("rollout.n", ["actor_rollout_ref.rollout.n"]),  # before names in which some word begins with n
        ("num generations", ["actor_rollout_ref.rollout.n"]),  # another library's name
        ("temprature", ["actor_rollout_ref.rollout.temperature"]),
        ("wandb", ["trainer.logger"]),  # in its description alone
        ("clip range", ["critic.cliprange_value"]),
    ],
)
def test_names_come_before_descriptions_and_common_keys_before_others(typed: str, first: list[str]) -> None:
    assert matches(typed, GRPO, all_keys(GRPO))[: len(first)] == first


def test_what_other_libraries_call_a_key() -> None:
    text = explain("loss_type", "train")
    says(text.splitlines()[0], "loss_type", "actor_rollout_ref.actor.loss_agg_mode", "dr_grpo")
    assert text.splitlines()[2] == "actor_rollout_ref.actor.loss_agg_mode"
    assert explain("use_vllm", "train").startswith("use_vllm ")
    for typed in ("batch bananas", "--"):
        with refuses(ConfigError, f"{typed}:", "grpo-dist help"):
            explain(typed, "train")


def test_common_keys_are_those_of_their_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "common_keys.md").read_text()
    cells = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    assert {key for cell in cells for key in re.findall(r"`([\w.]+)`", cell)} - set(GRPO.group_options()) == COMMON


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_is_explained(command: str) -> None:
    config = COMMANDS[command]
    keys = all_keys(config)
    assert sorted(keys) == sorted(leaf_keys(config.schema))
    for name in keys:
        assert explain(name, command).startswith(f"{name}\n  {keys[name].comment}\n  default: ")
    if command == "train":
        says(explain("trainer.health.kl.threshold", "train"), "default: 1.0", "docs/metrics.md")
        says(explain("trainer.health.kl.action", "train"), "recipe=distill: off")
