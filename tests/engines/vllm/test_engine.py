"""Real vLLM engines against Hugging Face: the same log-probs, before and after new weights."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch

from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.engines.vllm import vllm_engine
from grpo_dist.engines.weights.buckets import pack
from grpo_dist.errors import BatchError, ConfigError, EngineError, WeightSyncError
from grpo_dist.protocol import DataProto
from grpo_dist.runtime.group import WorkerGroup
from tests.messages import refuses
from tests.models import VOCAB
from tests.worker_settings import engine_settings

pytestmark = pytest.mark.ray

RANKS = {"tied": 0, "untied": 1}
EOS = 2
PROMPTS = ([5, 6, 7], [40, 41, 42, 43, 44, 45, 46, 47], list(range(50, 90)))


def sampling(**changes: object) -> SamplingSettings:
    values = {"n": 2, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_tokens": 20, "seed": 11}
    return SamplingSettings(**(values | changes))  # type: ignore[arg-type]


def submit(group: WorkerGroup, rank: int, prompt: Sequence[int], settings: SamplingSettings) -> Any:
    return group.submit(rank, "generate", "generate", "uid", np.asarray(prompt, np.int32), settings)


def generate(group: WorkerGroup, rank: int, prompts: Sequence[Sequence[int]], settings: SamplingSettings) -> DataProto:
    """Responses to all prompts, sampled at once."""
    answers = group.gather([submit(group, rank, prompt, settings) for prompt in prompts])
    return DataProto.concat([data for _, data in answers])


def tokens(data: DataProto) -> list[list[int]]:
    return [row.tolist() for row in data["responses"].rows()]


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


def assert_log_probs_equal(model: Any, data: DataProto) -> None:
    columns = (data[name].rows() for name in ("prompts", "responses", "rollout_log_probs"))
    for prompt, response, log_probs in zip(*columns, strict=True):
        torch.testing.assert_close(log_probs, hf_log_probs(model, prompt, response), atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def models(random_models: dict[str, str]) -> dict[str, Any]:
    import transformers

    return {name: transformers.AutoModelForCausalLM.from_pretrained(path) for name, path in random_models.items()}


@pytest.mark.deep
@pytest.mark.parametrize("timeout_s", [None, 600.0])
async def test_a_call_that_is_pending_when_the_engine_dies_ends(timeout_s: float | None) -> None:
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
        await asyncio.wait_for(engine._call(pending(), timeout_s), 60)
    await asyncio.sleep(0)
    assert ended, "it does not go on behind the caller's back"


@pytest.mark.parametrize("name", RANKS)
def test_sampled_log_probs_equal_hugging_face(rollouts: WorkerGroup, models: dict[str, Any], name: str) -> None:
    data = generate(rollouts, RANKS[name], PROMPTS, sampling(n=17, ignore_eos=True))
    assert data["response_length"].sum() == 1020
    assert_log_probs_equal(models[name], data)
    assert data["rollout_log_probs"].values.std() > 0.3, "near uniform: the temperature would not show"
    assert (data["weight_version"] == -1).all(), "no weights were sent yet"


def perturbed(model: Any, seed: int) -> Any:
    """A copy with every weight moved by half of its tensor's spread."""
    import copy

    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in other.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += 0.5 * parameter.data.abs().mean() * noise
    return other


def load(group: WorkerGroup, rank: int, model: Any, version: int, when_running: int | None = None) -> int:
    weights = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    buckets = [ray.put(bucket) for bucket in pack(weights, bucket_bytes=20_000)]
    assert len(buckets) > 2
    if when_running is not None:
        return group.call(rank, "sync_weights", "load_weights_when_running", when_running, buckets, version)
    return group.call(rank, "sync_weights", "load_weights", buckets, version)


@pytest.mark.parametrize("name", RANKS)
def test_new_weights_are_the_ones_that_generate(rollouts: WorkerGroup, models: dict[str, Any], name: str) -> None:
    """On CPU a tied lm_head goes on with its old, packed weights unless it is packed again."""
    rank, old = RANKS[name], models[name]
    greedy = sampling(n=1, temperature=0.0, seed=None)
    assert tokens(generate(rollouts, rank, PROMPTS, greedy)) == [hf_greedy(old, prompt, 20) for prompt in PROMPTS]
    for version, new in ((7, perturbed(old, 1)), (8, perturbed(old, 2)), (9, old)):  # and back, for the other tests
        assert load(rollouts, rank, new, version) == version
        answers = generate(rollouts, rank, PROMPTS, greedy)
        assert tokens(answers) == [hf_greedy(new, prompt, 20) for prompt in PROMPTS], version
        assert answers["weight_version"].tolist() == [version] * 3
        assert_log_probs_equal(new, generate(rollouts, rank, PROMPTS, sampling()))
        if new is not old:
            assert tokens(answers) != [hf_greedy(old, prompt, 20) for prompt in PROMPTS], "the change does not show"


@pytest.mark.deep
def test_damaged_weights_leave_the_old_ones_in_force(rollouts: WorkerGroup, models: dict[str, Any]) -> None:
    greedy = sampling(n=1, temperature=0.0, seed=None)
    assert load(rollouts, 0, models["tied"], 20) == 20
    before = tokens(generate(rollouts, 0, PROMPTS, greedy))
    new = perturbed(models["tied"], 3)
    buckets = list(pack(((name, p.detach()) for name, p in new.named_parameters()), bucket_bytes=20_000))
    data = buckets[-1].data.copy()
    data[-1] ^= 128
    bad = [*buckets[:-1], dataclasses.replace(buckets[-1], data=data)]
    refused = {"damaged": (bad, 21), "missing": (buckets[:-1], 21), "after": (buckets, 20)}
    for word, (sent, version) in refused.items():
        with refuses(WeightSyncError, word, "version 20"):
            rollouts.call(0, "sync_weights", "load_weights", [ray.put(bucket) for bucket in sent], version)
        answers = generate(rollouts, 0, PROMPTS, greedy)
        assert tokens(answers) == before
        assert set(answers["weight_version"].tolist()) == {20}
    assert load(rollouts, 0, models["tied"], 21) == 21, "the next good sync is taken"


@pytest.mark.deep
def test_responses_go_on_under_new_weights_and_every_token_knows_its_version(
    rollouts: WorkerGroup, models: dict[str, Any]
) -> None:
    old, new = models["tied"], perturbed(models["tied"], 4)
    assert load(rollouts, 0, old, 30) == 30
    settings = sampling(n=8, max_tokens=50, ignore_eos=True)
    call = submit(rollouts, 0, PROMPTS[0], settings)
    assert load(rollouts, 0, new, 31, when_running=8) == 31
    _, data = rollouts.gather([call])[0]
    assert set(data["weight_version"].tolist()) == {30}, "the request had begun under the old weights"
    assert set(data["last_weight_version"].tolist()) == {31}, "and went on under the new ones"
    columns = (data[name].rows() for name in ("prompts", "responses", "rollout_log_probs", "weight_versions"))
    for prompt, response, log_probs, versions in zip(*columns, strict=True):
        assert versions.tolist() == sorted(versions.tolist())
        for model, version in ((old, 30), (new, 31)):
            expected = hf_log_probs(model, prompt, response)[versions == version]
            torch.testing.assert_close(log_probs[versions == version], expected, atol=1e-4, rtol=0)
    assert load(rollouts, 0, old, 32) == 32


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
    ("prompt", "parts"),
    [
        ([], ["0 tokens", "1 to 95"]),
        ([5] * 96, ["96 tokens", "rollout.max_model_len=96"]),
        ([5, VOCAB], [f"5..{VOCAB}", f"vocabulary of {VOCAB}"]),
        ([-1, 5], ["-1..5"]),
    ],
    ids=["empty", "too long", "above the vocabulary", "negative"],
)
def test_a_bad_prompt_is_refused_and_the_engine_lives_on(rollouts: WorkerGroup, prompt: list, parts: list) -> None:
    with refuses(BatchError, *parts):
        rollouts.gather([submit(rollouts, 0, prompt, sampling())])
    assert len(generate(rollouts, 0, PROMPTS[:1], sampling())) == 2


@pytest.mark.deep
def test_sampling_settings_that_vllm_refuses_are_named(rollouts: WorkerGroup) -> None:
    with refuses(ConfigError, "rollout", "vLLM", "temperature"):
        rollouts.gather([submit(rollouts, 0, [5, 6], sampling(temperature=10.0))])
    assert len(generate(rollouts, 0, PROMPTS[:1], sampling())) == 2


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
def test_a_response_has_its_fewest_tokens(rollouts: WorkerGroup) -> None:
    lengths = generate(rollouts, 0, PROMPTS, sampling(n=16, temperature=2.0, min_tokens=15))["response_length"]
    assert min(lengths.tolist()) >= 15


@pytest.mark.deep
@pytest.mark.parametrize(
    "option", [{"min_p": 1.0}, {"top_k": 1}, {"top_p": 1e-6}], ids=lambda option: next(iter(option))
)
def test_what_cuts_the_distribution_may_leave_only_the_likeliest(rollouts: WorkerGroup, option: dict) -> None:
    """Nothing but the likeliest token is left, and its log-prob is 0."""
    greedy = tokens(generate(rollouts, 0, PROMPTS, sampling(n=1, temperature=0.0, seed=None)))
    cut = generate(rollouts, 0, PROMPTS, sampling(n=1, **option))
    assert tokens(generate(rollouts, 0, PROMPTS, sampling(n=1))) != greedy
    assert tokens(cut) == greedy
    assert cut["rollout_log_probs"].values.abs().max() < 1e-5


@pytest.mark.deep
def test_the_longest_prompt_is_taken(rollouts: WorkerGroup) -> None:
    """95 of 96 tokens: one is left for the response."""
    data = generate(rollouts, 0, [[5] * 95], sampling())
    assert data["response_length"].tolist() == [1, 1]


@pytest.mark.deep
def test_a_response_ends_with_its_first_end_of_sequence(rollouts: WorkerGroup) -> None:
    """At the highest temperature that vLLM takes every token is likely, the end among them."""
    data = generate(rollouts, 1, PROMPTS[:1], sampling(n=48, temperature=2.0, max_tokens=40))
    ended = [row for row, cut in zip(tokens(data), data["truncated"], strict=True) if not cut]
    cut = [row for row, cut in zip(tokens(data), data["truncated"], strict=True) if cut]
    assert ended, "no response ended by itself: the test proves nothing"
    assert cut, "no response was cut: the test proves nothing"
    for row in ended:
        assert row.index(EOS) == len(row) - 1
    for row in cut:
        assert EOS not in row
        assert len(row) == 40
    assert data["rollout_log_probs"].lengths.tolist() == [len(row) for row in tokens(data)]
