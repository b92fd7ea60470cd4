"""An engine that drafts gives the tokens and log-probs of one that does not, to the bit, in fewer steps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from grpo_dist.engines.base import DraftCounts
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.protocol import DataProto
from grpo_dist.runtime.group import WorkerGroup
from tests.engines.vllm import test_adapter
from tests.engines.vllm.test_adapter import LORA, buckets
from tests.engines.vllm.test_engine import PROMPTS, generate, perturbed, sampling, submit, tokens
from tests.engines.vllm.test_weight_update import send
from tests.engines.vllm.watched_rollout import WatchedRolloutWorker
from tests.processes import spawned
from tests.worker_settings import engine_settings

PLAIN, DRAFTED = 0, 1
adapted = test_adapter.models  # a fixture: the base model, and two with factors
VERSIONS = itertools.count()


@contextlib.contextmanager
def started(path: str, **changes: Any) -> Iterator[WorkerGroup]:
    each = [engine_settings(path, draft_tokens=most, **changes) for most in (0, 6)]
    with spawned("rollout", WatchedRolloutWorker, [()] * 2, env={"OMP_NUM_THREADS": "1"}) as group:
        group.gather([group.submit(rank, "start", "start_drafting", settings) for rank, settings in enumerate(each)])
        yield group
        group.call_all("shutdown", "shutdown")


@pytest.fixture(scope="module")
def engines(local_ray: None, random_models: dict[str, str]) -> Iterator[WorkerGroup]:
    with started(random_models["tied"]) as group:
        yield group


def counts(engines: WorkerGroup) -> DraftCounts:
    return engines.gather([engines.submit(DRAFTED, "drafts", "draft_counts")])[0]


def assert_drafted(engines: WorkerGroup, settings: SamplingSettings) -> None:
    before = after = counts(engines)
    while after.accepted == before.accepted:  # engines of several processes learn how much to draft
        assert_same(engines, settings)
        after = counts(engines)
    assert after.drafted - before.drafted >= after.accepted - before.accepted > 0


def assert_same(engines: WorkerGroup, settings: SamplingSettings) -> DataProto:
    plain, drafted = (generate(engines, rank, PROMPTS, settings) for rank in (PLAIN, DRAFTED))
    for name in ("responses", "rollout_log_probs", "weight_versions"):
        for expected, row in zip(plain[name].rows(), drafted[name].rows(), strict=True):
            assert torch.equal(expected, row), name
    assert plain["truncated"].tolist() == drafted["truncated"].tolist()
    return drafted


@pytest.mark.deep
@pytest.mark.ray
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 0.0, "n": 1},
        {"top_p": 0.8},
        {"top_k": 5},
        {"min_tokens": 12},
        {"bad_words": ("a", "the")},
        {"stop": ("e",)},
        {"n": 9, "ignore_eos": True},
    ],
    ids=str,
)
def test_tokens_and_log_probs_are_those_without_drafts(engines: WorkerGroup, changes: dict[str, Any]) -> None:
    """Twice: the second time the table knows the first responses."""
    settings = sampling(max_tokens=40, **changes)
    assert_same(engines, settings)
    assert_drafted(engines, settings)


@pytest.mark.deep
@pytest.mark.ray
def test_responses_to_the_end_of_the_context_and_syncs_between_them(
    engines: WorkerGroup, random_models: dict[str, str]
) -> None:
    """New weights make other responses, which drafts of the old ones are only rejected for."""
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(random_models["tied"], dtype=torch.float32)
    settings, seen = sampling(n=3, max_tokens=200, ignore_eos=True), set()
    for seed in (1, 2):
        version, model = next(VERSIONS), perturbed(base, seed)
        engines.gather([send(engines, rank, model, version) for rank in (PLAIN, DRAFTED)])
        data = assert_same(engines, settings)
        assert set(data["weight_versions"].values.tolist()) == {version}
        assert data["truncated"].tolist() == [1] * len(data)
        seen.add(tuple(tokens(data)[0]))
    assert len(seen) == 2
    assert_drafted(engines, settings)
    counted = counts(engines)
    assert counted.tokens > counted.accepted
    assert counted.table_bytes > 0


@pytest.mark.deep
@pytest.mark.ray
def test_requests_without_a_seed_and_requests_that_come_and_go(engines: WorkerGroup) -> None:
    """Requests of several lengths in one batch: those that have ended leave it, and others come in."""
    calls = [
        [
            submit(engines, rank, PROMPTS[i % 3], sampling(n=1 + i % 3, seed=i, max_tokens=5 + 7 * i, top_k=50 - i))
            for i in range(6)
        ]
        for rank in (PLAIN, DRAFTED)
    ]
    answers = [[data for _, data in engines.gather(each)] for each in calls]
    for plain, drafted in zip(*answers, strict=True):
        assert tokens(plain) == tokens(drafted)
        assert torch.equal(plain["rollout_log_probs"].values, drafted["rollout_log_probs"].values)
    unseeded = generate(engines, DRAFTED, PROMPTS, sampling(seed=None, n=4, ignore_eos=True))
    assert unseeded["response_length"].tolist() == [20] * 12


@pytest.mark.ray
@pytest.mark.long
def test_with_factors_of_lora(local_ray: None, random_models: dict[str, str], adapted: list[Any]) -> None:
    with started(random_models["tied"], **LORA) as engines:
        for model in adapted[1:]:
            sent, version = buckets(model), next(VERSIONS)
            engines.gather(
                [
                    engines.submit(rank, "sync", "load_weights", [ray.put(bucket) for bucket in sent], version)
                    for rank in (PLAIN, DRAFTED)
                ]
            )
            assert_same(engines, sampling(n=4, max_tokens=40))
            assert_drafted(engines, sampling(n=4, max_tokens=40))


@pytest.mark.ray
@pytest.mark.long
def test_with_engines_of_two_processes(local_ray: None, random_models: dict[str, str]) -> None:
    with started(random_models["tied"], tensor_model_parallel_size=2) as engines:
        assert_same(engines, sampling(n=4, max_tokens=40))
        assert_drafted(engines, sampling(n=4, max_tokens=40))


@pytest.mark.ray
@pytest.mark.long
def test_experts_are_recorded_as_without_drafts(local_ray: None, random_models: dict[str, str]) -> None:
    with started(random_models["experts"], records_routes=True) as engines:
        settings = sampling(n=4, max_tokens=40, ignore_eos=True)
        for _ in range(2):
            plain, drafted = (generate(engines, rank, PROMPTS, settings) for rank in (PLAIN, DRAFTED))
            assert plain["unknown_routes"].tolist() == drafted["unknown_routes"].tolist()
            for name in ("responses", "rollout_log_probs", "routes", "prompt_routes"):
                for expected, row in zip(plain[name].rows(), drafted[name].rows(), strict=True):
                    assert torch.equal(expected, row), name
        assert counts(engines).accepted > 0
