"""What cannot fit is refused, and what may not fit is noted: with the key, its value and what makes room, in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config.load import load_command
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import REWARD_MODEL, SFT, load_config
from grpo_dist.plan.memory import CUDA_GIB, GRAPHS_GIB, NCCL_GIB, memory_estimate, memory_problems
from tests.config.refusals import refused
from tests.memory_cells import MODELS
from tests.messages import refuses, says

MODEL, ACTOR, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
GPU = "cluster.gpu_memory_gib"
RUN = ("data=arithmetic", "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64",
       "data.max_prompt_length=512", "data.max_response_length=1024", "trainer.dry_run=config")  # fmt: skip
ALONE = ("cluster=node8", "cluster.ref_world_size=1")


@pytest.fixture
def folder(tmp_path: Path):
    def write(model: str) -> str:
        (tmp_path / "config.json").write_text(json.dumps(MODELS[model] | {"model_type": "qwen3"}))
        return f"{MODEL}.path={tmp_path}"

    return write


def noted(*run: str) -> str:
    """The note on memory of a config that is not refused; "" if there is none."""
    return "".join(note for note in load_config([*RUN, *run])[1] if "by the estimate" in note)


def test_states_are_refused_and_a_peak_is_noted(folder) -> None:
    """An actor of 8B on 4 GPUs: 30.5 GiB of weights, gradients and states; with its passes, CUDA and NCCL 41.3."""
    run = (*ALONE, folder("Qwen3-8B"))
    actor = (memory_estimate(load_config([*RUN, *run])[0], MODELS["Qwen3-8B"]) or [])[0]
    context = CUDA_GIB + NCCL_GIB
    states, peak = sum(actor.states.values()), sum(actor.parts.values()) + context
    text = refused(*RUN, *run, f"{GPU}={states * 0.99}")
    says(
        text,
        f"{MODEL}.path=",
        "actor's weights 7.63 + actor's gradients 7.63 + actor's optimizer 15.3",
        f"{GPU}={states * 0.99:g}",
    )
    keys = ("lora_rank=32", "trainer.n_gpus_per_node", "trainer.nnodes", "smaller model")
    places = [text.index(key) for key in keys]
    assert places == sorted(places)
    text = noted(*run, f"{GPU}={peak * 0.99}")
    says(text, f"{MODEL}.path", f"actor's CUDA {context:g}", f"{peak:.3g} GiB", f"{GPU}={peak * 0.99:g}")
    keys = ("ppo_micro_batch_size_per_gpu", "optimizer_offload=true", *keys)
    places = [text.index(key) for key in keys]
    assert places == sorted(places)
    assert noted(*run, f"{GPU}={states * 1.01}"), "the smallest that is not refused"
    assert noted(*run, f"{GPU}={peak * 1.01}") == ""


def test_without_a_gpu_there_is_nothing_to_say(folder) -> None:
    assert noted("cluster=cpu", folder("Qwen3-0.6B"), f"{GPU}=0.1",
                 f"{MODEL}.override_config.max_position_embeddings=4096") == ""  # fmt: skip


def test_an_engine_that_does_not_fit_its_share_of_a_gpu(folder) -> None:
    """15.3 GiB of weights; half of 30 GiB is less."""
    lora = (f"{MODEL}.lora_rank=1", f"{ROLLOUT}.gpu_memory_utilization=0.5", "cluster=node8", folder("Qwen3-8B"))
    text = refused(*RUN, *lora, f"{GPU}=30")
    says(text, "rollout", "weights 15.3 = ", "15 GiB", f"{ROLLOUT}.gpu_memory_utilization=0.5", f"{GPU}=30")
    says(text, f"{ROLLOUT}.tensor_model_parallel_size")
    load_config([*RUN, *lora, f"{GPU}=30", f"{ROLLOUT}.tensor_model_parallel_size=2"])
    cache = f"{ROLLOUT}.kv_cache_memory_gib=20"
    says(refused(*RUN, *lora, f"{GPU}=30", cache), "rollout", "weights 15.3", "cache 20 = 35.3 GiB")


def test_a_reference_beside_the_actor_takes_turns_with_it(folder) -> None:
    """The actor at its peak, the reference where it waits, CUDA and NCCL of both."""
    run = ("cluster=node8", folder("Qwen3-8B"))
    actor, _, ref = memory_estimate(load_config([*RUN, *run])[0], MODELS["Qwen3-8B"]) or []
    context = CUDA_GIB + NCCL_GIB
    certain, peak = sum(actor.states.values()) + ref.waiting, sum(actor.parts.values()) + ref.waiting + 2 * context
    says(refused(*RUN, *run, f"{GPU}={certain * 0.99}"), "actor and ref", "ref 3.81", "param_offload=true")
    says(noted(*run, f"{GPU}={peak * 0.99}"), "actor and ref", f"ref {ref.waiting + context:.3g}")
    assert noted(*run, f"{GPU}={peak * 1.01}") == ""
    away = f"{REF}.fsdp_config.param_offload=true"
    assert noted(*run, away, f"{GPU}={peak - ref.waiting + 0.1}") == ""


def test_an_engine_that_sleeps_leaves_its_share_to_the_update(folder) -> None:
    """Of 13.5 GiB the engine has 4.72; the update takes 8.9. Asleep it leaves CUDA's memory and graphs."""
    run = ("cluster=single_gpu", folder("Qwen3-0.6B"), f"{GPU}=13.5")
    says(refused(*RUN, *run), "actor and rollout and ref", "rollout 4.72 = 13.6 GiB", f"{ROLLOUT}.free_cache_engine")
    sleeps = f"{ROLLOUT}.free_cache_engine=true"
    says(noted(*run, sleeps), f"rollout {CUDA_GIB + GRAPHS_GIB}", "14.4 GiB")
    for without in (
        f"{ROLLOUT}.enforce_eager=true",
        f"+{ROLLOUT}.engine_kwargs.vllm.sleep_mode_offload_cudagraph=true",
    ):
        assert noted(*run, sleeps, without) == ""


def test_one_gpu_of_24_gb_holds_8b_with_lora_in_turns_with_an_engine(folder) -> None:
    """In a sync by ipc there are the engine's weights, and the actor's largest tensor."""
    turns = (f"{ROLLOUT}.free_cache_engine=true", f"{ROLLOUT}.gpu_memory_utilization=0.85",
             f"{ACTOR}.fsdp_config.param_offload=true", f"{MODEL}.enable_gradient_checkpointing=true",
             f"{MODEL}.enable_activation_offload=true", f"{ACTOR}.use_dynamic_bsz=true",
             f"{ACTOR}.ppo_max_token_len_per_gpu=6144", f"{MODEL}.lora_rank=32",
             f"{ROLLOUT}.max_num_seqs=64")  # fmt: skip
    run = ("cluster=single_gpu", folder("Qwen3-8B"), *turns)
    assert noted(*run, f"{GPU}=23.6") == ""
    says(noted(*run, f"{GPU}=22"), "3.82", "18.3", "22.1 GiB")


def test_two_roles_that_train_on_one_gpu(folder) -> None:
    kept = ("critic.model.fsdp_config.optimizer_offload=false", "critic.model.fsdp_config.param_offload=false")
    run = ("cluster=single_gpu", "recipe=ppo", folder("Qwen3-0.6B"))
    assert noted(*run, f"{GPU}=24.2") == ""
    says(refused(*RUN, *run, *kept, f"{GPU}=22"), "actor and rollout and ref and critic", "param_offload=true")


def test_a_validation_alone_needs_no_memory_for_gradients_and_optimizer(folder) -> None:
    run = (*ALONE, folder("Qwen3-8B"), f"{GPU}=24")
    says(refused(*RUN, *run), "actor's optimizer 15.3")
    load_config([*RUN, *run, "trainer.val_only=true"])


@pytest.mark.parametrize(("model", "gib"), [("qwen3_0_6b", 23.6), ("qwen3_1_7b", 79.1), ("qwen3_1_7b", 44.3)])
def test_one_gpu_holds_the_models_that_it_is_said_to_hold(model: str, gib: float) -> None:
    assert noted(f"model={model}", "cluster=single_gpu", f"{GPU}={gib}") == ""


def test_parameters_that_were_counted_go_before_those_that_config_json_makes_likely(folder) -> None:
    config, _ = load_config([*RUN, "cluster=node8", folder("Qwen3-8B")])
    whole, less = (
        {role.role: role.parts["weights"] for role in memory_estimate(config, MODELS["Qwen3-8B"], number) or []}
        for number in (0, 4_000_000_000)
    )
    assert whole["actor"] == pytest.approx(7.63, abs=0.01)
    assert less == pytest.approx({"actor": 4e9 * 4 / 4 / 2**30, "rollout": 4e9 * 2 / 2**30, "ref": 4e9 * 2 / 4 / 2**30})
    assert list(memory_problems(config, MODELS["Qwen3-8B"], 30, None)) != []
    assert list(memory_problems(config, MODELS["Qwen3-8B"], 30, None, 1_000_000_000)) == []


def test_all_processes_in_the_memory_of_a_machine(folder) -> None:
    """On CPU tensors, of which states are refused; on GPUs copies for checkpoints and what is offloaded are noted."""
    model, sizes = folder("Qwen3-0.6B"), MODELS["Qwen3-0.6B"]
    config, _ = load_config([*RUN, model, f"{MODEL}.override_config.max_position_embeddings=4096"])
    roles = memory_estimate(config, sizes) or []
    needed = sum(sum(role.states.values()) for role in roles)
    (problem,) = memory_problems(config, sizes, None, needed * 0.99)
    says(problem.text, "1 actor 8.88", "1 rollout", "1 ref", f"{needed:.3g} GiB", "CPU memory")
    assert list(memory_problems(config, sizes, None, needed * 1.01)) == []
    whole = sum(sum(role.parts.values()) + sum(role.host.values()) for role in roles)
    (note,) = memory_problems(config, sizes, None, whole * 0.99, certain=False)
    says(note.text, f"{whole:.3g} GiB")
    assert list(memory_problems(config, sizes, None, whole * 1.01, certain=False)) == []

    config, _ = load_config([*RUN, model, "cluster=node8"])
    host = sum(4 * sum(role.host.values()) for role in memory_estimate(config, sizes) or [])
    (note,) = memory_problems(config, sizes, None, host * 0.99, certain=False)
    says(note.text, "4 actor", f"{host:.3g} GiB")
    assert list(memory_problems(config, sizes, None, host * 0.5)) == [], "it may do with less"
    assert list(memory_problems(config, None, 0.1, 0.1)) == [], "nothing is known of the model"


@pytest.mark.parametrize("command", [REWARD_MODEL, SFT], ids=lambda command: command.name)
def test_a_command_that_trains_one_model(command: Any, folder, tmp_path: Path) -> None:
    """8B on 2 GPUs: 14.7 or 15.3 GiB of weights for each, as much of gradients, and twice of states."""
    folder("Qwen3-8B")
    run = [f"model.path={tmp_path}", "trainer.n_gpus_per_node=2", "data.max_length=2048", "trainer.dry_run=config"]
    with refuses(ConfigError, f"model.path={tmp_path}", f"{GPU}=50", "gradients", "trainer.n_gpus_per_node"):
        load_command([*run, f"{GPU}=50"], command)
    role = command.schema.role
    _, notes = load_command([*run, f"{GPU}=64"], command)
    says(notes, f"model.path={tmp_path}", role, "data.micro_batch_size_per_gpu", f"{GPU}=64")
    _, notes = load_command([*run, f"{GPU}=80"], command)
    assert not any("estimate" in note for note in notes)
