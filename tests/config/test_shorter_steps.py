"""Changes that the plan proposes: they load, they fit, and the step that is estimated with them is as said."""

from __future__ import annotations

from grpo_dist.config.load import load_config
from grpo_dist.config.model_shape import model_config_at_hand
from grpo_dist.config.processor import physical_cores
from grpo_dist.config.shorter_steps import LEAST_SAVING, shorter_steps
from grpo_dist.config.step_estimate import step_estimate
from grpo_dist.config.step_rates import DecodeRates, MachineRates, PassRates, Rates, machine_rates

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RUN = ("cluster=node8", "model=qwen3_8b", "data.train_batch_size=960", f"{ACTOR}.ppo_mini_batch_size=240",
       "data.max_prompt_length=512", "data.max_response_length=1024")  # fmt: skip
MODEL = model_config_at_hand("Qwen/Qwen3-8B")
GPU = machine_rates("cuda", "NVIDIA H100 80GB HBM3")


def seconds(*overrides: str) -> float:
    found = step_estimate(load_config([*RUN, *overrides])[0], MODEL, GPU)
    assert found is not None
    return found.total


def shorter(*overrides: str) -> dict[str, float]:
    config, _ = load_config([*RUN, *overrides])
    return {text: found for found, text in shorter_steps(config, MODEL, seconds(*overrides), GPU)}


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
    assert shorter_steps(config, MODEL, 1.0, GPU) == []


def test_two_ranks_of_one_thread_instead_of_one() -> None:
    """Where a second thread does not help, a second rank does, and the plan says so."""
    passes = PassRates({128: 1e10}, 1e12)
    rates = Rates(1e10, passes, passes, DecodeRates(1e-4), {"object_store": 1e9}, exchange=1e12)
    machine = MachineRates("", {"1 fp32": rates})
    config, _ = load_config(["cluster.actor_world_size=1"])
    model = model_config_at_hand("builtin:tiny-qwen3")
    found = step_estimate(config, model, machine)
    assert found is not None
    told = shorter_steps(config, model, found.total, machine)
    if physical_cores() > 1:
        seconds, _ = next(each for each in told if "cluster.actor_world_size=" in each[1])
        assert seconds < found.total
