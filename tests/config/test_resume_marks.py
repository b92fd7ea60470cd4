"""The marks on the fields of the schema: what a checkpoint does with another value of each key."""

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


ORDER = "trainer.seed data.seed data.shuffle"
LENGTH = {"trainer.total_epochs", "trainer.total_training_steps"}
LORA = "model.lora_rank model.lora_alpha model.target_modules model.exclude_modules"


def under(section: str, names: str) -> str:
    return " ".join(f"{section}.{name}" for name in names.split())


# By command: what a checkpoint refuses, what is only shown, and beginnings of keys of which none is free.
MARKED = [
    (
        GRPO,
        [
            ORDER,
            "data.sampler.class_path data.sampler.class_name data.curriculum.enable",
            under("actor_rollout_ref", f"{LORA} model.path model.override_config actor.fsdp_config.model_dtype"),
            under("reward_model", "model.path retrain.freq retrain.model_dtype"),
            under("critic", "enable model.path model.override_config model.fsdp_config.model_dtype"),
        ],
        [
            *(under(f"actor_rollout_ref.{role}.fsdp_config", "dtype use_torch_compile") for role in ("actor", "ref")),
            *(under(f"{model}.model.fsdp_config", "dtype use_torch_compile") for model in ("critic", "reward_model")),
            under("actor_rollout_ref", "model.lora.merge model.head_dtype actor.optim.optimizer"),
            under("actor_rollout_ref.rollout", "dtype deterministic max_model_len engine_kwargs agent.max_attempts"),
            "critic.optim.optimizer",
        ],
        [
            under("algorithm", "adv norm gamma lam gdpo kl use rollout mask min"),
            under("actor_rollout_ref.actor", "optim policy_loss clip kl_loss loss entropy ppo_epochs router_replay."),
            under("actor_rollout_ref.rollout", "n temperature top_ min_ stop agent.agent_kwargs"),
            "critic.optim critic.cliprange_value reward_model.max_length reward_model.retrain.optim.",
            "custom_reward_function reward.overlong_buffer trainer.max_staleness trainer.critic_warmup",
            under("data", "train_batch_size max_ prompt system_prompt apply_chat_template"),
            under("data.curriculum", "exploration decay max_pass_rate"),
        ],
    ),
    (
        SFT,
        [ORDER, LORA, "model.path model.override_config engine.model_dtype"],
        ["engine.dtype engine.use_torch_compile optim.optimizer"],
        ["optim data.train_batch_size data.max_length data.messages_key data.apply_chat_template"],
    ),
    (
        REWARD_MODEL,
        [ORDER, "model.path model.override_config engine.model_dtype"],
        ["engine.dtype engine.use_torch_compile optim.optimizer"],
        ["optim data.train_batch_size data.max_length data.step_"],
    ),
]


@pytest.mark.parametrize(("command", "refused", "shown", "defining"), MARKED, ids=["grpo", "sft", "reward_model"])
def test_the_marks_of_every_key(command: Any, refused: list[str], shown: list[str], defining: list[str]) -> None:
    """A key without a mark is part of the experiment; no key that decides what is trained is marked as free."""
    marks = {key: resume_mark(key, command.schema) for key in leaf_keys(command.schema)}
    kinds = {kind: {key for key, mark in marks.items() if mark and mark.kind == kind} for kind in ("refused", "shown")}
    assert kinds == {"refused": {*" ".join(refused).split()}, "shown": {*" ".join(shown).split()}}
    assert {key for key, mark in marks.items() if mark == Resume.LENGTH} == LENGTH
    assert all(mark.why for mark in marks.values() if mark and mark.kind == "refused")
    for start in " ".join(defining).split():
        keys = [key for key in marks if key.startswith(start)]
        assert keys, start
        assert [key for key in keys if marks[key] == Resume.FREE] == []
