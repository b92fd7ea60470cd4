"""Changes that the plan proposes: they load, they fit, and the step that is estimated with them is as said."""

from __future__ import annotations

from grpo_dist.config.load import load_config
from grpo_dist.config.model_shape import model_config_at_hand
from grpo_dist.config.shorter_steps import LEAST_SAVING, shorter_steps
from grpo_dist.config.step_estimate import step_estimate

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RUN = ("cluster=node8", "model=qwen3_8b", "data.train_batch_size=960", f"{ACTOR}.ppo_mini_batch_size=240",
       "data.max_prompt_length=512", "data.max_response_length=1024")  # fmt: skip
MODEL = model_config_at_hand("Qwen/Qwen3-8B")


def seconds(*overrides: str) -> float:
    found = step_estimate(load_config([*RUN, *overrides])[0], MODEL)
    assert found is not None
    return found.total


def shorter(*overrides: str) -> dict[str, float]:
    config, _ = load_config([*RUN, *overrides])
    return {text: found for found, text in shorter_steps(config, MODEL, seconds(*overrides))}


def test_what_is_proposed_is_as_fast_on_smaller_gpus() -> None:
    """Where the cache holds fewer sequences, which another placement does not change."""
    small = ("cluster.gpu_memory_gib=55", "data.max_response_length=4096",
             "actor_rollout_ref.ref.fsdp_config.param_offload=true",
             f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=8192")  # fmt: skip
    found = shorter(*small)
    assert found
    for text, total in found.items():
        assert seconds(*small, *text.split(" and ")) == total <= seconds(*small) * (1 - LEAST_SAVING), text


def test_what_is_proposed_is_as_fast_as_said_and_fits() -> None:
    found = shorter("cluster.gpu_memory_gib=79")
    now = seconds()
    assert "trainer.max_staleness=1" in found
    assert any("cluster.actor_world_size=5" in text for text in found)
    assert any("cluster.colocate=all" in text for text in found)
    assert list(found.values()) == sorted(found.values())
    for text, total in found.items():
        assert total <= now * (1 - LEAST_SAVING)
        assert seconds("cluster.gpu_memory_gib=79", *text.split(" and ")) == total, text


def test_nothing_is_proposed_that_does_not_fit_or_is_refused() -> None:
    small = ("cluster.gpu_memory_gib=52", f"{ROLLOUT}.gpu_memory_utilization=0.7")
    assert not any("colocate" in text for text in shorter(*small)), "26 GiB for an engine leave the actor too little"
    moves = "actor_rollout_ref.ref.ref_model_sync_steps=5"
    assert not any("max_staleness" in text for text in shorter(moves)), "sampling ahead is refused with it"


def test_where_all_share_or_nothing_helps_nothing_is_said() -> None:
    assert shorter("cluster.colocate=all", f"{ROLLOUT}.gpu_memory_utilization=0.4") == {}
    config, _ = load_config([*RUN])
    assert shorter_steps(config, MODEL, now=1.0) == []
