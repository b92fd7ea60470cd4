"""The rollout worker: one rollout engine in an asynchronous Ray actor. Many prompts are in flight at once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch

from grpo_dist.agents.episode import Episode, Row
from grpo_dist.agents.runner import EpisodeRunner
from grpo_dist.data.tokenize import load_tokenizer
from grpo_dist.engines.base import EngineLoad, Footprint, Response, RolloutEngine, check_responses, rollout_engine
from grpo_dist.engines.settings import EngineSettings, GroupAddress, SamplingSettings
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.rewards.output_lines import printing_to
from grpo_dist.workers.batch_ref import Label
from grpo_dist.workers.mailbox import Mailbox
from grpo_dist.workers.process import Process
from grpo_dist.workers.reward import Task

# Columns that travel inside the handle: one number or string per sequence.
SMALL_COLUMNS = (
    "uid",
    "prompt_length",
    "response_length",
    "truncated",
    "num_turns",
    "weight_version",
    "last_weight_version",
)


class RolloutWorker(Mailbox, Process):
    """Generates responses, of one turn or of an agent loop's episodes, and loads new weights."""

    engine: RolloutEngine
    runner: EpisodeRunner | None = None

    async def start(self, settings: EngineSettings) -> Footprint | None:
        """Start the engine, and the agent loop if there is one; returns the memory that it took of its GPUs."""
        if settings.gpus:  # before CUDA is set up
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(settings.gpus)
        self.check_build(settings.device)
        engine = rollout_engine(settings.engine)
        self.engine = engine(replace(settings, model_path=self.find_model(settings.model_path)))
        taken = await self.engine.start()
        if settings.agent is not None:
            await self._start_agent()
        return taken

    async def _start_agent(self) -> None:
        settings = self.engine.settings
        assert settings.agent is not None
        self.tokenizer = load_tokenizer(settings.model_path, trust_remote_code=settings.trust_remote_code)
        self.episodes: dict[str, asyncio.Task] = {}  # by group
        self.runner = EpisodeRunner(settings.agent, self.engine.generate)
        with printing_to(self.printed):
            await self.runner.start()

    async def generate(
        self, uid: str, prompt: np.ndarray, sampling: SamplingSettings, task: Task | None = None
    ) -> tuple[tuple[Label | None, EngineLoad], DataProto | None]:
        """Sample a group of responses to one prompt; an agent loop is told of the prompt by `task`.

        Returns:
            ((label of the group; the engine's load), the group, a row per response). An aborted group is None, and so
            is its label.
        """
        if self.runner is None:  # one request: the prompt is computed once
            responses = await self.engine.generate(prompt.tolist(), sampling, uid)
        else:
            responses = await self._run_episodes(self.runner, uid, prompt, sampling, task)
        if responses is None:
            return (None, self.engine.load), None
        check_responses(self.engine, responses, sampling.n)
        data = group_batch(uid, prompt, responses)
        return (Label.of(data, SMALL_COLUMNS), self.engine.load), data

    async def _run_episodes(
        self, runner: EpisodeRunner, uid: str, prompt: np.ndarray, sampling: SamplingSettings, task: Task | None
    ) -> list[Response] | None:
        """The responses of `sampling.n` episodes that run side by side; None if the group was aborted."""
        row = Row(uid, prompt.tolist())
        if task is not None:  # all but the ground truth
            row = replace(row, messages=task.messages, data_source=task.data_source, extra_info=task.extra_info)
        common: dict[str, Any] = {"tokenizer": self.tokenizer, "max_model_len": self.engine.settings.max_model_len}
        episodes = [Episode(row, sampling, index=i, **common) for i in range(sampling.n)]
        with printing_to(self.printed):  # the task goes on in it, and so does the loop's thread
            self.episodes[uid] = asyncio.create_task(runner.run(episodes))
        try:
            return await self.episodes[uid]
        except asyncio.CancelledError:
            return None
        finally:
            del self.episodes[uid]

    async def abort(self, uids: Sequence[str]) -> None:
        """End the generation of these groups, and their episodes."""
        for uid in uids:
            if self.runner is not None and uid in self.episodes:
                self.episodes[uid].cancel()
            await self.engine.abort(uid)

    async def load_weights(self, buckets: Sequence[ray.ObjectRef], version: int) -> int:
        """Replace the weights by those in the buckets; returns their version."""
        await self.engine.weights.load([await bucket for bucket in buckets], version)
        return self.engine.weights.version

    async def join_weight_group(self, address: GroupAddress, first_rank: int) -> None:
        """Join the weight group to which the actor sends, with ranks from `first_rank` on."""
        await self.engine.weights.join(address, first_rank)

    async def sleep(self) -> None:
        """Release the GPUs' memory until new weights have come."""
        await self.engine.weights.sleep()

    async def pause_for_weights(self) -> None:
        """Hold the running requests, or let them end first (`rollout.partial_rollout`), until weights have come."""
        await self.engine.weights.pause()

    async def receive_weights(self, version: int) -> int:
        """Replace the weights by those that the actor sends; returns their version."""
        await self.engine.weights.receive(version)
        return self.engine.weights.version

    async def shutdown(self) -> None:
        """Stop the engine and the agent loop."""
        if self.runner is not None:
            self.runner.stop()
        self.engine.shutdown()


def group_batch(uid: str, prompt: np.ndarray, responses: Sequence[Response]) -> DataProto:
    """The responses to one prompt as a batch. Sampled tokens train, the end-of-sequence token among them."""
    lengths = [len(response.token_ids) for response in responses]
    masks = [[1] * len(r.token_ids) if r.mask is None else r.mask for r in responses]
    versions = [
        [version for version, sampled in zip(r.weight_versions, mask, strict=False) if sampled]
        for r, mask in zip(responses, masks, strict=True)
    ]
    n = len(responses)
    return DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([prompt] * n, torch.int32),
            "responses": Ragged.from_rows([r.token_ids for r in responses], torch.int32),
            "response_mask": Ragged.from_rows(masks, torch.int8),
            "rollout_log_probs": Ragged.from_rows([r.log_probs for r in responses], torch.float32),
            "prompt_length": torch.full((n,), len(prompt), dtype=torch.int64),
            "response_length": torch.tensor(lengths, dtype=torch.int64),
            "truncated": torch.tensor([int(r.truncated) for r in responses], dtype=torch.int64),
            "num_turns": torch.tensor([r.num_turns for r in responses], dtype=torch.int64),
            "weight_versions": Ragged.from_rows([r.weight_versions for r in responses], torch.int32),
            "weight_version": torch.tensor([min(row, default=-1) for row in versions], dtype=torch.int64),
            "last_weight_version": torch.tensor([max(row, default=-1) for row in versions], dtype=torch.int64),
        },
        {"uid": [uid] * n},
    )
