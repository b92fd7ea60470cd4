"""Real vLLM engines that get LoRA's factors alone: they compute what peft does, and syncs are as with whole weights."""

from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
import transformers

from grpo_dist.config.schema_roles import LoraSyncConfig
from grpo_dist.engines.settings import EngineSettings
from grpo_dist.engines.weights.buckets import Bucket, pack
from grpo_dist.errors import ConfigError, WeightSyncError
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.workers.gang import Gang
from grpo_dist.workers.weight_transport import BroadcastTransport, outcomes
from tests.engines.train.test_parts import whole_model
from tests.engines.vllm import real
from tests.engines.vllm.split_rollout import SplitRolloutWorker
from tests.engines.vllm.test_tensor_parallel import split_settings
from tests.messages import refuses, says
from tests.processes import spawned, start_together
from tests.worker_settings import changed, engine_settings, lora, model_settings, policy_settings
from tests.workers.test_weight_transport import TIMEOUT_S, actor_class, trained_model

pytestmark = [pytest.mark.ray, pytest.mark.deep]

LORA = {"lora_rank": 4, "lora_alpha": 8.0, "lora": LoraSyncConfig(merge=False)}


def settings_of(path: str, **changes: Any) -> EngineSettings:
    return engine_settings(path, clear_kv_cache_on_update=False, **(LORA | changes))


@pytest.fixture(scope="module")
def engine(local_ray: None, random_models: dict[str, str]) -> Iterator[WorkerGroup]:
    with real.started(settings_of(random_models["tied"])) as group:
        yield group


@pytest.fixture(scope="module")
def models(random_models: dict[str, str]) -> list[Any]:
    """The base model, and two with random factors."""
    base = [real.of_folder(random_models["tied"]) for _ in range(3)]
    return [base[0], *(with_factors(model, seed, "all-linear") for seed, model in enumerate(base[1:], 1))]


def with_factors(model: Any, seed: int, targets: str) -> Any:
    torch.manual_seed(seed)
    found = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets)).eval()
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.3)
    return found


def factors(model: Any) -> list[Bucket]:
    return list(pack(peft.get_peft_model_state_dict(model).items(), bucket_bytes=8000))


def test_factors_take_the_place_of_those_before(engine: WorkerGroup, models: list[Any]) -> None:
    assert len(factors(models[1])) > 2, "several buckets"
    for version, model in enumerate(models, -1):
        assert version < 0 or real.load(engine, 0, factors(model), version) == version
        found = real.generate(engine, 0, real.PROMPTS, real.sampling())
        assert set(found["weight_versions"].values.tolist()) == {version}
        real.assert_log_probs_equal(model, found)
        assert real.greedy(engine) == real.hf_answers(model)
    answers = [real.hf_answers(model) for model in models]
    assert answers[0] != answers[1] != answers[2], "the change shows"


def test_requests_in_flight_go_on_and_the_kept_cache_serves_none_that_comes_later(
    engine: WorkerGroup, models: list[Any]
) -> None:
    assert real.load(engine, 0, factors(models[1]), 20) == 20
    settings = real.sampling(n=4, max_tokens=55, ignore_eos=True)
    call = real.submit(engine, 0, real.PROMPTS[2], settings)
    assert real.load(engine, 0, factors(models[2]), 21, when_running=4) == 21
    _, data = engine.gather([call])[0]
    assert [set(data[name].tolist()) for name in ("weight_version", "last_weight_version")] == [{20}, {21}]
    real.assert_log_probs_equal(models[1], data, 20)
    for _ in range(2):
        real.assert_log_probs_equal(models[2], real.generate(engine, 0, [real.PROMPTS[2]], settings))


def test_factors_that_vllm_has_no_place_for(engine: WorkerGroup) -> None:
    """The last test of the engine."""
    name = "base_model.model.model.layers.0.mlp.other_proj"
    other = {f"{name}.lora_A.weight": torch.zeros(4, 32), f"{name}.lora_B.weight": torch.zeros(32, 4)}
    with refuses(ConfigError, "lora.merge=false", "model.layers.0.mlp.other_proj", "lora.merge=true"):
        real.load(engine, 0, list(pack(other.items(), bucket_bytes=8000)), 30)


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
            return real.hf_answers(trained_model(path, actor, "export_parameters"))

        assert real.greedy(rollout) == expected()
        for version in range(2):
            before = real.greedy(rollout)
            actor.call_all("test", "perturb", version, 1.0, "lora_", 0.3)
            sent = run(transport.sync(actor, rollout, [0], version=version, dtype="float32"))
            assert sent == {0: version}
            assert real.greedy(rollout) == expected() != before
        before = real.greedy(rollout)
        actor.call_all("test", "perturb", 2, 1.0, "lora_", 0.3)
        rollout.call(0, "test", "damage", 1, 1)
        call = rollout.submit(0, "test", "receive_weights", 2)
        actor.call_all("test", "broadcast_weights", "float32", 2)
        error = run(outcomes({0: call}))[0]
        assert isinstance(error, WeightSyncError)
        says(error, "rank 1", "bucket 1", "version 1")
        assert real.greedy(rollout) == before
        rollout.call_all("shutdown", "shutdown")


# --- of a model with a vision part: its language part alone ------------------------------
@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Idefics3 (SmolVLM), whose class in vLLM needs no torchvision."""
    return whole_model("Idefics3", tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def engines(local_ray: None, source: str) -> Iterator[WorkerGroup]:
    """One that gets whole weights, and one that gets factors."""
    with real.started(engine_settings(source), settings_of(source, target_modules=("q_proj", "v_proj"))) as group:
        yield group


def whole(source: str) -> Any:
    return transformers.Idefics3ForConditionalGeneration.from_pretrained(source, dtype=torch.float32).eval()


def language(model: Any) -> list[Bucket]:
    """What a trainer sends: weights of the language part by the names that they have in the files of the whole."""
    names = dict(model.named_parameters())
    return list(pack(((name, names[name].detach()) for name in names if "text_model" in name), bucket_bytes=20_000))


def test_the_language_part_samples_and_takes_what_trains(engines: WorkerGroup, source: str) -> None:
    old = whole(source)
    new = real.perturbed(old, 1)
    for version, model in ((-1, old), (0, new)):
        assert version < 0 or real.load(engines, 0, language(model), version) == version
        assert real.greedy(engines) == real.hf_answers(model)
        real.assert_log_probs_equal(model, real.generate(engines, 0, real.PROMPTS, real.sampling()))
    assert real.hf_answers(new) != real.hf_answers(old)


def test_factors_have_the_names_of_the_whole_model(engines: WorkerGroup, source: str) -> None:
    model = with_factors(whole(source), 1, r".*text_model.*\.(q_proj|v_proj)")
    assert real.load(engines, 1, factors(model), 0) == 0
    assert real.greedy(engines, 1) == real.hf_answers(model) != real.hf_answers(whole(source))
