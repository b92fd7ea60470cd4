"""Real vLLM engines against Hugging Face: the same log-probs, before and after new weights."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch

from grpo_dist.engines.settings import EngineSettings, SamplingSettings
from grpo_dist.engines.vllm import vllm_engine
from grpo_dist.engines.weights.buckets import Bucket, pack
from grpo_dist.errors import BatchError, ConfigError, EngineError, WeightSyncError
from grpo_dist.protocol import DataProto
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.group import WorkerGroup
from tests.engines.vllm.watched_rollout import WatchedRolloutWorker
from tests.messages import refuses
from tests.models import VOCAB
from tests.processes import spawned
from tests.worker_settings import engine_settings

pytestmark = pytest.mark.ray

RANKS = {"tied": 0, "untied": 1}
EOS = 2
COLUMNS = ("prompts", "responses", "rollout_log_probs", "weight_versions")
PROMPTS = ([5, 6, 7], [40, 41, 42, 43, 44, 45, 46, 47], list(range(50, 90)))


# --- what engines are asked, and what Hugging Face's models answer ---------------------------------------------------
@contextmanager
def started(*settings: EngineSettings, worker: type = WatchedRolloutWorker) -> Iterator[WorkerGroup]:
    """A rollout worker with a started engine for each of the settings."""
    with spawned("rollout", worker, [()] * len(settings), env={"OMP_NUM_THREADS": "1"}) as group:
        group.gather([group.submit(rank, "start", "start", each) for rank, each in enumerate(settings)])
        yield group
        group.call_all("shutdown", "shutdown")


def sampling(**changes: object) -> SamplingSettings:
    values = {"n": 2, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_tokens": 20, "seed": 11}
    return SamplingSettings(**(values | changes))  # type: ignore[arg-type]


GREEDY = sampling(n=1, temperature=0.0, seed=None)


def submit(group: WorkerGroup, rank: int, prompt: Sequence[int], settings: SamplingSettings) -> Any:
    return group.submit(rank, "generate", "generate", "uid", np.asarray(prompt, np.int32), settings)


def generate(group: WorkerGroup, rank: int, prompts: Sequence[Sequence[int]], settings: SamplingSettings) -> DataProto:
    """Responses to all prompts, sampled at once."""
    answers = group.gather([submit(group, rank, prompt, settings) for prompt in prompts])
    return DataProto.concat([data for _, data in answers])


def tokens(data: DataProto) -> list[list[int]]:
    return [row.tolist() for row in data["responses"].rows()]


def greedy(group: WorkerGroup, rank: int = 0) -> list[list[int]]:
    """The likeliest answers to all prompts."""
    return tokens(generate(group, rank, PROMPTS, GREEDY))


def buckets(model: Any) -> list[Bucket]:
    return list(pack(((name, each.detach()) for name, each in model.named_parameters()), bucket_bytes=20_000))


def send(group: WorkerGroup, rank: int, weights: Any, version: int, when_running: int | None = None) -> Call:
    """Weights, of a model or in buckets, once so many sequences are being sampled."""
    stored = [ray.put(bucket) for bucket in (weights if isinstance(weights, list) else buckets(weights))]
    assert len(stored) > 2 or isinstance(weights, list)
    if when_running is not None:
        return group.submit(rank, "sync_weights", "load_weights_when_running", when_running, stored, version)
    return group.submit(rank, "sync_weights", "load_weights", stored, version)


def load(group: WorkerGroup, rank: int, weights: Any, version: int, when_running: int | None = None) -> int:
    return group.gather([send(group, rank, weights, version, when_running)])[0]


def damaged(whole: list[Bucket]) -> list[Bucket]:
    """With another bit in the last of them."""
    data = whole[-1].data.copy()
    data[-1] ^= 128
    return [*whole[:-1], dataclasses.replace(whole[-1], data=data)]


def of_folder(path: str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def perturbed(model: Any, seed: int) -> Any:
    """A copy with every weight moved by half of its tensor's spread."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in other.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += 0.5 * parameter.data.abs().mean() * noise
    return other


@torch.no_grad()
def hf_log_probs(model: Any, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    ids = torch.cat([prompt, response]).long()
    logits = model(input_ids=ids.unsqueeze(0)).logits[0, len(prompt) - 1 : -1] / 0.7
    return torch.log_softmax(logits, -1).gather(-1, response.long().unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def hf_greedy(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


def hf_answers(model: Any) -> list[list[int]]:
    """What `greedy` should give."""
    return [hf_greedy(model, prompt, 20) for prompt in PROMPTS]


def assert_log_probs_equal(model: Any, data: DataProto, version: int | None = None) -> None:
    """Of all tokens, or of those of one version of the weights."""
    columns = (data[name].rows() for name in COLUMNS)
    for prompt, response, log_probs, versions in zip(*columns, strict=True):
        chosen = torch.full_like(versions, True, dtype=torch.bool) if version is None else versions == version
        expected = hf_log_probs(model, prompt, response)
        torch.testing.assert_close(log_probs[chosen], expected[chosen], atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def models(random_models: dict[str, str]) -> dict[str, Any]:
    return {name: of_folder(path) for name, path in random_models.items()}


# --- weights ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", RANKS)
def test_sampled_log_probs_equal_hugging_face(rollouts: WorkerGroup, models: dict[str, Any], name: str) -> None:
    data = generate(rollouts, RANKS[name], PROMPTS, sampling(n=17, ignore_eos=True))
    assert data["response_length"].sum() == 1020
    assert_log_probs_equal(models[name], data)
    assert data["rollout_log_probs"].values.std() > 0.3, "near uniform: the temperature would not show"
    assert (data["weight_version"] == -1).all(), "no weights were sent yet"


def test_a_given_response_has_the_log_probs_of_a_sampled_one(rollouts: WorkerGroup) -> None:
    data = generate(rollouts, 0, PROMPTS, sampling(temperature=1.0))
    for prompt, response, log_probs in zip(*(data[name].rows() for name in COLUMNS[:3]), strict=True):
        scored = rollouts.gather([rollouts.submit(0, "generate", "score", prompt.tolist(), response.tolist())])[0]
        torch.testing.assert_close(torch.tensor(scored), log_probs, atol=1e-5, rtol=0)


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


@pytest.mark.deep
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


@pytest.mark.deep
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


# --- requests --------------------------------------------------------------------------------------------------------
@pytest.mark.deep
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


@pytest.mark.deep
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


@pytest.mark.deep
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


@pytest.mark.deep
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


@pytest.mark.deep
@pytest.mark.parametrize(
    "option", [{"min_p": 1.0}, {"top_k": 1}, {"top_p": 1e-6}], ids=lambda option: next(iter(option))
)
def test_what_cuts_the_distribution_may_leave_only_the_likeliest(rollouts: WorkerGroup, option: dict) -> None:
    """Nothing but the likeliest token is left, and its log-prob is 0."""
    cut = generate(rollouts, 0, PROMPTS, sampling(n=1, **option))
    assert tokens(generate(rollouts, 0, PROMPTS, sampling(n=1))) != greedy(rollouts)
    assert tokens(cut) == greedy(rollouts)
    assert cut["rollout_log_probs"].values.abs().max() < 1e-5
