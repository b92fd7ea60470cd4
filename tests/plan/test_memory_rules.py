"""What cannot fit is refused, and what may not fit is noted: with the key, its value and what makes room, in order."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config.load import load_command
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import REWARD_MODEL, SFT
from grpo_dist.plan.memory import CUDA_GIB, GRAPHS_GIB, NCCL_GIB, RoleMemory, memory_estimate, memory_problems
from tests.memory_cells import MODELS
from tests.messages import refuses, says
from tests.plan import asked
from tests.plan.asked import overrides

Write = Callable[[str], str]
GPU, CONTEXT = "cluster.gpu_memory_gib", CUDA_GIB + NCCL_GIB
RUN = "data=arithmetic  data.train_batch_size=64  actor.ppo_mini_batch_size=64  trainer.dry_run=config  "
RUN += "data.max_prompt_length=512  data.max_response_length=1024"


@pytest.fixture
def folder(tmp_path: Path) -> Write:
    def write(model: str) -> str:
        (tmp_path / "config.json").write_text(json.dumps(MODELS[model] | {"model_type": "qwen3"}))
        return f"model.path={tmp_path}"

    return write


def load(*run: str) -> Any:
    return asked.load(RUN, *run)


def estimate(model: str, *run: str) -> list[RoleMemory]:
    return memory_estimate(load(*run), MODELS[model]) or []


def refused(*run: str) -> str:
    return asked.refused(RUN, *run)


def noted(*run: str) -> str:
    """The note on memory of a config that is not refused; "" if there is none."""
    return "".join(note for note in asked.notes(RUN, *run) if "by the estimate" in note)


def test_states_are_refused_and_a_peak_is_noted(folder: Write) -> None:
    """An actor of 8B on 4 GPUs: 30.5 GiB of weights, gradients and states; with its passes, CUDA and NCCL 41.3."""
    run = ("cluster=node8  refs=1", folder("Qwen3-8B"))
    actor = estimate("Qwen3-8B", *run)[0]
    states, peak = sum(actor.states.values()), sum(actor.parts.values()) + CONTEXT
    keys = ("lora_rank=32", "trainer.n_gpus_per_node", "trainer.nnodes", "smaller model")
    text = refused(*run, f"{GPU}={states * 0.99}")
    summands = "actor's weights 7.63 + actor's gradients 7.63 + actor's optimizer 15.3"
    says(text, *overrides(run[1]), summands, f"{GPU}={states * 0.99:g}")
    assert re.search(".*".join(map(re.escape, keys)), text), "in this order"
    text = noted(*run, f"{GPU}={peak * 0.99}")
    says(text, *overrides(run[1]), f"actor's CUDA {CONTEXT:g}", f"{peak:.3g} GiB", f"{GPU}={peak * 0.99:g}")
    more = ("ppo_micro_batch_size_per_gpu", "optimizer_offload=true", *keys)
    assert re.search(".*".join(map(re.escape, more)), text), "in this order"
    assert noted(*run, f"{GPU}={states * 1.01}"), "the smallest that is not refused"
    assert noted(*run, f"{GPU}={peak * 1.01}") == ""
    says(refused(*run, f"{GPU}=24"), "actor's optimizer 15.3")
    load(*run, f"{GPU}=24", "trainer.val_only=true")
    longer = "model.override_config.max_position_embeddings=4096"
    assert noted("cluster=cpu", run[1], f"{GPU}=0.1", longer) == "", "without a GPU there is nothing to say"


def test_an_engine_that_does_not_fit_its_share_of_a_gpu(folder: Write) -> None:
    """15.3 GiB of weights; half of 30 GiB is less."""
    half, split = "rollout.gpu_memory_utilization=0.5", "rollout.tensor_model_parallel_size"
    run = (f"model.lora_rank=1  {half}  cluster=node8  {GPU}=30", folder("Qwen3-8B"))
    says(refused(*run), "rollout", "weights 15.3 = ", "15 GiB", *overrides(half, split), f"{GPU}=30")
    load(*run, "TP=2")
    says(refused(*run, "rollout.kv_cache_memory_gib=20"), "rollout", "weights 15.3", "cache 20 = 35.3 GiB")


def test_a_reference_beside_the_actor_takes_turns_with_it(folder: Write) -> None:
    run = ("cluster=node8", folder("Qwen3-8B"))
    actor, _, ref = estimate("Qwen3-8B", *run)
    certain, peak = sum(actor.states.values()) + ref.waiting, sum(actor.parts.values()) + ref.waiting + 2 * CONTEXT
    says(refused(*run, f"{GPU}={certain * 0.99}"), "actor and ref", "ref 3.81", "param_offload=true")
    says(noted(*run, f"{GPU}={peak * 0.99}"), "actor and ref", f"ref {ref.waiting + CONTEXT:.3g}")
    assert noted(*run, f"{GPU}={peak * 1.01}") == ""
    assert noted(*run, "ref.fsdp_config.param_offload=true", f"{GPU}={peak - ref.waiting + 0.1}") == ""


def test_an_engine_that_sleeps_leaves_its_share_to_the_update(folder: Write) -> None:
    """Of 13.5 GiB the engine has 4.72; the update takes 8.9. Asleep it leaves CUDA's memory and graphs."""
    run = ("cluster=single_gpu", folder("Qwen3-0.6B"), f"{GPU}=13.5")
    sleeps = "rollout.free_cache_engine=true"
    says(refused(*run), "actor and rollout and ref", "rollout 4.72 = 13.6 GiB", *overrides(sleeps.partition("=")[0]))
    says(noted(*run, sleeps), f"rollout {CUDA_GIB + GRAPHS_GIB}", "14.4 GiB")
    for without in ("rollout.enforce_eager=true", "+vllm.sleep_mode_offload_cudagraph=true"):
        assert noted(*run, sleeps, without) == ""


def test_one_gpu_of_24_gb_holds_8b_with_lora_in_turns_with_an_engine(folder: Write) -> None:
    """In a sync by ipc there are the engine's weights, and the actor's largest tensor."""
    turns = "rollout.free_cache_engine=true  rollout.gpu_memory_utilization=0.85  rollout.max_num_seqs=64  "
    turns += "actor.fsdp_config.param_offload=true  actor.use_dynamic_bsz=true  actor.ppo_max_token_len_per_gpu=6144  "
    turns += "model.enable_gradient_checkpointing=true  model.enable_activation_offload=true  model.lora_rank=32"
    run = ("cluster=single_gpu", folder("Qwen3-8B"), turns)
    assert noted(*run, f"{GPU}=23.6") == ""
    says(noted(*run, f"{GPU}=22"), "3.82", "18.3", "22.1 GiB")


def test_two_roles_that_train_on_one_gpu(folder: Write) -> None:
    run = ("cluster=single_gpu  recipe=ppo", folder("Qwen3-0.6B"))
    kept = "critic.model.fsdp_config.optimizer_offload=false  critic.model.fsdp_config.param_offload=false"
    assert noted(*run, f"{GPU}=24.2") == ""
    says(refused(*run, kept, f"{GPU}=22"), "actor and rollout and ref and critic", "param_offload=true")


@pytest.mark.parametrize(("model", "gib"), [("qwen3_0_6b", 23.6), ("qwen3_1_7b", 44.3)])
def test_one_gpu_holds_the_models_that_it_is_said_to_hold(model: str, gib: float) -> None:
    assert noted(f"model={model}  cluster=single_gpu  {GPU}={gib}") == ""


def test_parameters_that_were_counted_go_before_those_that_config_json_makes_likely(folder: Write) -> None:
    config, shape = load("cluster=node8", folder("Qwen3-8B")), MODELS["Qwen3-8B"]
    roles = memory_estimate(config, shape, 4_000_000_000) or []
    less = {role.role: role.parts["weights"] for role in roles}
    assert less == pytest.approx({"actor": 4e9 * 4 / 4 / 2**30, "rollout": 4e9 * 2 / 2**30, "ref": 4e9 * 2 / 4 / 2**30})
    assert list(memory_problems(config, shape, 30, None)) != []
    assert list(memory_problems(config, shape, 30, None, 1_000_000_000)) == []


def test_all_processes_in_the_memory_of_a_machine(folder: Write) -> None:
    model, sizes = folder("Qwen3-0.6B"), MODELS["Qwen3-0.6B"]
    config = load(model, "model.override_config.max_position_embeddings=4096")
    roles = memory_estimate(config, sizes) or []
    needed = sum(sum(role.states.values()) for role in roles)
    (problem,) = memory_problems(config, sizes, None, needed * 0.99)
    says(problem.text, "1 actor 8.88", "1 rollout", "1 ref", f"{needed:.3g} GiB", "CPU memory")
    assert list(memory_problems(config, sizes, None, needed * 1.01)) == []
    whole = sum(sum(role.parts.values()) + sum(role.host.values()) for role in roles)
    (note,) = memory_problems(config, sizes, None, whole * 0.99, certain=False)
    says(note.text, f"{whole:.3g} GiB")
    assert list(memory_problems(config, sizes, None, whole * 1.01, certain=False)) == []

    config = load(model, "cluster=node8")
    host = sum(4 * sum(role.host.values()) for role in memory_estimate(config, sizes) or [])
    (note,) = memory_problems(config, sizes, None, host * 0.99, certain=False)
    says(note.text, "4 actor", f"{host:.3g} GiB")
    assert list(memory_problems(config, sizes, None, host * 0.5)) == [], "it may do with less"
    assert list(memory_problems(config, None, 0.1, 0.1)) == [], "nothing is known of the model"


@pytest.mark.parametrize("command", [REWARD_MODEL, SFT], ids=lambda command: command.name)
def test_a_command_that_trains_one_model(command: Any, folder: Write, tmp_path: Path) -> None:
    folder("Qwen3-8B")
    path = f"model.path={tmp_path}"
    run = [path, "trainer.n_gpus_per_node=2", "data.max_length=2048", "trainer.dry_run=config"]
    with refuses(ConfigError, path, f"{GPU}=50", "gradients", "trainer.n_gpus_per_node"):
        load_command([*run, f"{GPU}=50"], command)
    notes = load_command([*run, f"{GPU}=64"], command)[1]
    says(notes, path, command.schema.role, "data.micro_batch_size_per_gpu", f"{GPU}=64")
    assert "estimate" not in "".join(load_command([*run, f"{GPU}=80"], command)[1])
