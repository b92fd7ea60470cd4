"""Real vLLM engines that get LoRA's factors alone: they compute what peft does, and syncs are as with whole weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_dist.assets import resolve_model_path
from grpo_dist.config.schema_roles import LoraSyncConfig
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.vllm.arguments import adapter_args
from grpo_dist.engines.weights.buckets import Bucket, pack
from grpo_dist.errors import ConfigError, WeightSyncError
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.sizes import engine_lora_rank
from grpo_dist.workers.gang import Gang
from grpo_dist.workers.weight_transport import BroadcastTransport, outcomes
from tests.engines.vllm.split_rollout import SplitRolloutWorker
from tests.engines.vllm.test_engine import (
    PROMPTS,
    assert_log_probs_equal,
    damaged,
    generate,
    greedy,
    hf_answers,
    load,
    of_folder,
    sampling,
    started,
    submit,
)
from tests.engines.vllm.test_tensor_parallel import split_settings
from tests.messages import refuses, says
from tests.models import random_model
from tests.processes import spawned, start_together
from tests.worker_settings import changed, engine_settings, lora, model_settings, policy_settings
from tests.workers.test_weight_transport import TIMEOUT_S, actor_class, trained_model

LORA = {"lora_rank": 4, "lora_alpha": 8.0, "lora": LoraSyncConfig(merge=False)}


def settings_of(path: str, **changes: Any) -> EngineSettings:
    return engine_settings(path, clear_kv_cache_on_update=False, **(LORA | changes))


def test_only_layers_with_factors_get_room(random_models: dict[str, str], tmp_path: Path) -> None:
    attention, dense = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    tiny = resolve_model_path("builtin:tiny-qwen3")
    for path, layers in ((tiny, attention | dense), (random_models["experts"], attention)):
        found = adapter_args(settings_of(path))
        assert set(found.pop("lora_target_modules")) == layers
        assert found == {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    some = adapter_args(settings_of(tiny, lora_rank=16, target_modules=("v_proj", "layers.0.mlp.up_proj")))
    assert (some["lora_target_modules"], some["max_lora_rank"]) == (["up_proj", "v_proj"], 16)
    assert adapter_args(engine_settings(tiny)) == {}
    assert [engine_lora_rank(rank) for rank in (1, 2, 32, 33, 512)] == [1, 8, 32, 64, 512]
    with refuses(ConfigError, "actor_rollout_ref.model.lora.merge=false", "GPT2LMHeadModel", "merge=true"):
        adapter_args(settings_of(random_model("GPT2", tmp_path)))


# --- real engines -------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def engine(local_ray: None, random_models: dict[str, str]) -> Iterator[WorkerGroup]:
    with started(settings_of(random_models["tied"])) as group:
        yield group


@pytest.fixture(scope="module")
def models(random_models: dict[str, str]) -> list[Any]:
    """The base model, and two with random factors."""
    import peft

    found = [of_folder(random_models["tied"])]
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
        found.append(peft.get_peft_model(of_folder(random_models["tied"]), config).eval())
        for name, parameter in found[-1].named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.3)
    return found


def factors(model: Any) -> list[Bucket]:
    import peft

    found = list(pack(peft.get_peft_model_state_dict(model).items(), bucket_bytes=8000))
    assert len(found) > 2
    return found


@pytest.mark.deep
@pytest.mark.ray
def test_factors_take_the_place_of_those_before(engine: WorkerGroup, models: list[Any]) -> None:
    for version, model in enumerate(models, -1):
        assert version < 0 or load(engine, 0, factors(model), version) == version
        found = generate(engine, 0, PROMPTS, sampling())
        assert set(found["weight_versions"].values.tolist()) == {version}
        assert_log_probs_equal(model, found)
        assert greedy(engine) == hf_answers(model)
    answers = [hf_answers(model) for model in models]
    assert answers[0] != answers[1] != answers[2], "the change shows"


@pytest.mark.deep
@pytest.mark.ray
def test_damaged_factors_leave_those_before_in_force(engine: WorkerGroup, models: list[Any]) -> None:
    assert load(engine, 0, factors(models[1]), 10) == 10
    sent = factors(models[2])
    refused = {"damaged": (damaged(sent), 11), "missing": (sent[:-1], 11), "after": (sent, 10)}
    for word, (some, version) in refused.items():
        with refuses(WeightSyncError, word, "version 10"):
            load(engine, 0, some, version)
        found = generate(engine, 0, PROMPTS, sampling())
        assert set(found["weight_version"].tolist()) == {10}
        assert_log_probs_equal(models[1], found)


@pytest.mark.deep
@pytest.mark.ray
def test_requests_in_flight_go_on_and_the_kept_cache_serves_none_that_comes_later(
    engine: WorkerGroup, models: list[Any]
) -> None:
    """They had begun under the old factors."""
    assert load(engine, 0, factors(models[1]), 20) == 20
    settings = sampling(n=4, max_tokens=55, ignore_eos=True)
    call = submit(engine, 0, PROMPTS[2], settings)
    assert load(engine, 0, factors(models[2]), 21, when_running=4) == 21
    _, data = engine.gather([call])[0]
    assert [set(data[name].tolist()) for name in ("weight_version", "last_weight_version")] == [{20}, {21}]
    assert_log_probs_equal(models[1], data, 20)
    for _ in range(2):
        assert_log_probs_equal(models[2], generate(engine, 0, [PROMPTS[2]], settings))


@pytest.mark.deep
@pytest.mark.ray
def test_factors_that_vllm_has_no_place_for(engine: WorkerGroup) -> None:
    """The last test of the engine."""
    name = "base_model.model.model.layers.0.mlp.other_proj"
    other = {f"{name}.lora_A.weight": torch.zeros(4, 32), f"{name}.lora_B.weight": torch.zeros(32, 4)}
    with refuses(ConfigError, "lora.merge=false", "model.layers.0.mlp.other_proj", "lora.merge=true"):
        load(engine, 0, list(pack(other.items(), bucket_bytes=8000)), 30)


@pytest.mark.ray
@pytest.mark.long
def test_two_ranks_send_their_factors_to_an_engine_of_two_processes(
    local_ray: None, random_models: dict[str, str]
) -> None:
    """By broadcast. A bucket that one process reads wrong costs nothing: the factors before stay in force in both."""
    path = random_models["tied"]
    settings = policy_settings(model_settings(path, lora(), merge=False), weight_bucket_bytes=8000)
    engine = changed(split_settings(path), **LORA)
    with (
        spawned("actor", actor_class(), [(0, 2), (1, 2)]) as actor,
        spawned("rollout", SplitRolloutWorker, [()], env={"OMP_NUM_THREADS": "1"}) as rollout,
    ):
        start_together(Gang(actor).start(settings), rollout.ask(0, "start", "start", engine))
        transport = BroadcastTransport(2, TIMEOUT_S)

        def expected() -> list[list[int]]:
            return hf_answers(trained_model(path, actor, "export_parameters"))

        assert greedy(rollout) == expected()
        for version in range(2):
            before = greedy(rollout)
            actor.call_all("test", "perturb", version, 1.0, "lora_", 0.3)
            sent = run(transport.sync(actor, rollout, [0], version=version, dtype="float32"))
            assert sent == {0: version}
            assert greedy(rollout) == expected() != before
        before = greedy(rollout)
        actor.call_all("test", "perturb", 2, 1.0, "lora_", 0.3)
        rollout.call(0, "test", "damage", 1, 1)
        call = rollout.submit(0, "test", "receive_weights", 2)
        actor.call_all("test", "broadcast_weights", "float32", 2)
        error = run(outcomes({0: call}))[0]
        assert isinstance(error, WeightSyncError)
        says(error, "rank 1", "bucket 1", "version 1")
        assert greedy(rollout) == before
        rollout.call_all("shutdown", "shutdown")
