"""The rollout: a worker is one engine in an asynchronous Ray actor, with many prompts in flight at once. The driver
sees a pool of them, whose workers also need the current weights.

A group of responses goes to the worker with the lowest load. How many groups a worker may have in flight is adapted to
the load that its engine reports: enough that it never idles, and few enough that a slow engine does not hold back
prompts that others could sample.

A worker that dies, fails, aborts a group by itself or does not answer is replaced (pool.py). Its new process gets
requests once it holds the current weights (weight_transport.py). One whose machine is lost is left out until another
one has room for it. One that is not required (`cluster.max_rollout_world_size`) gets its first weights apart from the
others, so that a machine that cannot be reached holds nobody up but itself.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from grpo_dist.agents.episode import Episode, Row
from grpo_dist.agents.gateway import Gateway, socket_at
from grpo_dist.agents.recording import NO_VERSION
from grpo_dist.agents.runner import EpisodeRunner
from grpo_dist.assets.model_folder import load_tokenizer
from grpo_dist.data.images import ImageProcessor
from grpo_dist.engines.base import EngineLoad, Footprint, Response, RolloutEngine, check_responses, rollout_backend
from grpo_dist.engines.settings import EngineSettings, GroupAddress, SamplingSettings
from grpo_dist.errors import AgentError, EngineError, GrpoDistError, WeightSyncError, WorkerError
from grpo_dist.keeper import watch
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.fields import EXTRA
from grpo_dist.protocol.media import MEDIA
from grpo_dist.protocol.sequences import PREDECESSORS, UNKNOWN_ROUTES, count_unknown, route_columns
from grpo_dist.rewards.scorer import printing_to
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.mailbox import Mailbox
from grpo_dist.runtime.nodes import RestartBudget
from grpo_dist.runtime.pool import Member, Pool, Waiting
from grpo_dist.runtime.process import Process
from grpo_dist.workers.scorer import Task
from grpo_dist.workers.weight_transport import Outcomes, WeightTransport, outcomes


class RolloutWorker(Mailbox, Process):
    """Generates responses, of one turn or of an agent loop's episodes, and loads new weights."""

    engine: RolloutEngine
    runner: EpisodeRunner | None = None
    gateway: Gateway | None = None
    image_processor: ImageProcessor

    async def start(self, settings: EngineSettings) -> Footprint | None:
        """Start the engine, and the agent loop if there is one; returns the memory that it took of its GPUs."""
        if settings.gpus:  # before CUDA is set up
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(settings.gpus)
        self.check_build(settings.device, rollout_backend(settings.rollout.name).needs)
        self.engine = self.make_engine(settings)
        taken = await self.engine.start()
        if settings.sees_images:
            model = self.engine.settings.model
            setting, trusted = f"actor_rollout_ref.model.path={model.path}", model.trust_remote_code
            self.image_processor = ImageProcessor(model.path, setting=setting, trust_remote_code=trusted)
        if settings.sleeps:  # other roles load meanwhile, and a sync brings weights in any case
            await self.engine.weights.sleep()
        if not settings.rollout.agent.is_single_turn:
            watch()  # what agents start ends with this process
            await self._start_agent()
        return taken

    def make_engine(self, settings: EngineSettings) -> RolloutEngine:
        """Make the engine, which does not run yet, once its model is on this machine."""
        engine, folder = rollout_backend(settings.rollout.name).load(), self.find_model(settings.model.path)
        return engine(replace(settings, model=settings.model.replaced(path=folder)))

    async def _start_agent(self) -> None:
        agent, model = self.engine.settings.rollout.agent, self.engine.settings.model
        self.tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        self.episodes: dict[str, asyncio.Task] = {}  # by group
        make_app = getattr(self.engine, "openai_app", None)
        if make_app is not None:
            at = socket_at(agent.endpoint_host, self.address().ip)
            self.gateway = Gateway(make_app, at, agent.endpoint_advertised_host)
        self.runner = EpisodeRunner(agent, self.engine.generate, self.gateway)
        with printing_to(self.printed):
            await self.runner.start()

    async def generate(
        self,
        uid: str,
        prompt: np.ndarray,
        sampling: SamplingSettings,
        task: Task | None = None,
        images: Sequence[bytes] = (),
    ) -> tuple[tuple[Label | None, EngineLoad, list[AgentError]], DataProto | None]:
        """Sample a group of responses to one prompt; an agent loop is told of the prompt by `task`.

        `images` are the files of the prompt's images: here, and nowhere else, they become the pictures that the engine
        and the trainer get.

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
            label = Label.of(data)
            return (replace(label, small=label.small | episode_metrics(episodes)), self.engine.load, failed), data
        where = f"prompt {uid}"
        media = await asyncio.to_thread(self.image_processor.media, images, prompt, where) if images else None
        seen: dict[str, Any] = {} if media is None else {MEDIA: media}
        # one call: the prompt is computed once
        responses = await self.engine.generate(prompt.tolist(), sampling, uid, **seen)
        if responses is None:
            return (None, self.engine.load, failed), None
        check_responses(self.engine, responses, sampling.n)
        data = group_batch(uid, prompt, responses)
        if self.engine.settings.sees_images:
            shown = [picture.thumbnail for picture in media.pictures] if media else []
            data = data.union(DataProto.from_dict({}, {MEDIA: [media] * len(data), "images": [shown] * len(data)}))
        return (Label.of(data), self.engine.load, failed), data

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

    async def wake(self) -> None:
        """Take the rest of the GPUs' memory again, once weights have come and the actor holds none of it."""
        await self.engine.weights.wake()

    async def pause_for_weights(self) -> None:
        """Hold the running requests, or let them end first, until weights have come."""
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

    The prompt is what theirs have in common, since agents at an endpoint may write their own; what one has behind it
    stands before its response, and does not train.
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
    rewards = [math.nan if reward is None else reward for reward in (episode.outcome() for episode in episodes)]
    columns: dict[str, Any] = {
        "episode_reward": torch.tensor(rewards, dtype=torch.float32),
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
    columns = {name: [episode.metrics.get(name, np.nan) for episode in episodes] for name in names}
    return {EXTRA + name: np.array(values, np.float32) for name, values in columns.items()}


# Default for engines whose settings do not say how many sequences they run at once.
MAX_NUM_SEQS = 256
# An engine has this share of its capacity waiting in its queue, so that it does not idle while the driver is busy.
QUEUED_SHARE = 1 / 8


@dataclass(frozen=True)
class GroupRequest:
    """One prompt to sample a group of responses for.

    Attributes:
        token_ids: (P,) of the prompt.
        sampling: `n` is the group size.
        needs_log_probs: whether log-probs of the responses are computed.
        images: the files of the prompt's images.
    """

    uid: str
    token_ids: np.ndarray
    sampling: SamplingSettings
    task: Task
    needs_log_probs: bool = True
    images: tuple[bytes, ...] = ()


@dataclass
class Engine(Member):
    """One rollout worker, whose limit counts sequences; it `lacks_weights` until it holds the current ones."""

    max_num_seqs: int = MAX_NUM_SEQS
    lacks_weights: bool = False

    def adapt(self, running: int, waiting: int, group_size: int) -> None:
        """Adapt the limit to the engine's load: lower if too many sequences wait (cache full), higher if none waits."""
        spare = max(group_size, int(self.max_num_seqs * QUEUED_SHARE))
        if waiting > spare:
            self.limit = max(running + spare, 1)
        elif waiting == 0:
            self.limit = min(self.limit + group_size, self.max_num_seqs + spare)


class RolloutGroup(Pool):
    """The rollout engines.

    `weights_gone` is set while no engine has the current weights, and none can get them: the actor is being updated.
    """

    members: list[Engine]  # type: ignore[assignment]
    _bring: Callable[[Sequence[int]], Awaitable[Outcomes]] | None = None
    _version = -1

    def __init__(self, workers: WorkerGroup, restarts: RestartBudget | None = None) -> None:
        super().__init__(workers, restarts or RestartBudget(), replaces=(EngineError, WorkerError))
        self._in_force = asyncio.Event()  # set while the actor holds the weights that the engines need
        self.weights_gone = asyncio.Event()
        self._syncing = asyncio.Lock()
        self._aborted: set[Call] = set()

    def new_member(self, rank: int) -> Engine:
        """See `Pool.new_member`."""
        settings: EngineSettings | None = self.settings[rank]
        most = MAX_NUM_SEQS if settings is None else settings.rollout.max_num_seqs
        limit = most + int(most * QUEUED_SHARE)
        late = self._bring is not None or not self.workers.is_required(rank)
        return Engine(limit, max_num_seqs=most, lacks_weights=late)

    def note_started(self, footprints: Sequence[Footprint | None]) -> None:
        """Store the memory that the engines use, in rank order, for their replacements: these must not measure what is
        free as vLLM does, because other roles are running by then.
        """
        for rank, (settings, taken) in enumerate(zip(self.settings, footprints, strict=True)):
            if settings is not None and taken is not None:
                rollout = settings.rollout.replaced(kv_cache_memory_gib=taken.kv_cache_gib)
                self.settings[rank] = replace(settings, rollout=rollout, footprint_gib=taken.total_gib)

    # --- generating --------------------------------------------------------------------------------------------
    async def generate(
        self,
        request: GroupRequest,
        *,
        first: bool = False,
        on_sent: Callable[[], None] = lambda: None,
        on_failed: Callable[[list[AgentError]], None] = lambda failed: None,
    ) -> DataProtoRef:
        """Sample a group of responses.

        The worker with the lowest load gets the request, or the one that has the prompt in its prefix cache, if it has
        capacity; `first` puts it at the head of the queue. If the caller is cancelled, the engine aborts the group.

        Args:
            on_sent: called each time the request is sent to a worker.
            on_failed: called with the attempts at its episodes that have failed, whether the group has a result or not.

        Raises:
            AgentError: too few of its episodes are left.
            GrpoDistError: an error that would occur on every worker, or the restart budget is used up.
        """
        uid, prompt, sampling = request.uid, request.token_ids, request.sampling
        images = (request.images,) if request.images else ()

        def send(rank: int) -> Call:
            on_sent()
            return self.workers.post(rank, "generate", "generate", uid, prompt, sampling, request.task, *images)

        def take_in(call: Call, answer: Any) -> DataProtoRef | None:
            label, load, failed = answer
            if call.is_current:
                self.members[call.rank].adapt(load.running, load.waiting, sampling.n)
            if failed:
                on_failed(failed)
            if label is not None:
                return call.handle(label)
            if failed:
                raise failed[-1]
            if call not in self._aborted:  # not repeated on this engine, which might abort it again for ever
                raise self._aborted_by_engine(call.rank, uid)
            return None

        abort = functools.partial(self._abort, uid)
        return await self.ask(send, take_in, size=sampling.n, key=prompt.tobytes(), first=first, give_up=abort)

    async def _answered(self, call: Call, member: Member, waiting: Waiting) -> Any:
        try:
            return await super()._answered(call, member, waiting)
        finally:
            self._aborted.discard(call)  # however it has ended: a call that is kept pins its responses

    def _abort(self, uid: str, call: Call) -> None:
        self._aborted.add(call)
        if call.is_current:
            self.workers.tell(call.rank, "abort", [uid])

    def _aborted_by_engine(self, rank: int, uid: str) -> WorkerError:
        backend = rollout_backend(self.settings[rank].rollout.name)
        what = (
            f"the engine aborted the group {uid} by itself: it ended the request as aborted, or with fewer responses "
            f"than requested. Check actor_rollout_ref.rollout.engine_kwargs, and {backend.reading_its_log}"
        )
        return self.workers.error(rank, "generate", what)

    # --- weights -----------------------------------------------------------------------------------------------
    async def sync_weights(self, actor: WorkerGroup, transport: WeightTransport, *, version: int, dtype: str) -> None:
        """Send the actor's weights to all workers, in `dtype`, a torch name such as "float32"; see `take_weights`.

        Raises:
            GrpoDistError: an actor rank failed, the restart budget is used up, or an engine confirmed another version.
        """
        bring = functools.partial(transport.sync, actor, self.workers, version=version, dtype=dtype)
        await self.take_weights(bring, version)

    async def take_weights(self, bring: Callable[[Sequence[int]], Awaitable[Outcomes]], version: int) -> None:
        """Send new weights to all workers and wait until each has confirmed them.

        A worker that fails is replaced and gets the weights later (`prepare`); it does not delay the others.

        Args:
            bring: sends the weights to workers, and returns for each the version it now holds, or its error.

        Raises:
            WeightSyncError: the weights are damaged, incomplete or out of order.
            GrpoDistError: an engine confirmed another version.
        """
        async with self._syncing:
            self._bring, self._version = bring, version
            self._homes.clear()  # new weights empty the prefix caches
            ranks = [rank for rank in range(len(self.workers)) if not self._comes_later(rank)]
            for rank in set(range(len(self.workers))).difference(ranks):
                self.members[rank].lacks_weights = True
            await self._bring_to(ranks)
            self._in_force.set()
            self.weights_gone.clear()

    def update_load(self, rank: int) -> None:
        """See `Pool.update_load`."""
        super().update_load(rank)
        self._note_loss()

    def _note_loss(self) -> None:
        if not self._in_force.is_set() and not self._someone.is_set():
            self.weights_gone.set()

    def _comes_later(self, rank: int) -> bool:
        new = self.members[rank].lacks_weights and not self.workers.is_required(rank)
        return new or self.is_starting(rank)

    def _sleeps(self, rank: int) -> bool:
        settings = self.settings[rank]
        return settings is not None and settings.sleeps

    async def begin_update(self) -> None:
        """Prepare for an update of the actor: engines that sleep release their GPU memory until the next sync.

        Replaced workers finish starting first, because during the update there is no GPU memory for that.

        Raises:
            GrpoDistError: the restart budget is used up.
        """
        async with self._syncing:
            self._in_force.clear()
            self._note_loss()
        awake = [rank for rank in range(len(self.settings)) if self._sleeps(rank)]
        while awake:
            await self.started()
            before = list(self.workers.handles)
            present = set(awake).intersection(self.workers.present)
            calls = {rank: self.workers.submit(rank, "update_actor", "sleep") for rank in sorted(present)}
            for rank, answer in (await outcomes(calls)).items():
                if isinstance(answer, GrpoDistError):
                    self.replace(rank, before[rank], answer)
            awake = [rank for rank in awake if before[rank] is not self.workers.handles[rank]]

    async def prepare(self, rank: int) -> None:
        """Send the current weights to a worker that was replaced, while the actor holds them. See `Pool.prepare`."""
        member = self.members[rank]
        while member.lacks_weights and member is self.members[rank]:
            await self._in_force.wait()
            async with self._syncing:
                if self._in_force.is_set():
                    late = [i for i, m in enumerate(self.members) if m.lacks_weights and not self._comes_later(i)]
                    await self._bring_to(late if self.workers.is_required(rank) else [rank])

    async def _bring_to(self, ranks: Sequence[int]) -> None:
        if not ranks or self._bring is None:
            return
        before = list(self.workers.handles)
        for rank, held in (await self._woken(await self._bring(ranks))).items():
            if before[rank] is not self.workers.handles[rank]:
                continue  # replaced meanwhile, because one of its groups failed
            on_its_own = isinstance(held, WeightSyncError) and not self.workers.is_required(rank)
            if isinstance(held, EngineError | WorkerError) or (on_its_own and len(ranks) == 1):
                self.replace(rank, before[rank], held)
            elif isinstance(held, GrpoDistError):
                raise held
            elif held != self._version:
                wrong = f"holds weight version {held} after the sync of {self._version}"
                raise GrpoDistError(f"rollout worker {rank} {wrong}")
            else:
                self.members[rank].lacks_weights = False

    async def _woken(self, brought: Outcomes) -> Outcomes:
        """Have engines that slept go on, now that the actor has left their GPUs: what was brought, or their errors."""
        held = (rank for rank, version in brought.items() if not isinstance(version, GrpoDistError))
        calls = {rank: self.workers.submit(rank, "sync_weights", "wake") for rank in held if self._sleeps(rank)}
        woken = await outcomes(calls)
        return brought | {rank: error for rank, error in woken.items() if isinstance(error, GrpoDistError)}
