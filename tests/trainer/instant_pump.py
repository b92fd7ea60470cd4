"""A sampler on a pump that answers at once, and an order that remembers what it is asked and told."""

import asyncio
import json
import weakref
from collections.abc import Coroutine
from typing import Any

import numpy as np

from grpo_dist.data import Prompt
from grpo_dist.data.sampler import PromptSampler
from grpo_dist.data.tokenize import TokenizedPrompt
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import AgentError
from grpo_dist.plan.commands import load_config
from grpo_dist.runtime.batch_ref import DataProtoRef, Frame
from grpo_dist.runtime.event_loop import blocking
from grpo_dist.trainer.checkpoint.saver import Group
from grpo_dist.trainer.rollout.job import RolloutJob
from grpo_dist.trainer.rollout.sampling import TrainingSampler
from grpo_dist.workers.rollout import GroupRequest

N = 4
LENGTH = 3  # of each response, in tokens


class Stored:
    """Stands for an object in Ray's store."""


def stored(column: str, rows: int) -> Frame:
    """A column whose object lives as long as somebody holds a handle of it."""
    return Frame((column,), (Stored(),), np.zeros(rows, np.int64), np.arange(rows))  # type: ignore[arg-type]


class InstantPump:
    """Scores prompt i of the data set with `scores[i]`; a greedy response scores 9."""

    sources = ()

    def __init__(self, scores: list[list[float]]) -> None:
        self.scores, self.requests, self.late = scores, [], ()
        self.machines_lost = self.num_episodes = self.num_failed_episodes = 0
        self.failing: dict[Any, str] = {}  # (prompt i, or its greedy response) -> kind
        self.objects: list[tuple[str, weakref.ref]] = []

    def submit(self, requests: list[GroupRequest], *, finished: dict[int, Group], **_: Any) -> RolloutJob:
        self.requests += [request for i, request in enumerate(requests) if i not in finished]
        job = RolloutJob(requests, timings={"gen": 1.0})
        for i, request in enumerate(requests):
            greedy, index = request.sampling.temperature == 0, request.task.extra_info["index"]
            scores = np.array([9.0] if greedy else self.scores[index])
            if kind := self.failing.get(("greedy", index) if greedy else index):
                job.failed[i] = AgentError("it failed", kind, was_last=True)
                job.failed_attempts[i] = [job.failed[i]]
                continue
            rows = len(scores)
            of_rows = {"uid": np.array([request.uid] * rows), "response_length": np.full(rows, LENGTH)}
            job.groups[i] = DataProtoRef((stored("responses", rows),), of_rows, rows)
            small = {"score": scores, "reward_extra/acc": (scores > 0).astype(float)}
            job.scores[i] = DataProtoRef((stored("token_level_scores", rows),), small, rows)
            handles = job.groups[i], job.scores[i]
            self.objects += [(request.uid, weakref.ref(handle.frames[0].blocks[0])) for handle in handles]
        for i, (group, scores) in finished.items():
            job.groups[i], job.scores[i] = group, scores
        for i in self.late:
            del job.scores[i]
        self.change(job)
        return job

    def change(self, job: RolloutJob) -> None:
        """Let a job come out otherwise; a test may put another function here."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(coroutine)

    def held(self) -> list[str]:
        """Groups of which responses or scores are held."""
        return list(dict.fromkeys(uid for uid, found in self.objects if found() is not None))


@blocking
async def open_steps(sampler: TrainingSampler, first: int, last: int) -> None:
    """Open steps, and sample all that they need."""
    sampler.open_steps(first, last)
    await asyncio.gather(*(each.filling for each in sampler.open.values() if each.filling is not None))


def tokenized(*indices: int) -> list[Any]:
    """Prompts with these numbers, each of one token."""
    prompts = (Prompt(i, "d", [], "", {"index": i}, "") for i in indices)
    return [TokenizedPrompt(prompt, np.array([prompt.index])) for prompt in prompts]


def make_sampler(scores: list[list[float]], *overrides: str) -> TrainingSampler:
    """2 prompts a step, in order, of those that have these scores."""
    sizes = ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    config, _ = load_config([*sizes, f"actor_rollout_ref.rollout.n={N}", *overrides])
    prompts = tokenized(*range(len(scores)))
    order = PromptSampler(len(prompts), 2, shuffle=False, seed=0)
    sampling = SamplingSettings(N, 1.0, 1.0, -1, 8, 0)
    return TrainingSampler(config, InstantPump(scores), prompts, order, sampling)  # type: ignore[arg-type]


MIXED, EQUAL = [1.0, 0, 0, 0], [1.0, 1, 1, 1]
FILTER = "algorithm.filter_groups.enable=true"


def resumed_sampler(before: TrainingSampler, scores: list, *overrides: str, with_groups: bool = False) -> Any:
    """A sampler that goes on where `before` is, with the groups that were finished there or without."""
    ledger, order = json.loads(json.dumps([before.state_dict(), before.order.state_dict()]))
    after = make_sampler(scores, *overrides)
    after.order.load_state_dict(order)
    after.load_state_dict(ledger)
    if with_groups:
        after.restored = {uid: pair for each in before.finished_groups() for uid, pair in each.groups.items()}
    return after


class RecordingOrder:
    """Batches in order; remembers what it is told, and between which batches."""

    def __init__(self, *batches: list[int]) -> None:
        self.batches, self.told, self.calls = iter(batches or [[1, 0], [3, 2]]), [], []

    def next_batch(self) -> list[int]:
        batch = next(self.batches)
        self.calls.append(f"ask {batch}")
        return batch

    def update(self, scores_by_index: dict) -> None:
        self.told.append({index: scores.tolist() for index, scores in scores_by_index.items()})
        self.calls.append(f"tell {list(scores_by_index)}")
