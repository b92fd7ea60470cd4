"""The experts that an engine records are those that Hugging Face's model sends the same tokens to."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from grpo_dist.protocol import DataProto
from grpo_dist.runtime.group import WorkerGroup
from tests.engines.vllm import real
from tests.worker_settings import engine_settings

pytestmark = [pytest.mark.ray, pytest.mark.deep]

# Ranks: an engine with room for everything; one whose cache is too small for its requests, and outlives updates.
PLENTY, SMALL = 0, 1
LAYERS, CHOSEN = 2, 2
# 3 blocks of 32 tokens each are a request of the longest kind; there are 8.
SMALL_CACHE: dict[str, Any] = {"kv_cache_memory_gib": 8 * 32 * LAYERS * 2 * 2 * 32 * 4 / 2**30, "max_num_seqs": 4}
SMALL_CACHE["clear_kv_cache_on_update"] = False
LONG = real.sampling(n=1, max_tokens=55, ignore_eos=True)
VERSIONS = itertools.count()


@pytest.fixture(scope="module")
def engines(local_ray: None, random_models: dict[str, str]) -> Iterator[WorkerGroup]:
    each = [engine_settings(random_models["experts"], records_routes=True, **kind) for kind in ({}, SMALL_CACHE)]
    with real.started(*each) as group:
        yield group


@pytest.fixture(scope="module")
def models(random_models: dict[str, str]) -> tuple[Any, Any]:
    """The weights of the folder, and others."""
    old = real.of_folder(random_models["experts"])
    return old, real.perturbed(old, 5)


@torch.no_grad()
def experts_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """(tokens, layers, chosen), in order of their numbers, by Hugging Face's model."""
    logits = model(input_ids=ids.unsqueeze(0).long(), output_router_logits=True).router_logits
    return torch.stack([layer.topk(CHOSEN).indices.sort(-1).values for layer in logits], 1)


def recorded(data: DataProto) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens, and the experts of all but the last one, in order of their numbers."""
    names = ("prompts", "responses", "prompt_routes", "routes")
    for prompt, response, before, behind in zip(*(data[name].rows() for name in names), strict=True):
        assert (behind[-1] == 255).all(), "from the last token nothing was computed"
        yield torch.cat([prompt, response]), torch.cat([before, behind])[:-1].long().sort(-1).values


def assert_recorded(model: Any, data: DataProto) -> None:
    assert data["unknown_routes"].tolist() == [0] * len(data)
    for ids, routes in recorded(data):
        assert routes.shape == (len(ids) - 1, LAYERS, CHOSEN)
        assert torch.equal(routes, experts_of(model, ids[:-1]))


def test_requests_side_by_side_have_their_own_experts(engines: WorkerGroup, models: Any) -> None:
    """Twice: the second time the blocks of the prompts are in the cache, and are not computed."""
    for seed in (3, 4):
        data = real.generate(engines, PLENTY, real.PROMPTS, real.sampling(n=4, ignore_eos=True, seed=seed))
        assert data["routes"].values.dtype == torch.uint8
        assert_recorded(models[0], data)
    with pytest.raises(AssertionError):
        assert_recorded(models[1], data)


def test_what_is_computed_again_for_lack_of_room_has_its_experts(engines: WorkerGroup, models: Any) -> None:
    prompts = [list(range(start, start + 35)) for start in (3, 10, 20, 30, 40, 50)]
    assert_recorded(models[0], real.generate(engines, SMALL, prompts, LONG))


def test_a_turn_needs_no_experts_of_the_turns_before(engines: WorkerGroup, models: Any) -> None:
    data = real.generate(engines, PLENTY, real.PROMPTS[2:], real.sampling(n=1, routes_from=30))
    ((ids, routes),) = recorded(data)
    assert torch.equal(routes[30:], experts_of(models[0], ids[:-1])[30:])
    assert data["unknown_routes"].tolist() == [30]


@pytest.mark.parametrize("rank", [PLENTY, SMALL])
def test_new_weights_come_in_the_middle_of_a_response(engines: WorkerGroup, models: Any, rank: int) -> None:
    """Tokens keep the experts that they had when what follows them was sampled; one engine computes them again."""
    real.load(engines, rank, models[0], next(VERSIONS))
    call = real.submit(engines, rank, real.PROMPTS[2], LONG)
    (_, data), version = engines.gather([call, real.send(engines, rank, models[1], next(VERSIONS), when_running=1)])
    ((ids, routes),) = recorded(data)
    versions, prompt = data["weight_versions"].values, len(real.PROMPTS[2])
    switch = prompt + int((versions < version).sum()) - 1  # the first token that the new weights have read
    assert prompt <= switch < len(ids) - 1
    assert torch.equal(routes[:switch], experts_of(models[0], ids[:switch]))
    if rank == PLENTY:  # the other one goes on upon what the old weights left in the cache
        assert torch.equal(routes[switch:], experts_of(models[1], ids[:-1])[switch:])
    assert not torch.equal(routes[:switch], experts_of(models[1], ids[:switch]))
    assert data["unknown_routes"].tolist() == [0]
    real.load(engines, rank, models[0], next(VERSIONS))
    assert_recorded(models[0], real.generate(engines, rank, real.PROMPTS, LONG))


def test_an_aborted_request_leaves_the_others_theirs(engines: WorkerGroup, models: Any) -> None:
    real.load(engines, PLENTY, models[0], next(VERSIONS))
    calls = [real.submit(engines, PLENTY, real.PROMPTS[2], LONG)]
    calls.append(engines.submit(PLENTY, "abort", "abort_when_running", 1, ["uid"]))
    assert engines.gather(calls)[0][1] is None
    assert_recorded(models[0], real.generate(engines, PLENTY, real.PROMPTS, LONG))


@pytest.mark.long
def test_an_engine_of_two_processes(local_ray: None, random_models: dict[str, str], models: Any) -> None:
    settings = engine_settings(random_models["experts"], records_routes=True, tensor_model_parallel_size=2)
    with real.started(settings) as group:
        for model, version in zip(models, (0, 1), strict=True):
            real.load(group, 0, model, version)
            assert_recorded(model, real.generate(group, 0, real.PROMPTS, real.sampling(n=4, ignore_eos=True)))
