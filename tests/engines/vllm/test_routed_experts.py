"""The experts that an engine records are those that Hugging Face's model sends the same tokens to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from grpo_dist.engines.vllm import arguments, routed_experts
from grpo_dist.engines.vllm.arguments import recording_args
from grpo_dist.engines.vllm.engine import response_routes
from grpo_dist.engines.vllm.routed_experts import record_steps
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import DataProto
from grpo_dist.runtime.group import WorkerGroup
from tests.engines.vllm.test_engine import (
    PROMPTS,
    generate,
    load,
    of_folder,
    perturbed,
    sampling,
    send,
    started,
    submit,
)
from tests.messages import refuses
from tests.worker_settings import engine_settings

# Ranks: an engine with room for everything; one whose cache is too small for its requests, and outlives updates.
PLENTY, SMALL = 0, 1
LAYERS, CHOSEN = 2, 2
# 3 blocks of 32 tokens each are a request of the longest kind; there are 8.
SMALL_CACHE: dict[str, Any] = {"kv_cache_memory_gib": 8 * 32 * LAYERS * 2 * 2 * 32 * 4 / 2**30, "max_num_seqs": 4}
SMALL_CACHE["clear_kv_cache_on_update"] = False
LONG = sampling(n=1, max_tokens=55, ignore_eos=True)
VERSIONS = itertools.count()


@pytest.fixture(scope="module")
def engines(local_ray: None, random_models: dict[str, str]) -> Iterator[WorkerGroup]:
    each = [engine_settings(random_models["experts"], records_routes=True, **kind) for kind in ({}, SMALL_CACHE)]
    with started(*each) as group:
        yield group


@pytest.fixture(scope="module")
def models(random_models: dict[str, str]) -> tuple[Any, Any]:
    """The weights of the folder, and others."""
    old = of_folder(random_models["experts"])
    return old, perturbed(old, 5)


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


@pytest.mark.deep
@pytest.mark.ray
def test_requests_side_by_side_have_their_own_experts(engines: WorkerGroup, models: Any) -> None:
    """Twice: the second time the blocks of the prompts are in the cache, and are not computed."""
    for seed in (3, 4):
        data = generate(engines, PLENTY, PROMPTS, sampling(n=4, ignore_eos=True, seed=seed))
        assert data["routes"].values.dtype == torch.uint8
        assert_recorded(models[0], data)
    with pytest.raises(AssertionError):
        assert_recorded(models[1], data)


@pytest.mark.deep
@pytest.mark.ray
def test_what_is_computed_again_for_lack_of_room_has_its_experts(engines: WorkerGroup, models: Any) -> None:
    prompts = [list(range(start, start + 35)) for start in (3, 10, 20, 30, 40, 50)]
    assert_recorded(models[0], generate(engines, SMALL, prompts, LONG))


@pytest.mark.deep
@pytest.mark.ray
def test_a_turn_needs_no_experts_of_the_turns_before(engines: WorkerGroup, models: Any) -> None:
    data = generate(engines, PLENTY, PROMPTS[2:], sampling(n=1, routes_from=30))
    ((ids, routes),) = recorded(data)
    assert torch.equal(routes[30:], experts_of(models[0], ids[:-1])[30:])
    assert data["unknown_routes"].tolist() == [30]


@pytest.mark.deep
@pytest.mark.ray
@pytest.mark.parametrize("rank", [PLENTY, SMALL])
def test_new_weights_come_in_the_middle_of_a_response(engines: WorkerGroup, models: Any, rank: int) -> None:
    """Tokens keep the experts that they had when what follows them was sampled; one engine computes them again."""
    load(engines, rank, models[0], next(VERSIONS))
    call = submit(engines, rank, PROMPTS[2], LONG)
    (_, data), version = engines.gather([call, send(engines, rank, models[1], next(VERSIONS), when_running=1)])
    ((ids, routes),) = recorded(data)
    versions, prompt = data["weight_versions"].values, len(PROMPTS[2])
    switch = prompt + int((versions < version).sum()) - 1  # the first token that the new weights have read
    assert prompt <= switch < len(ids) - 1
    assert torch.equal(routes[:switch], experts_of(models[0], ids[:switch]))
    if rank == PLENTY:  # the other one goes on upon what the old weights left in the cache
        assert torch.equal(routes[switch:], experts_of(models[1], ids[:-1])[switch:])
    assert not torch.equal(routes[:switch], experts_of(models[1], ids[:switch]))
    assert data["unknown_routes"].tolist() == [0]
    load(engines, rank, models[0], next(VERSIONS))
    assert_recorded(models[0], generate(engines, rank, PROMPTS, LONG))


@pytest.mark.deep
@pytest.mark.ray
def test_an_aborted_request_leaves_the_others_theirs(engines: WorkerGroup, models: Any) -> None:
    load(engines, PLENTY, models[0], next(VERSIONS))
    calls = [submit(engines, PLENTY, PROMPTS[2], LONG)]
    calls.append(engines.submit(PLENTY, "abort", "abort_when_running", 1, ["uid"]))
    assert engines.gather(calls)[0][1] is None
    assert_recorded(models[0], generate(engines, PLENTY, PROMPTS, LONG))


@pytest.mark.ray
@pytest.mark.long
def test_an_engine_of_two_processes(local_ray: None, random_models: dict[str, str], models: Any) -> None:
    """Both have the same experts; one of them delivers."""
    settings = engine_settings(random_models["experts"], records_routes=True, tensor_model_parallel_size=2)
    with started(settings) as group:
        for model, version in zip(models, (0, 1), strict=True):
            load(group, 0, model, version)
            assert_recorded(model, generate(group, 0, PROMPTS, sampling(n=4, ignore_eos=True)))


# --- the steps of the older runner, by hand -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("counts", "drafts", "sampled", "rows"),
    [
        (  # `a` begins, `b` had two drafts of which one was accepted, `c` is not through with its prompt
            {"c": 5, "b": 3, "a": 2},
            {"b": [8, 9]},
            [[5], [8, 6], []],
            [("rows", ["a", "b", "c"], [0, 2, 5, 10], [0, 7, 4]), ("tokens", [1, 2, 0], [0, 1, 0])],
        ),
        ({}, {}, [], []),
    ],
    ids=["tokens", "none"],
)
def test_rows_of_a_step_belong_to_requests_in_the_order_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, counts: Any, drafts: Any, sampled: Any, rows: Any
) -> None:
    calls: list[Any] = []

    def prepared(batch: Any) -> Any:
        starts = batch.query_start_loc_np.tolist(), batch.num_computed_tokens_np.tolist()
        calls.append(("rows", batch.req_ids, *starts))
        return connector

    connector, output = Mock(), SimpleNamespace(sampled_token_ids=sampled)
    connector.begin_step = lambda metadata: calls.append(("begin", metadata))
    connector.prepare_output = prepared
    connector.enqueue_cpu_copy = lambda *counts: calls.append(("tokens", *(each.tolist() for each in counts)))
    connector.process_output = lambda: "experts"
    monkeypatch.setattr(routed_experts, "get_aux_output_connector", lambda *_: connector)
    runner: Any = SimpleNamespace(
        model=None,
        vllm_config=None,
        kv_cache_config=None,
        input_batch=SimpleNamespace(req_ids=["a", "b", "c"], num_computed_tokens_cpu=np.array([0, 7, 4, 99])),
        execute_model=lambda scheduled: calls.append("runs"),
        sample_tokens=lambda grammar: output,
    )
    record_steps(runner)
    scheduled = {"num_scheduled_tokens": counts, "total_num_scheduled_tokens": sum(counts.values())}
    scheduled |= {"scheduled_spec_decode_tokens": drafts, "aux_output_connector_metadata": "step"}
    runner.execute_model(SimpleNamespace(**scheduled))
    assert getattr(runner.sample_tokens(None), "aux_output_connector_output", None) == ("experts" if rows else None)
    assert calls == [("begin", "step"), "runs", *rows]


def test_the_last_token_has_none() -> None:
    routes = response_routes(np.ones((2, 3, 4), np.uint8))
    assert routes is not None
    assert routes.dtype == np.uint8
    assert routes[:, 0, 0].tolist() == [1, 1, 255]
    assert (routes[2] == 255).all()
    assert response_routes(None) is None


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "knows_internals", lambda: False)
    with refuses(ConfigError, "actor_rollout_ref.actor.router_replay.mode=R3", "0.32."):
        recording_args("cpu")
    assert recording_args("cuda") == {"enable_return_routed_experts": True}, "which says itself what it needs"
