"""verl's scripts run with the module name changed: keys of ours, renamed ones, ones without effect, refused ones."""

from pathlib import Path

import pytest

from grpo_dist.config.foreign_keys import FOREIGN_KEYS, RENAMED, foreign_key
from grpo_dist.config.keys import is_free_form, leaf_keys, section_keys
from grpo_dist.config.load import load_config
from grpo_dist.errors import ConfigError
from tests.messages import says

# Keys of 75 GRPO-like example scripts of verl 0.9.1, with how many scripts use each, most used first.
KEYS = [line.split("\t") for line in (Path(__file__).parents[1] / "golden/verl_grpo_keys.tsv").read_text().splitlines()]
USES = {key: int(count) for key, count, _ in KEYS[1:]}


def is_known(key: str) -> bool:
    return key in leaf_keys() or key in section_keys() or is_free_form(key)


def notes(*overrides: str) -> list[str]:
    return load_config([*overrides, "trainer.dry_run=config"])[1]


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(list(overrides))
    return str(caught.value)


def test_every_key_of_verls_scripts_has_an_answer() -> None:
    assert [key for key in USES if not (is_known(key) or key in RENAMED or foreign_key(key))] == []


def test_the_37_most_used_keys_have_an_effect() -> None:
    assert all(is_known(key) for key in list(USES)[:37])


def test_no_key_is_both_ours_and_foreign() -> None:
    assert not set(leaf_keys()) & {*FOREIGN_KEYS, *RENAMED}
    assert all(is_known(key) for key in RENAMED.values())


def test_a_renamed_key_takes_effect() -> None:
    key = "reward_model.reward_kwargs.overlong_buffer_cfg"
    config, said = load_config([f"+{key}.enable=true", f"+{key}.len=16", f"+{key}.penalty_factor=0.5"])
    buffer = config.reward.overlong_buffer
    assert (buffer.enable, buffer.len, buffer.penalty_factor) == (True, 16, 0.5)
    says(said, f"{key}.len", "reward.overlong_buffer.len")


@pytest.mark.parametrize(
    "override",
    [
        "trainer.max_critic_ckpt_to_keep=2",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
        "+actor_rollout_ref.actor.profiler.enable=true",
        "critic.model.tokenizer_path=some/policy",
        "critic.model.lora_rank=0",
        "+critic.model.fsdp_config.wrap_policy.min_num_params=0",
        "reward_model.model.use_remove_padding=True",
        "trainer.default_hdfs_dir=null",
        "trainer.default_hdfs_dir=None",
        "reward_model.reward_manager=dapo",
        "trainer.save_on_sigterm=true",
    ],
)
def test_keys_without_a_meaning_are_said_once(override: str) -> None:
    said = [note for note in notes(override) if note.startswith("no effect here: ")]
    assert len(said) == 1
    assert override.lstrip("+") in said[0]


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "strategy=fsdp2"),
        ("actor_rollout_ref.actor.strategy=megatron", "fsdp or fsdp2"),
        ("actor_rollout_ref.rollout.name=sglang", "vllm"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend=nixl", "object_store, broadcast, ipc"),
        ("actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3", "engine_kwargs.vllm"),
        ("data.image_key=images", "text"),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=4", "1"),
        ("reward_model.rollout.name=vllm", "http_reward"),
        ("critic.strategy=megatron", "fsdp or fsdp2"),
        ("critic.model.lora_rank=8", "0"),
        ("critic.megatron.x=1", "critic.strategy=fsdp2"),
        ("distillation.distillation_loss.loss_mode=k1", "actor_rollout_ref.ref.model.path"),
        ("reward_model.enable_resource_pool=true", "cluster.reward_model_world_size"),
        ("reward_model.reward_manager=mine", "naive or dapo or prime or batch"),
        ("trainer.save_on_sigterm=false", "true"),
        ("async_training.staleness_threshold=0.5", "trainer.max_staleness"),
        ("algorithm.rollout_is_threshold=2", "algorithm.rollout_correction.rollout_is_threshold"),
        ("data.custom_cls.path=mine.py", "verl's schema"),
        ("actor_rollout_ref.rollout.multi_turn.enable=true", "rollout.agent.default_agent_loop"),
        ("actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml", "default_agent_loop"),
        ("--config-name=ppo_megatron_trainer.yaml", "out"),
    ],
)
def test_what_is_not_here_is_refused_by_name(override: str, advice: str) -> None:
    message = refused(override)
    says(message, override, advice)


def test_the_longest_section_answers() -> None:
    assert foreign_key("actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype") is not None
    assert foreign_key("critic.checkpoint.save_contents") is FOREIGN_KEYS["critic.checkpoint.*"]
    assert foreign_key("critic.megatron.x") is FOREIGN_KEYS["critic.megatron.*"]
    assert foreign_key("data.train_batch_size") is None
