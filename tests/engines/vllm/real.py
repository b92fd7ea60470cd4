"""Real vLLM engines in rollout workers: what tests ask them, and what Hugging Face's models answer."""

import asyncio
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import torch

from grpo_dist.engines.settings import EngineSettings, SamplingSettings
from grpo_dist.engines.weights.buckets import Bucket, pack
from grpo_dist.protocol import DataProto
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.workers.rollout import RolloutWorker
from tests.engines.train.plain import log_probs_alone
from tests.processes import spawned

RANKS = {"tied": 0, "untied": 1}
EOS = 2
PROMPTS = ([5, 6, 7], [40, 41, 42, 43, 44, 45, 46, 47], list(range(50, 90)))


class WatchedRolloutWorker(RolloutWorker):
    """Waits by itself until so many sequences are being sampled, and then does what it was asked for."""

    engine: Any

    async def load_weights_when_running(self, count: int, buckets: Sequence[ray.ObjectRef], version: int) -> int:
        await self._running(count)
        return await self.load_weights(buckets, version)

    async def score(self, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
        return list((await self.engine.score(prompt, response)).log_probs)

    async def at_once(self, prompt: Sequence[int], sampling: SamplingSettings) -> list[tuple[list[int], list[float]]]:
        """One request for a whole group, whatever its agent loop is."""
        return [(each.token_ids, each.log_probs) for each in await self.engine.generate(prompt, sampling)]

    async def abort_when_running(self, count: int, uids: Sequence[str]) -> None:
        await self._running(count)
        await self.abort(uids)

    async def _running(self, count: int) -> None:
        while self.engine.load.running < count:
            await asyncio.sleep(0)


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


@torch.no_grad()
def assert_log_probs_equal(model: Any, data: DataProto, version: int | None = None) -> None:
    """Of all tokens, or of those of one version of the weights."""
    sampled = (data[name].rows() for name in ("rollout_log_probs", "weight_versions"))
    for expected, log_probs, versions in zip(log_probs_alone(model, data, 0.7), *sampled, strict=True):
        chosen = torch.full_like(versions, True, dtype=torch.bool) if version is None else versions == version
        torch.testing.assert_close(log_probs[chosen], expected[chosen], atol=1e-4, rtol=0)
