"""Mistakes that people make, each answered with the key and what to do."""

import pytest

from grpo_dist.config.keys import ELSEWHERE, leaf_keys
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT, load_config
from tests.messages import says

A, R, M = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "model"))

MISTAKES = {
    # names
    "the wrong section": ("actor.ppo_mini_batch_size=8", f"{A}.ppo_mini_batch_size"),
    "a hyphen": ("trainer.save-freq=5", "trainer.save_freq"),
    "a mistake in a mapping": (f"{A}={{ppo_epoch:2}}", f"{A}.ppo_epochs?"),
    "a section for a key": (f"{A}.optim=adamw", " lr,"),
    "a section of sections for a key": ("actor_rollout_ref=x", "model, actor, rollout, ref"),
    "a group that is not there": ("model=qwen3_7b", "hf, qwen3_0_6b, qwen3_1_7b, qwen3_8b, smollm2_135m, tiny;"),
    "a group misspelt": ("model=qwen3_7b", "model=qwen3_1_7b"),
    "a removed key": ("~trainer.seed", "null"),
    "a key of Hydra": ("hydra.run.dir=x", "hydra.run.dir:"),
    "a place in a list": ("trainer.logger.0=x", "trainer.logger.0:"),
    # forms
    "dashes": ("--trainer.seed=1", "trainer.seed"),
    "dashes and another name": ("--learning-rate=1e-6", f"{A}.optim.lr"),
    "a flag of its own": ("--use_wandb", "trainer.logger=[console,wandb]"),
    "a flag of Hydra": ("--multirun", "--help"),
    "a sweep": ("trainer.seed=1,2", "trainer.seed=[1,2]"),
    "a package": ("model@actor=tiny", "(@)"),
    "nothing": ("", "'':"),
    "a model for a group": ("model=Qwen/Qwen3-0.6B", f"{M}.path=Qwen/Qwen3-0.6B"),
    "a file for a group": ("data=rows.jsonl", "data.train_files=rows.jsonl"),
    "an open bracket": ("trainer.logger=[console", "[ "),
    "a name that resembles none": ("data.foo=1", "--help"),
    "Python's None": (f"{A}.clip_ratio_low=None", "null"),
    # ranges
    "a share of a prompt": ("data.train_batch_size=1.5", "whole number"),
    "more memory than there is": (f"{R}.gpu_memory_utilization=1.2", "1"),
    "percent for a share": (f"{R}.gpu_memory_utilization=80", "1"),
    "an estimator misspelt": ("algorithm.adv_estimator=reinforce_pp", "'reinforce_plus_plus'?"),
    "another engine": (f"{R}.name=hf", "vllm"),
    # keys against each other
    "no model": ("model=hf", f"{M}.path=Qwen/Qwen3-0.6B"),
    "no rows": ("data=files", "data.train_files="),
    "a reward file that is not there": ("custom_reward_function.path=rewrad.py", "file"),
    "validation of nothing": (["trainer.val_only=true", "data.val_files=null"], "set data.val_files"),
    "too many prompts without a filter": ("data.gen_batch_size=64", "algorithm.filter_groups.enable=true"),
    "too few prompts without a filter": ("data.gen_batch_size=24", "null"),
    "prompts in halves without a filter": ("data.gen_batch_size=16", "null"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_message_names_the_key_and_the_fix(mistake: str) -> None:
    overrides, advice = MISTAKES[mistake]
    overrides = [overrides] if isinstance(overrides, str) else overrides
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    message = str(caught.value)
    key = overrides[0].lstrip("-~").partition("=")[0]
    says(message, key)
    says(message.replace(overrides[0], ""), advice)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "override",
    [
        "custom_reward_function.reward_kwarg={api_key: SECRET123}",
        "custom_reward_function.reward_kwargs={api_key: SECRET123",
        "custom_reward_function.reward_kwargs.api_key=SECRET123,SECRET123",
        "custom_reward_function.reward_kwargs=[{api_key: SECRET123}]",
        f"{R}.agent.agent_kwargs={{hf_token: SECRET123, 1: b}}",
        "reward_model.model.api_key=SECRET123",
    ],
)
def test_no_message_shows_a_secret(override: str) -> None:
    try:
        said = "\n".join(load_config([override])[1])
    except ConfigError as error:
        said = str(error)
    assert override.partition("=")[0].rpartition(".")[2] in said
    assert "SECRET123" not in said


def test_other_libraries_names_lead_to_keys_that_exist() -> None:
    known = {key for command in (GRPO, REWARD_MODEL, SFT) for key in leaf_keys(command.schema)}
    assert {each.partition("=")[0] for entry in ELSEWHERE.values() for each in entry.write} <= known
    assert all(entry.write or entry.why for entry in ELSEWHERE.values())
    names = {
        name for name, entry in ELSEWHERE.items() if {each.partition("=")[0] for each in entry.write} & set(leaf_keys())
    }
    assert not any(key.rpartition(".")[2] in names and key.count(".") == 1 for key in leaf_keys())
