"""The rollout worker: one rollout engine in an asynchronous Ray actor. Many prompts are in flight at once."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from grpo_dist.agents.episode import Episode, Row
from grpo_dist.agents.gateway import Gateway
from grpo_dist.agents.recording import NO_VERSION
from grpo_dist.agents.runner import EpisodeRunner
from grpo_dist.assets.model_folder import load_tokenizer
from grpo_dist.engines.base import EngineLoad, Footprint, Response, RolloutEngine, check_responses, rollout_engine
from grpo_dist.engines.settings import EngineSettings, GroupAddress, SamplingSettings
from grpo_dist.errors import AgentError
from grpo_dist.keeper import watch
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.branches import PREDECESSORS
from grpo_dist.protocol.fields import EXTRA
from grpo_dist.protocol.routes import UNKNOWN_ROUTES, count_unknown, route_columns
from grpo_dist.rewards.output_lines import printing_to
from grpo_dist.runtime.batch_ref import Label
from grpo_dist.runtime.mailbox import Mailbox
from grpo_dist.runtime.process import Process
from grpo_dist.workers.reward import Task

# Columns that travel inside the handle: one number or string per sequence.
SMALL_COLUMNS = (
    *("uid", "prompt_length", "response_length", "truncated", "num_turns"),
    *("weight_version", "last_weight_version"),
)
# Those that only some groups have: of an agent loop's episodes, and where experts are replayed.
SOME_COLUMNS = ("episode_reward", UNKNOWN_ROUTES)


class RolloutWorker(Mailbox, Process):
    """Generates responses, of one turn or of an agent loop's episodes, and loads new weights."""

    engine: RolloutEngine
    runner: EpisodeRunner | None = None
    gateway: Gateway | None = None

    async def start(self, settings: EngineSettings) -> Footprint | None:
        """Start the engine, and the agent loop if there is one; returns the memory that it took of its GPUs."""
        if settings.gpus:  # before CUDA is set up
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(settings.gpus)
        self.check_build(settings.device)
        engine, folder = rollout_engine(settings.rollout.name), self.find_model(settings.model.path)
        self.engine = engine(replace(settings, model=settings.model.replaced(path=folder)))
        taken = await self.engine.start()
        if not settings.rollout.agent.is_single_turn:
            watch()  # what agents start ends with this process
            await self._start_agent()
        return taken

    async def _start_agent(self) -> None:
        agent, model = self.engine.settings.rollout.agent, self.engine.settings.model
        self.tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        self.episodes: dict[str, asyncio.Task] = {}  # by group
        make_app = getattr(self.engine, "openai_app", None)
        self.gateway = None if make_app is None else Gateway(make_app)
        self.runner = EpisodeRunner(agent, self.engine.generate, self.gateway)
        with printing_to(self.printed):
            await self.runner.start()

    async def generate(
        self, uid: str, prompt: np.ndarray, sampling: SamplingSettings, task: Task | None = None
    ) -> tuple[tuple[Label | None, EngineLoad, list[AgentError]], DataProto | None]:
        """Sample a group of responses to one prompt; an agent loop is told of the prompt by `task`.

        Returns:
            ((label of the group; the engine's load; the attempts at its episodes that have failed), the group, a row
            per response). A group without a result is None, and so is its label: it was aborted, or its last failed
            attempt was one too many.
        """
        failed: list[AgentError] = []
        if self.runner is not None:
            try:
                episodes = await self._run_episodes(uid, prompt, sampling, task, failed)
                if episodes is None:
                    return (None, self.engine.load, []), None
                data = episodes_batch(uid, episodes)
            except AgentError as error:
                return (None, self.engine.load, [*failed, error]), None
            check_responses(self.engine, [episode.response() for episode in episodes], len(episodes))
            label = Label.of(data, _small(data))
            return (replace(label, small=label.small | episode_metrics(episodes)), self.engine.load, failed), data
        responses = await self.engine.generate(prompt.tolist(), sampling, uid)  # one: the prompt is computed once
        if responses is None:
            return (None, self.engine.load, failed), None
        check_responses(self.engine, responses, sampling.n)
        data = group_batch(uid, prompt, responses)
        return (Label.of(data, _small(data)), self.engine.load, failed), data

    async def _run_episodes(
        self, uid: str, prompt: np.ndarray, sampling: SamplingSettings, task: Task | None, failed: list[AgentError]
    ) -> list[Episode] | None:
        """`sampling.n` episodes that run side by side, those that have finished; None if the group was aborted."""
        assert self.runner is not None
        row = Row(uid, prompt.tolist())
        if task is not None:  # all but the ground truth
            row = replace(row, messages=task.messages, data_source=task.data_source, extra_info=task.extra_info)
        settings = self.engine.settings
        least = None if task is not None and task.validation else settings.min_group_size  # validation compares n
        common: dict[str, Any] = {"tokenizer": self.tokenizer, "max_model_len": settings.max_model_len}
        common["max_episode_len"] = settings.max_episode_len
        common["max_turns"] = settings.rollout.agent.max_assistant_turns
        common["template_kwargs"] = settings.template_kwargs
        episodes = [Episode(row, sampling, index=i, **common) for i in range(sampling.n)]
        with printing_to(self.printed):  # the task goes on in it, and so does the loop's thread
            self.episodes[uid] = asyncio.create_task(self.runner.run(episodes, least, failed))
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

    async def start_profile(self) -> None:
        """Begin to record the engine's steps, if it has a profiler: else it lacks this method, which is told."""
        await self.engine.start_profile()  # type: ignore[attr-defined]

    async def stop_profile(self, path: str) -> None:
        """Write what was recorded since `start_profile`, as a gzip'ed trace."""
        await self.engine.stop_profile(Path(path))  # type: ignore[attr-defined]

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
            await self.runner.stop()
        if self.gateway is not None:
            await self.gateway.stop()
        self.engine.shutdown()


def _small(data: DataProto) -> tuple[str, ...]:
    return (*SMALL_COLUMNS, *(name for name in SOME_COLUMNS if name in data.batch))


def group_batch(uid: str, prompt: np.ndarray, responses: Sequence[Response]) -> DataProto:
    """The responses to one prompt as a batch. Sampled tokens train, the end-of-sequence token among them."""
    lengths = [len(response.token_ids) for response in responses]
    masks = [[1] * len(r.token_ids) if r.mask is None else r.mask for r in responses]
    versions = [
        [version for version, sampled in zip(r.weight_versions, mask, strict=False) if sampled]
        for r, mask in zip(responses, masks, strict=True)
    ]
    n = len(responses)
    data = DataProto.from_dict(
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
    return data.union(DataProto.from_dict(_routes(len(prompt), responses, lengths, masks)))


def _routes(
    prompt: int, responses: Sequence[Response], lengths: Sequence[int], masks: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The columns of recorded experts; {} if none were recorded."""
    columns = route_columns(prompt, lengths, [response.routes for response in responses])
    if not columns:
        return {}
    follows = []
    for response, mask in zip(responses, masks, strict=True):
        own = np.arange(-1, len(mask) - 1) if response.predecessors is None else np.asarray(response.predecessors)
        follows.append(own[: np.flatnonzero(mask)[-1:].sum() + 1])
    return {**columns, UNKNOWN_ROUTES: count_unknown(columns, follows)}


def episodes_batch(uid: str, episodes: Sequence[Episode]) -> DataProto:
    """The episodes of a prompt as a batch, with the rewards that they were given.

    The prompt is what all have in common of theirs, since agents at an endpoint may write their own; what one has
    behind it stands before its response, and does not train.
    """
    shared = list(commonprefix([episode.prompt_ids for episode in episodes]))
    if not shared:
        what = f"the prompts that the episodes of {uid} wrote at the endpoint have no first token in common"
        raise AgentError(what, was_last=True)
    responses = [_behind(episode, len(shared)) for episode in episodes]
    put_in = [len(episode.prompt_ids) - len(shared) for episode in episodes]
    pairs = list(zip(episodes, put_in, strict=True))
    steps = [[math.nan] * count + episode.turns.step_rewards(len(episode.token_ids)) for episode, count in pairs]
    agents = [[0] * count + episode.turns.agent_ids(len(episode.token_ids)) for episode, count in pairs]
    rewards = [episode.outcome() for episode in episodes]
    columns: dict[str, Any] = {
        "episode_reward": torch.tensor(
            [math.nan if reward is None else reward for reward in rewards], dtype=torch.float32
        ),
        "episode_step_rewards": Ragged.from_rows(steps, torch.float32),
        "agent_ids": Ragged.from_rows(agents, torch.int32),
        PREDECESSORS: Ragged.from_rows([r.predecessors or [] for r in responses], torch.int32),
    }
    return group_batch(uid, np.array(shared, np.int32), responses).union(DataProto.from_dict(columns))


def _behind(episode: Episode, start: int) -> Response:
    """The response with what the prompt has from `start` on."""
    response, put_in = episode.response(), episode.prompt_ids[start:]
    count = len(put_in)
    return replace(
        response,
        token_ids=put_in + response.token_ids,
        log_probs=[0.0] * count + response.log_probs,
        weight_versions=[NO_VERSION] * count + response.weight_versions,
        mask=[0] * count + (response.mask or []),
        predecessors=[*range(-1, count - 1), *(place + count for place in response.predecessors or [])],
    )


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, np.ndarray]:
    """The metrics of episodes by column, nan where one has none of that name."""
    names = dict.fromkeys(name for episode in episodes for name in episode.metrics)
    return {
        EXTRA + name: np.array([episode.metrics.get(name, np.nan) for episode in episodes], np.float32)
        for name in names
    }
