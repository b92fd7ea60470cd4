"""Tests of the marks on the fields of the schema: what a checkpoint does with another value of each key."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_dist.config.field_types import Resume
from grpo_dist.config.keys import leaf_keys, resume_mark
from grpo_dist.config.schema import RunConfig
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT


def test_a_key_that_the_schema_no_longer_has_is_part_of_the_experiment() -> None:
    """But below a section whose keys are all free, it is free too."""
    assert resume_mark("actor_rollout_ref.actor.gone", RunConfig) is None
    assert resume_mark("cluster.gone", RunConfig) == Resume.FREE


ROLES = "actor_rollout_ref"
HELD = ("dtype", "use_torch_compile")
LORA = {"lora_rank", "lora_alpha", "target_modules", "exclude_modules"}
ORDER = {"trainer.seed", "data.seed", "data.shuffle"}
LENGTH = {"trainer.total_epochs", "trainer.total_training_steps"}
# By command: what a checkpoint refuses, what is only shown, and beginnings of keys of which none is free.
MARKED: list[tuple[Any, set[str], set[str], tuple[str, ...]]] = [
    (
        GRPO,
        ORDER
        | {"data.sampler.class_path", "data.sampler.class_name", "data.curriculum.enable"}
        | {f"{ROLES}.model.{name}" for name in LORA | {"path", "override_config"}}
        | {f"{ROLES}.actor.fsdp_config.model_dtype"}
        | {"reward_model.model.path", "reward_model.retrain.freq", "reward_model.retrain.model_dtype"}
        | {
            "critic.enable",
            "critic.model.path",
            "critic.model.override_config",
            "critic.model.fsdp_config.model_dtype",
        },
        {
            *(f"{ROLES}.{role}.fsdp_config.{name}" for role in ("actor", "ref") for name in HELD),
            *(f"{model}.model.fsdp_config.{name}" for model in ("critic", "reward_model") for name in HELD),
            *(f"{ROLES}.rollout.{name}" for name in ("dtype", "deterministic", "max_model_len", "engine_kwargs")),
            f"{ROLES}.model.lora.merge",
            f"{ROLES}.model.head_dtype",
            f"{ROLES}.actor.optim.optimizer",
            "critic.optim.optimizer",
            f"{ROLES}.rollout.agent.max_attempts",
        },
        (
            *(
                f"algorithm.{name}"
                for name in ("adv", "norm", "gamma", "lam", "gdpo", "kl", "use", "rollout", "mask", "min")
            ),
            *(
                f"{ROLES}.actor.{name}"
                for name in (
                    "optim",
                    "policy_loss",
                    "clip",
                    "kl_loss",
                    "loss",
                    "entropy",
                    "ppo_epochs",
                    "router_replay.",
                )
            ),
            *(f"{ROLES}.rollout.{name}" for name in ("n", "temperature", "top_", "min_", "stop", "agent.agent_kwargs")),
            *("critic.optim", "critic.cliprange_value", "reward_model.max_length", "reward_model.retrain.optim."),
            *("custom_reward_function", "reward.overlong_buffer", "trainer.max_staleness", "trainer.critic_warmup"),
            *("data.train_batch_size", "data.max_", "data.prompt", "data.system_prompt", "data.apply_chat_template"),
            *(
                "data.curriculum.exploration",
                "data.curriculum.decay",
                "data.curriculum.max_pass_rate",
            ),
        ),
    ),
    (
        SFT,
        ORDER | {f"model.{name}" for name in LORA | {"path", "override_config"}} | {"engine.model_dtype"},
        {f"engine.{name}" for name in HELD} | {"optim.optimizer"},
        ("optim", "data.train_batch_size", "data.max_length", "data.messages_key", "data.apply_chat_template"),
    ),
    (
        REWARD_MODEL,
        ORDER | {"model.path", "model.override_config", "engine.model_dtype"},
        {f"engine.{name}" for name in HELD} | {"optim.optimizer"},
        ("optim", "data.train_batch_size", "data.max_length", "data.step_"),
    ),
]


@pytest.mark.parametrize(("command", "refused", "shown", "defining"), MARKED, ids=["grpo", "sft", "reward_model"])
def test_the_marks_of_every_key(command: Any, refused: set[str], shown: set[str], defining: tuple[str, ...]) -> None:
    """A key without a mark is part of the experiment; no key that decides what is trained is marked as free."""
    marks = {key: resume_mark(key, command.schema) for key in leaf_keys(command.schema)}
    kinds = {kind: {key for key, mark in marks.items() if mark and mark.kind == kind} for kind in ("refused", "shown")}
    assert kinds == {"refused": refused, "shown": shown}
    assert {key for key, mark in marks.items() if mark == Resume.LENGTH} == LENGTH
    assert all(mark.why for mark in marks.values() if mark and mark.kind == "refused")
    for start in defining:
        keys = [key for key in marks if key.startswith(start)]
        assert keys, start
        assert [key for key in keys if marks[key] == Resume.FREE] == []
