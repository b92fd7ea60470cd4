"""A mixture of experts trained on two ranks is what engines sample from; with their experts both compute the same.

On CPU vLLM packs experts when it loads a model, and alone would read what a sync brings as if it were packed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.errors import WeightSyncError
from grpo_dist.protocol import DataProto
from grpo_dist.protocol.sequences import PROMPT_ROUTES, ROUTES
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.workers.gang import Gang
from grpo_dist.workers.rollout import RolloutWorker
from grpo_dist.workers.weight_transport import BroadcastTransport, ObjectStoreTransport, outcomes
from tests.engines.vllm.real import PROMPTS, assert_log_probs_equal, generate, greedy, hf_answers, sampling
from tests.messages import says
from tests.models import EXPERTS, random_model
from tests.processes import spawned, start_together
from tests.ranks import run_ranks
from tests.worker_settings import engine_settings, model_settings
from tests.workers.test_weight_transport import TIMEOUT_S, actor_class, actor_settings, trained_model

pytestmark = [pytest.mark.ray, pytest.mark.deep]

TRANSPORTS = ("broadcast", "object_store")  # by rank of the engine


@dataclass
class Case:
    """An actor of two ranks, and an engine for each transport."""

    path: str
    actor: WorkerGroup
    rollout: WorkerGroup
    broadcast: BroadcastTransport
    version: int = -1

    def sync(self, rank: int) -> Any:
        self.version += 1
        transport = (self.broadcast, ObjectStoreTransport())[rank]
        sync = transport.sync(self.actor, self.rollout, [rank], version=self.version, dtype="float32")
        (outcome,) = run(sync).values()
        return outcome

    def hugging_face(self) -> Any:
        return trained_model(self.path, self.actor, "export_parameters")

    def samples_from(self, rank: int, model: Any) -> None:
        assert_log_probs_equal(model, generate(self.rollout, rank, PROMPTS, sampling(ignore_eos=True)))
        assert greedy(self.rollout, rank) == hf_answers(model)


# vLLM's OLMoE has an output layer of its own, and takes the weights of the chosen experts as they are.
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"head_dim": 32},
    "Mixtral": {"head_dim": 32},
    "Olmoe": {"hidden_size": 64, "num_attention_heads": 2, "tie_word_embeddings": False, "norm_topk_prob": False},
}
CASES = [
    pytest.param(("Qwen3Moe", 1), id="Qwen3Moe"),
    *(pytest.param((family, 1), id=family, marks=pytest.mark.long) for family in ("Mixtral", "Olmoe")),
    pytest.param(("Qwen3Moe", 2), id="tensor parallel", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    family, size = request.param
    path = random_model(family, tmp_path_factory.mktemp(family), **EXPERTS | FAMILIES[family])
    with (
        spawned("actor", actor_class(), [(0, 2), (1, 2)]) as actor,
        spawned("rollout", RolloutWorker, [(), ()], env={"OMP_NUM_THREADS": "1"}) as rollout,
    ):
        settings = [
            engine_settings(path, seed=rank, tensor_model_parallel_size=size)
            for rank, transport in enumerate(TRANSPORTS)
        ]
        engines = rollout.answers([rollout.submit(rank, "start", "start", each) for rank, each in enumerate(settings)])
        start_together(Gang(actor).start(actor_settings(path)), engines)
        yield Case(path, actor, rollout, BroadcastTransport(size, TIMEOUT_S))


def test_engines_sample_from_the_experts_that_were_trained(case: Case) -> None:
    before = case.hugging_face()
    for rank in range(2):
        case.samples_from(rank, before)
    for seed in range(2):  # the second update comes upon what the first one has packed
        case.actor.call_all("test", "perturb", seed)
        model = case.hugging_face()
        for rank in range(2):
            assert case.sync(rank) == case.version
            case.samples_from(rank, model)
        with pytest.raises(AssertionError):
            case.samples_from(0, before)


def test_experts_outlive_a_sync_of_which_nothing_was_loaded(case: Case) -> None:
    assert case.sync(0) == case.version
    before = case.hugging_face()
    case.actor.call_all("test", "perturb", 7)
    case.actor.call(0, "test", "damage", 0)
    call = case.rollout.submit(0, "test", "receive_weights", case.version + 1)
    case.actor.call_all("test", "broadcast_weights", "float32", case.version + 1)
    error = run(outcomes({0: call}))[0]
    assert isinstance(error, WeightSyncError)
    says(error, f"version {case.version + 1}", "bucket 0")
    case.samples_from(0, before)


# --- the sampler's experts ---------------------------------------------------------------------------------------
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def differences(rank: int, path: str, dtype: str, data: DataProto) -> dict[str, Any]:
    """Of the trainer's log-probs to the sampler's, with the recorded experts and without."""
    settings = model_settings(path, compute_dtype=dtype, replays_routes=True)
    engine = FSDPEngine(settings, device="cpu", temperature=0.7)
    free = DataProto({name: column for name, column in data.batch.items() if name not in (PROMPT_ROUTES, ROUTES)})
    columns = {name: engine.compute_log_probs(rows, PassLimits("", 32)) for name, rows in (("R3", data), ("", free))}
    before = data["rollout_log_probs"].values
    return {name: (column.values - before).double().numpy() for name, column in columns.items()}


@pytest.fixture(scope="module")
def found(local_ray: None, random_models: dict[str, str]) -> dict[str, Any]:
    path = random_models["experts"]
    with spawned("rollout", RolloutWorker, [(), ()], env={"OMP_NUM_THREADS": "1"}) as group:
        each = [engine_settings(path, dtype=dtype, records_routes=True) for dtype in DTYPES.values()]
        group.gather([group.submit(rank, "start", "start", settings) for rank, settings in enumerate(each)])
        asked = sampling(n=32, max_tokens=40, ignore_eos=True)
        batches = [generate(group, rank, PROMPTS, asked) for rank in range(2)]
        group.call_all("shutdown", "shutdown")
    return {dtype: run_ranks(1, differences, path, dtype, data)[0] for dtype, data in zip(DTYPES, batches, strict=True)}


def test_what_the_trainer_computes_with_the_samplers_experts_differs_by_rounding(found: dict[str, Any]) -> None:
    """In bf16 by the mean of k3, e^x - x - 1, an estimate of the KL that is not negative."""
    assert abs(found["fp32"]["R3"]).max() < 1e-5
    kl = {name: (np.expm1(difference) - difference).mean() for name, difference in found["bf16"].items()}
    assert kl["R3"] * 5 < kl[""]
