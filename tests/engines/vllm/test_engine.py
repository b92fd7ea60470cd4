"""Real vLLM engines against Hugging Face: the same log-probs, before and after new weights."""

import asyncio
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.engines.vllm import vllm_engine
from grpo_dist.errors import BatchError, ConfigError, EngineError, WeightSyncError
from grpo_dist.protocol import DataProto
from grpo_dist.runtime.group import WorkerGroup
from tests.engines.train.plain import log_probs_alone
from tests.engines.vllm.real import (
    EOS,
    GREEDY,
    PROMPTS,
    RANKS,
    assert_log_probs_equal,
    buckets,
    damaged,
    generate,
    greedy,
    hf_answers,
    load,
    of_folder,
    perturbed,
    sampling,
    send,
    started,
    submit,
    tokens,
)
from tests.messages import refuses
from tests.models import VOCAB
from tests.worker_settings import engine_settings

pytestmark = [pytest.mark.ray, pytest.mark.deep]  # what the first tier asks of an engine: workers/test_rollout.py


@pytest.fixture(scope="module")
def models(random_models: dict[str, str]) -> dict[str, Any]:
    return {name: of_folder(path) for name, path in random_models.items()}


# --- weights ------------------------------
@pytest.mark.parametrize("name", RANKS)
def test_sampled_log_probs_equal_hugging_face(rollouts: WorkerGroup, models: dict[str, Any], name: str) -> None:
    data = generate(rollouts, RANKS[name], PROMPTS, sampling(n=17, ignore_eos=True))
    assert data["response_length"].sum() == 1020
    assert_log_probs_equal(models[name], data)
    assert data["rollout_log_probs"].values.std() > 0.3, "near uniform: the temperature would not show"
    assert (data["weight_version"] == -1).all(), "no weights were sent yet"


@pytest.mark.parametrize("name", RANKS)
def test_new_weights_are_the_ones_that_generate(rollouts: WorkerGroup, models: dict[str, Any], name: str) -> None:
    """On CPU a tied lm_head goes on with its old, packed weights unless it is packed again."""
    rank, old = RANKS[name], models[name]
    assert greedy(rollouts, rank) == hf_answers(old)
    for version, new in ((7, perturbed(old, 1)), (8, perturbed(old, 2)), (9, old)):  # and back, for the other tests
        assert load(rollouts, rank, new, version) == version
        answers = generate(rollouts, rank, PROMPTS, GREEDY)
        assert tokens(answers) == hf_answers(new), version
        assert answers["weight_version"].tolist() == [version] * 3
        assert_log_probs_equal(new, generate(rollouts, rank, PROMPTS, sampling()))
        assert new is old or tokens(answers) != hf_answers(old), "the change does not show"


def test_damaged_weights_leave_the_old_ones_in_force(rollouts: WorkerGroup, models: dict[str, Any]) -> None:
    assert load(rollouts, 0, models["tied"], 20) == 20
    before, new = greedy(rollouts), buckets(perturbed(models["tied"], 3))
    refused = {"damaged": (damaged(new), 21), "missing": (new[:-1], 21), "after": (new, 20)}
    for word, (sent, version) in refused.items():
        with refuses(WeightSyncError, word, "version 20"):
            load(rollouts, 0, sent, version)
        answers = generate(rollouts, 0, PROMPTS, GREEDY)
        assert tokens(answers) == before
        assert set(answers["weight_version"].tolist()) == {20}
    assert load(rollouts, 0, models["tied"], 21) == 21, "the next good sync is taken"


def test_responses_go_on_under_new_weights_and_every_token_knows_its_version(
    rollouts: WorkerGroup, models: dict[str, Any]
) -> None:
    old, new = models["tied"], perturbed(models["tied"], 4)
    assert load(rollouts, 0, old, 30) == 30
    call = submit(rollouts, 0, PROMPTS[0], sampling(n=8, max_tokens=50, ignore_eos=True))
    assert load(rollouts, 0, new, 31, when_running=8) == 31
    _, data = rollouts.gather([call])[0]
    assert set(data["weight_version"].tolist()) == {30}, "the request had begun under the old weights"
    assert set(data["last_weight_version"].tolist()) == {31}, "and went on under the new ones"
    assert all(versions.tolist() == sorted(versions.tolist()) for versions in data["weight_versions"].rows())
    for model, version in ((old, 30), (new, 31)):
        assert_log_probs_equal(model, data, version)
    assert load(rollouts, 0, old, 32) == 32


# --- requests ------------------------------
async def test_a_call_that_is_pending_when_the_engine_dies_ends() -> None:
    """vLLM itself would let it wait for ever."""
    engine = vllm_engine(engine_settings(kv_cache_memory_gib=None))
    engine._llm = SimpleNamespace(errored=False)
    ended = []

    async def pending() -> None:
        engine._llm.errored = True
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with refuses(EngineError, "vLLM's core", "died"):
        await asyncio.wait_for(engine._call(pending(), None), 60)
    await asyncio.sleep(0)
    assert ended, "it does not go on behind the caller's back"


def test_an_aborted_group_gives_nothing_and_the_others_go_on(rollouts: WorkerGroup) -> None:
    long = sampling(n=4, max_tokens=80, ignore_eos=True, seed=None)
    prompt = np.asarray(PROMPTS[0], np.int32)
    calls = [rollouts.submit(0, "generate", "generate", uid, prompt, long) for uid in ("stop-me", "keep-me")]
    rollouts.call(0, "abort", "abort_when_running", 8, ["stop-me", "never-there"])
    ((stopped, *_), _), ((kept, load, _), _) = rollouts.gather(calls)
    assert stopped is None
    assert kept.small["response_length"].tolist() == [80] * 4
    assert load.waiting == 0
    (again, *_), _ = rollouts.gather([rollouts.submit(0, "generate", "generate", "stop-me", prompt, long)])[0]
    assert again.num_rows == 4, "the same group may be asked for again"


def test_a_seed_decides_the_tokens_whatever_else_runs(rollouts: WorkerGroup) -> None:
    alone = tokens(generate(rollouts, 0, PROMPTS[:1], sampling(n=3)))
    others = [submit(rollouts, 0, [i, i + 1, i + 2], sampling(seed=i, max_tokens=40)) for i in range(3, 30)]
    among = submit(rollouts, 0, PROMPTS[0], sampling(n=3))
    answers = rollouts.gather([*others, among])
    assert tokens(answers[-1][1]) == alone
    assert len({tuple(row) for row in alone}) == 3, "the responses of a group differ"
    assert tokens(generate(rollouts, 0, PROMPTS[:1], sampling(n=3, seed=500))) != alone
    one = tokens(generate(rollouts, 0, PROMPTS[:1], sampling(n=1, seed=12)))
    assert one == alone[1:2], "response i is sampled with seed + i"


@pytest.mark.parametrize(
    ("prompt", "changes", "error", "parts"),
    [
        ([], {}, BatchError, ["0 tokens", "1 to 95"]),
        ([5] * 96, {}, BatchError, ["96 tokens", "rollout.max_model_len=96"]),
        ([5, VOCAB], {}, BatchError, [f"5..{VOCAB}", f"vocabulary of {VOCAB}"]),
        ([-1, 5], {}, BatchError, ["-1..5"]),
        ([5, 6], {"temperature": 10.0}, ConfigError, ["rollout", "vLLM", "temperature"]),
    ],
)
def test_a_bad_request_is_refused_and_the_engine_lives_on(
    rollouts: WorkerGroup, prompt: list[int], changes: dict[str, Any], error: type[Exception], parts: list[str]
) -> None:
    with refuses(error, *parts):
        rollouts.gather([submit(rollouts, 0, prompt, sampling(**changes))])
    longest = generate(rollouts, 0, [[5] * 95], sampling())
    assert longest["response_length"].tolist() == [1, 1], "of 96 tokens one is left for the response"


def test_texts_that_stop_and_texts_that_are_forbidden(rollouts: WorkerGroup) -> None:
    """At temperature 2 every word comes up; the stop word's token belongs to the response."""
    free = tokens(generate(rollouts, 1, PROMPTS[:1], sampling(n=32, temperature=2.0, ignore_eos=True)))
    assert {17, 18} <= {token for row in free for token in row}, "they are sampled: the test proves something"
    stopped = generate(rollouts, 1, PROMPTS[:1], sampling(n=32, temperature=2.0, stop=("w17",)))
    for row, cut in zip(tokens(stopped), stopped["truncated"], strict=True):
        assert 17 not in row[:-1]
        assert cut or row[-1] in (17, EOS)
    assert any(row[-1] == 17 for row in tokens(stopped))
    without = tokens(generate(rollouts, 1, PROMPTS[:1], sampling(n=32, temperature=2.0, bad_words=("w17", "w18"))))
    assert {17, 18}.isdisjoint(token for row in without for token in row)


def test_a_response_ends_with_its_first_end_of_sequence_and_has_its_fewest_tokens(rollouts: WorkerGroup) -> None:
    """At the highest temperature that vLLM takes every token is likely, the end among them."""
    data = generate(rollouts, 1, PROMPTS[:1], sampling(n=48, temperature=2.0, max_tokens=40))
    ended = [row for row, cut in zip(tokens(data), data["truncated"], strict=True) if not cut]
    cut = [row for row, cut in zip(tokens(data), data["truncated"], strict=True) if cut]
    assert ended, "no response ended by itself: the test proves nothing"
    assert cut, "no response was cut: the test proves nothing"
    assert all(row.index(EOS) == len(row) - 1 for row in ended)
    assert all(EOS not in row and len(row) == 40 for row in cut)
    assert data["rollout_log_probs"].lengths.tolist() == [len(row) for row in tokens(data)]
    longer = generate(rollouts, 1, PROMPTS[:1], sampling(n=48, temperature=2.0, max_tokens=40, min_tokens=15))
    assert min(len(row) for row in ended) < 15 <= min(longer["response_length"].tolist())


@pytest.mark.parametrize(
    "option", [{"min_p": 1.0}, {"top_k": 1}, {"top_p": 1e-6}], ids=lambda option: next(iter(option))
)
def test_what_cuts_the_distribution_may_leave_only_the_likeliest(rollouts: WorkerGroup, option: dict) -> None:
    cut = generate(rollouts, 0, PROMPTS, sampling(n=1, **option))
    assert tokens(generate(rollouts, 0, PROMPTS, sampling(n=1))) != greedy(rollouts)
    assert tokens(cut) == greedy(rollouts)
    assert cut["rollout_log_probs"].values.abs().max() < 1e-5


# --- weights that come while responses are in flight ------------------------------
KEPT, WHOLE = 0, 1  # ranks: one keeps the cache of what is in flight, one has it end first
PROMPT = PROMPTS[2]  # longer than a block of the cache
LONG = sampling(n=4, max_tokens=55, ignore_eos=True)
VERSIONS = itertools.count()
Models = tuple[Any, Any]  # with the old weights, and the new ones


@pytest.fixture(scope="module")
def engines(local_ray: None, random_models: dict[str, str]) -> Iterator[WorkerGroup]:
    changes = ({"clear_kv_cache_on_update": False}, {"partial_rollout": False})
    with started(*(engine_settings(random_models["tied"], **change) for change in changes)) as group:
        yield group


@pytest.fixture(scope="module")
def old_and_new(models: dict[str, Any]) -> Models:
    return models["tied"], perturbed(models["tied"], 5)


def updated_in_flight(group: WorkerGroup, rank: int, models: Models) -> tuple[DataProto, DataProto, int]:
    """A group that is in flight when the new weights come, one asked for right after that, and the old version."""
    old = load(group, rank, models[0], next(VERSIONS))
    call = submit(group, rank, PROMPT, LONG)
    sync = send(group, rank, models[1], next(VERSIONS), when_running=LONG.n)
    after = submit(group, rank, PROMPT, LONG)
    (_, data), (_, later), version = group.gather([call, after, sync])
    assert version == old + 1
    assert data["response_length"].tolist() == [LONG.max_tokens] * LONG.n
    return data, later, old


@torch.no_grad()
def log_probs_with_kept_cache(models: Models, prompt: Any, response: Any, num_old: int) -> Any:
    """Of the tokens under the new weights: all that the old ones had read stays in the cache as it was."""
    old, new = models
    ids = torch.cat([prompt, response]).long().unsqueeze(0)
    num_read = len(prompt) + num_old - 1  # the last that the old weights sampled is the first that the new ones read
    cache = old(input_ids=ids[:, :num_read], use_cache=True).past_key_values
    logits = new(input_ids=ids[:, num_read:-1], past_key_values=cache).logits[0] / LONG.temperature
    return torch.log_softmax(logits, -1).gather(-1, response[num_old:].long().unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def test_a_kept_cache_goes_on_under_new_weights(engines: WorkerGroup, old_and_new: Models) -> None:
    """And serves no request that comes later, whose prompt was computed under the old weights and is there."""
    data, _, old = updated_in_flight(engines, KEPT, old_and_new)
    assert set(data["last_weight_version"].tolist()) == {old + 1}
    assert_log_probs_equal(old_and_new[0], data, old)
    columns = (data[name].rows() for name in ("prompts", "responses", "rollout_log_probs", "weight_versions"))
    recomputed = log_probs_alone(old_and_new[1], data, 0.7)
    for prompt, response, log_probs, versions, anew in zip(*columns, recomputed, strict=True):
        num_old = int((versions == old).sum())
        assert versions.tolist() == [old] * num_old + [old + 1] * (LONG.max_tokens - num_old)
        kept = log_probs_with_kept_cache(old_and_new, prompt, response, num_old)
        torch.testing.assert_close(log_probs[num_old:], kept, atol=1e-4, rtol=0)
        assert (kept - anew[num_old:]).abs().max() > 1e-2, "the difference shows"
    for _ in range(2):
        assert_log_probs_equal(old_and_new[1], generate(engines, KEPT, [PROMPT], LONG))


def test_a_kept_cache_serves_no_request_that_comes_while_weights_do(engines: WorkerGroup, old_and_new: Models) -> None:
    load(engines, KEPT, old_and_new[0], next(VERSIONS))
    assert_log_probs_equal(old_and_new[0], generate(engines, KEPT, [PROMPT], LONG))
    engines.call(KEPT, "sync_weights", "pause_for_weights")
    call = submit(engines, KEPT, PROMPT, LONG)
    (_, data), version = engines.gather([call, send(engines, KEPT, old_and_new[1], next(VERSIONS))])
    assert set(data["weight_version"].tolist()) == {version}
    assert_log_probs_equal(old_and_new[1], data)


def test_without_partial_rollouts_new_weights_wait_for_responses(engines: WorkerGroup, old_and_new: Models) -> None:
    data, later, old = updated_in_flight(engines, WHOLE, old_and_new)
    assert set(data["weight_versions"].values.tolist()) == {old}
    assert_log_probs_equal(old_and_new[0], data)
    (version,) = set(later["weight_versions"].values.tolist())
    assert_log_probs_equal(old_and_new[version - old], later)
    assert_log_probs_equal(old_and_new[1], generate(engines, WHOLE, [PROMPT], LONG))
