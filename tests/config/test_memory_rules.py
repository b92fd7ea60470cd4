"""What does not fit is refused, and with the settings that the message names it does fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from grpo_dist.config.load import load_config
from grpo_dist.config.memory import memory_estimate
from grpo_dist.config.model_rules import model_problems
from grpo_dist.config.rank_memory import CUDA_GIB
from tests.config.refusals import refused
from tests.memory_cells import MODELS
from tests.messages import says

MODEL, ACTOR, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
GPU = "cluster.gpu_memory_gib"
RUN = ("data=arithmetic", "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64",
       "data.max_prompt_length=512", "data.max_response_length=1024")  # fmt: skip
# NAME: (model, GiB of a GPU, overrides, keys of which the remedy names at least one)
TOO_LARGE: dict[str, tuple[str, float, tuple[str, ...], tuple[str, ...]]] = {
    "whole gradients": (
        "Qwen3-8B", 50, ("cluster=node8", f"{ACTOR}.fsdp_config.defer_grad_sync=true"), ("defer_grad_sync=false",)
    ),
    "activations": (
        "Qwen3-1.7B", 30, ("cluster=node8", f"{MODEL}.enable_gradient_checkpointing=false"),
        ("enable_gradient_checkpointing=true",)
    ),
    "a large token budget": (
        "Qwen3-8B", 60, ("cluster=node8", f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=131072"),
        ("ppo_max_token_len_per_gpu=16384",)
    ),
    "a long response": (
        "Qwen3-8B", 36,
        ("cluster=node8", "data.max_response_length=32768", f"{ACTOR}.use_dynamic_bsz=true",
         f"{ACTOR}.ppo_max_token_len_per_gpu=33280", f"{ACTOR}.fsdp_config.optimizer_offload=true",
         f"{ACTOR}.fsdp_config.param_offload=true"),
        ("enable_activation_offload=true",)
    ),
    "too few GPUs": ("Qwen3-8B", 23.6, ("cluster=node8",), ("trainer.nnodes=",)),
    "an engine on one GPU": (
        "Qwen3-32B", 79.1, ("cluster=multi_node", "trainer.nnodes=4"),
        ("tensor_model_parallel_size", "gpu_memory_utilization")
    ),
    "several at once": ("Qwen3-32B", 79.1, ("cluster=node8",), ("trainer.nnodes=",)),
    "one GPU": ("Qwen3-1.7B", 23.6, ("cluster=single_gpu",), ("lora_rank=",)),
    "one GPU, nothing offloaded": (
        "Qwen3-0.6B", 22,
        ("cluster=single_gpu", f"{ACTOR}.fsdp_config.optimizer_offload=false",
         f"{REF}.fsdp_config.param_offload=false"),
        ("ref.fsdp_config.param_offload=true",)
    ),
    "one GPU and a critic": (
        "Qwen3-0.6B", 22,
        ("cluster=single_gpu", "recipe=ppo", "critic.model.fsdp_config.optimizer_offload=false",
         "critic.model.fsdp_config.param_offload=false"),
        ("critic.model.fsdp_config",)
    ),
    "one small GPU": ("Qwen3-0.6B", 15.5, ("cluster=single_gpu",), ("free_cache_engine=true",)),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path):
    def write(model: str) -> str:
        (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
        return f"{MODEL}.path={tmp_path}"

    return write


def remedy(text: str) -> list[str]:
    """The overrides that a message names, up to an "or"."""
    return re.findall(r"[a-z_.]+=[^\s,]+", text.rpartition("; set ")[2].partition(", or ")[0])


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_is_too_large_is_refused_and_the_remedy_helps(folder, name: str) -> None:
    model, gib, overrides, wanted = TOO_LARGE[name]
    run = (folder(model), f"{GPU}={gib}", *overrides)
    text = refused(*RUN, *run)
    assert f"{GPU}={gib:g}" in text
    changes = remedy(text)
    assert any(key in text.rpartition("; ")[2] for key in wanted), text
    load_config([*RUN, *run, *changes])
    for change in changes:  # none of them too many
        if len(changes) > 1:
            refused(*RUN, *run, *(other for other in changes if other != change))


def test_an_actor_is_refused_at_its_peak(folder) -> None:
    """What it needs and a GiB for CUDA: a hundredth less does not fit, a hundredth more does."""
    run = ("cluster=node8", "cluster.ref_world_size=1", folder("Qwen3-8B"))
    config, _ = load_config([*RUN, *run])
    actor = (memory_estimate(config, MODELS["Qwen3-8B"]) or [])[0]
    needed = actor.total + CUDA_GIB
    text = refused(*RUN, *run, f"{GPU}={needed * 0.99}")
    says(text, "actor", "weights 7.63 + gradients 7.63 + optimizer 15.3 + ")
    load_config([*RUN, *run, f"{GPU}={needed * 1.01}"])


def test_an_engine_that_does_not_fit_its_share_of_a_gpu(folder) -> None:
    """15.3 GiB of weights; half of 30 GiB is less."""
    lora = (f"{MODEL}.lora_rank=1", f"{ROLLOUT}.gpu_memory_utilization=0.5", "cluster=node8", folder("Qwen3-8B"))
    text = refused(*RUN, *lora, f"{GPU}=30")
    says(text, "rollout", "weights 15.3 + ", "15 GiB", f"{ROLLOUT}.gpu_memory_utilization=0.5", f"{GPU}=30")
    load_config([*RUN, *lora, f"{GPU}=30", f"{ROLLOUT}.tensor_model_parallel_size=2"])
    cache = f"{ROLLOUT}.kv_cache_memory_gib=20"
    says(refused(*RUN, *lora, f"{GPU}=30", cache), "KV cache 20 = ")


@pytest.mark.parametrize(("model", "gib"), [("qwen3_0_6b", 23.6), ("qwen3_1_7b", 79.1), ("qwen3_1_7b", 44.3)])
def test_one_gpu_holds_the_models_that_it_is_said_to_hold(model: str, gib: float) -> None:
    load_config([*RUN, f"model={model}", "cluster=single_gpu", f"{GPU}={gib}"])


def test_passes_of_two_roles_at_once_on_one_gpu(folder) -> None:
    """Before the update the actor's and the reference's passes overlap; a long one of both is more than the update."""
    long = (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=128", f"{REF}.log_prob_micro_batch_size_per_gpu=128",
            f"{ACTOR}.ppo_mini_batch_size=32")  # fmt: skip
    run = (*long, "cluster=single_gpu", folder("Qwen3-0.6B"), f"{GPU}=20")
    text = refused(*RUN, *run)
    says(text, "actor and rollout and ref", "rollout 7 + actor ", " + ref ")
    load_config([*RUN, *run, *remedy(text)])


def test_a_reference_beside_the_actor_takes_turns_with_it(folder) -> None:
    """The actor at its peak, the reference where it waits, CUDA of both; sampling ahead, both at once."""
    offload = (f"{REF}.fsdp_config.param_offload=true", f"{ACTOR}.fsdp_config.optimizer_offload=true")
    run = ("cluster=node8", folder("Qwen3-8B"), *offload)
    config, _ = load_config([*RUN, *run])
    actor, _, ref = memory_estimate(config, MODELS["Qwen3-8B"]) or []
    assert ref.between == 0
    turns, together = actor.total + 2 * CUDA_GIB, actor.total + ref.total + 2 * CUDA_GIB
    says(refused(*RUN, *run, f"{GPU}={turns * 0.99}"), "actor and ref", f"actor {actor.total:.3g} + CUDA")
    load_config([*RUN, *run, f"{GPU}={turns * 1.01}"])
    ahead = (*run, "trainer.max_staleness=1")
    text = refused(*RUN, *ahead, f"{GPU}={together * 0.99}")
    says(text, f"actor {actor.total:.3g} + ref {ref.total:.3g} + CUDA", "weights 7.63 + gradients 7.63 + ")
    load_config([*RUN, *ahead, f"{GPU}={together * 1.01}"])


def test_an_engine_that_sleeps_leaves_its_share_to_the_update(folder) -> None:
    """Of 12 GiB the engine has 4.2, asleep 1; the update takes 8.9, CUDA of the others 2. Before it the actor holds
    2.2, the reference 2.1.
    """
    run = [*RUN, "cluster=single_gpu", folder("Qwen3-0.6B"), f"{GPU}=12"]
    asleep = f"{ROLLOUT}.free_cache_engine=true"
    says(refused(*run), "rollout 4.2 + actor 8.88 + CUDA", "2 = 15.1 GiB")
    load_config([*run, asleep])
    more = f"{ROLLOUT}.gpu_memory_utilization=0.6"
    says(refused(*run, asleep, more), "rollout 7.2 + actor 2.22 + ref 2.14 + CUDA")  # they share it with both
    kept = f"{ACTOR}.fsdp_config.optimizer_offload=false"
    says(refused(*run, asleep, kept), "rollout 1 + actor 12.1 + CUDA")  # its CUDA stays while it sleeps


def test_a_validation_alone_needs_no_memory_for_gradients_and_optimizer(folder) -> None:
    run = ("cluster=node8", "cluster.ref_world_size=1", folder("Qwen3-8B"), f"{GPU}=34")
    says(refused(*RUN, *run), "actor", "weights 7.63 + gradients 7.63 + optimizer 15.3 + ")
    load_config([*RUN, *run, "trainer.val_only=true"])


def test_parameters_that_were_counted_go_before_those_that_config_json_makes_likely(folder) -> None:
    config, _ = load_config([*RUN, "cluster=node8", folder("Qwen3-8B")])
    whole, less = (
        {role.role: role.parts["weights"] for role in memory_estimate(config, MODELS["Qwen3-8B"], number) or []}
        for number in (0, 4_000_000_000)
    )
    assert whole["actor"] == pytest.approx(7.63, abs=0.01)
    assert less == pytest.approx({"actor": 4e9 * 4 / 4 / 2**30, "rollout": 4e9 * 2 / 2**30, "ref": 4e9 * 2 / 4 / 2**30})
    assert list(model_problems(config, MODELS["Qwen3-8B"], 30, num_parameters=0)) != []
    assert list(model_problems(config, MODELS["Qwen3-8B"], 30, num_parameters=1_000_000_000)) == []


def test_the_processes_of_an_engine_in_the_memory_of_a_machine(folder) -> None:
    """Two share the engine's weights, and each has a KV cache of its own."""
    long = f"{MODEL}.override_config.max_position_embeddings=4096"
    one, two = (
        load_config([*RUN, folder("Qwen3-0.6B"), long, f"{ROLLOUT}.tensor_model_parallel_size={size}"])[0]
        for size in (1, 2)
    )
    shares = [(memory_estimate(config, MODELS["Qwen3-0.6B"]) or [])[1].parts for config in (one, two)]
    assert shares[0]["weights"] == 2 * shares[1]["weights"]
    assert shares[0]["KV cache"] == shares[1]["KV cache"] == 1.0
    (problem,) = model_problems(two, MODELS["Qwen3-0.6B"], None, 1.0)
    says(problem.text, "2 rollout", "1 GiB")


def test_all_processes_in_the_memory_of_a_machine(folder) -> None:
    """On CPU tensors and the process of each role; on GPUs copies for checkpoints and what is offloaded."""
    model = folder("Qwen3-0.6B")
    for run in ((model, f"{MODEL}.override_config.max_position_embeddings=4096"), (model, "cluster=node8")):
        config, _ = load_config([*RUN, *run])
        roles = memory_estimate(config, MODELS["Qwen3-0.6B"]) or []
        on_cpu = config.device == "cpu"
        counts = {"actor": 1, "rollout": 1, "ref": 1} if on_cpu else {"actor": 4, "rollout": 4, "ref": 4}
        needed = sum((r.host_total + (r.total if on_cpu else 0)) * counts[r.role] for r in roles)
        (problem,) = model_problems(config, MODELS["Qwen3-0.6B"], None, needed * 0.99)
        says(problem.text, f"{counts['actor']} actor", f"{needed:.3g} GiB", "CPU memory")
        assert list(model_problems(config, MODELS["Qwen3-0.6B"], None, needed * 1.01)) == []
    assert list(model_problems(config, MODELS["Qwen3-0.6B"], None, None)) == []
    assert list(model_problems(config, None, 0.1, 0.1)) == [], "nothing is known of the model"
