"""Saves checkpoints, started by the driver, written by the workers, published when all of them have finished; and
finds the one that a run resumes from, checks it against the config, and has the roles load it.

Training continues while one is written (`checkpoint.async_save`). Only one is written at a time: the next one and the
end of the run wait for it.

Groups that were sampled ahead and scored are saved too, so that they need not be sampled again. A reward process writes
and reads them; the driver has only handles. Tensors are stored as safetensors, the rest as JSON. Log-probs of the
reference are not saved but computed again, which is cheap compared with sampling.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_dist.config.schema_job import JobConfig
from grpo_dist.engines.train.durable_files import FileDigest
from grpo_dist.errors import CheckpointError, GrpoDistError, WorkerError
from grpo_dist.plan.roles import roles_of
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.runtime.event_loop import run
from grpo_dist.trainer.checkpoint.config_changes import check_changes, digest_code, saved_config
from grpo_dist.trainer.checkpoint.folder import (
    RunState,
    begin_checkpoint,
    cannot_write,
    clear_leftovers,
    discard_checkpoint,
    find_checkpoint,
    forget_last,
    prune_checkpoints,
    publish_checkpoint,
    read_state,
)
from grpo_dist.trainer.checkpoint.manifest import checkpoint_digest
from grpo_dist.workers.gang import Gang
from grpo_dist.workers.reward import RewardPool

FOLDER = "groups"

# Handles to a group's responses and to its scores.
Group = tuple[DataProtoRef, DataProtoRef]


@dataclass(frozen=True)
class FinishedGroups:
    """The finished groups of one batch of prompts, by uid; `name` is that of its files, without suffix."""

    name: str
    groups: Mapping[str, Group]

    def begin_write(self, folder: Path, reward: RewardPool) -> asyncio.Task[dict[str, FileDigest]]:
        """Start writing them into a checkpoint's folder; the task returns the files by name."""
        responses, scores = self._handles()
        return reward.write_groups(responses.union(scores), str(folder / FOLDER / self.name))

    def describe(self) -> dict[str, Any]:
        """The JSON description that `read_finished` needs."""
        responses, scores = self._handles()
        labels = [{"columns": list(label.columns), "small": list(label.small)} for label in (responses, scores)]
        rows = {uid: len(responses) for uid, (responses, _) in self.groups.items()}
        return {"name": self.name, "rows": rows, "responses": labels[0], "scores": labels[1]}

    def _handles(self) -> Group:
        responses, scores = zip(*self.groups.values(), strict=True)
        return DataProtoRef.concat(responses), DataProtoRef.concat(scores)


async def read_finished(folder: Path, described: Sequence[Mapping[str, Any]], reward: RewardPool) -> dict[str, Group]:
    """Read the groups of a checkpoint, by uid, as if they had just been sampled and scored.

    Raises:
        GrpoDistError: the files cannot be read.
    """
    groups: dict[str, Group] = {}
    for description in described:
        if "said" not in description["scores"]["columns"]:  # of an earlier version: they are sampled again
            continue
        rows: dict[str, int] = description["rows"]
        names = [*description["responses"]["small"], *description["scores"]["small"]]
        small, data = await reward.read_groups(str(folder / FOLDER / description["name"]), names)
        parts = []
        for label in (description["responses"], description["scores"]):
            own = {name: small[name] for name in label["small"]}
            handle = DataProtoRef.stored(data, Label(tuple(label["columns"]), own, sum(rows.values())))
            parts.append(handle.split(list(rows.values())))
        groups |= dict(zip(rows, zip(*parts, strict=True), strict=True))
    return groups


@dataclass
class _Pending:
    """A checkpoint that is being written: folder, state, the writing role of each sub-folder, and tasks for groups."""

    folder: Path
    state: RunState
    roles: Mapping[str, Gang]
    groups: list[asyncio.Task[dict[str, FileDigest]]]

    def ends_with(self, error: GrpoDistError) -> bool:
        """Tell if this error means that the checkpoint cannot be completed."""
        if isinstance(error, WorkerError):
            return error.role in self.roles or (error.role == "reward" and bool(self.groups))
        return isinstance(error, CheckpointError)


class CheckpointSaver:
    """Saves the checkpoints of a run.

    Attributes:
        last: the last checkpoint that was published or resumed from.
        step: step of the last checkpoint that was started or resumed from.

    Args:
        holders: the roles that hold state at the moment, by the name of their folder in a checkpoint.
        reward: writes finished groups; None: there are none.
    """

    last: Path | None = None
    step = 0

    def __init__(
        self,
        config: JobConfig,
        holders: Callable[[], Mapping[str, Gang]],
        *,
        async_save: bool,
        reward: RewardPool | None = None,
    ) -> None:
        self.config, self.holders, self.async_save, self.reward = config, holders, async_save, reward
        self.run_dir = Path(config.trainer.default_local_dir).absolute()
        self._pending: _Pending | None = None
        self._history: list[str] = []  # of the run: digests of its checkpoints
        self._last = time.monotonic()

    def resumed_from(self, folder: Path, state: RunState) -> None:
        """Note that the run resumed from this checkpoint, so that it is not written again."""
        self.last, self.step = folder, state.step
        self._history = [*state.history, checkpoint_digest(folder)]

    @property
    def compares(self) -> bool:
        """Tell if checkpoints are kept by a figure of validation, which has to be known when one is written."""
        return self.config.trainer.keep_best_metric is not None

    @property
    def is_due(self) -> bool:
        """Tell if `trainer.save_interval_minutes` have passed since the last checkpoint was started."""
        minutes = self.config.trainer.save_interval_minutes
        return minutes is not None and time.monotonic() - self._last >= 60 * minutes

    async def begin(self, state: RunState, groups: Sequence[FinishedGroups] = ()) -> None:
        """Start writing a checkpoint; returns once the workers have copied their state.

        Raises:
            CheckpointError: this checkpoint, or the previous one, cannot be written; the disk has no room for it, say.
        """
        await self.finish()
        self._last, self.step = time.monotonic(), state.step
        roles = self.holders()
        needed = sum([await role.checkpoint_bytes() for role in roles.values()])
        folder = begin_checkpoint(self.run_dir, state.step, needed)
        pending = _Pending(folder, state, roles, [])
        with self._giving_up(pending):
            if self.reward is not None:
                pending.groups = [groups_of_step.begin_write(folder, self.reward) for groups_of_step in groups]
            for name, role in pending.roles.items():
                await role.begin_save(str(folder / name))
        self._pending = pending

    async def poll(self) -> None:
        """Publish the checkpoint if all workers have written their part. Waits for them only without `async_save`."""
        await self.finish(wait=not self.async_save)

    async def finish(self, *, wait: bool = True) -> None:
        """Publish the checkpoint that is being written, once all workers have written their part.

        Raises:
            CheckpointError: it cannot be written.
        """
        pending = self._pending
        if pending is None:
            return
        with self._giving_up(pending):
            written: dict[str, FileDigest] = {}
            for name, role in pending.roles.items():
                files = await role.finished_save(wait=wait)
                if files is None:
                    return
                written |= {f"{name}/{file}": digest for file, digest in files.items()}
            if not wait and not all(writing.done() for writing in pending.groups):
                return
            for writing in pending.groups:
                written |= {f"{FOLDER}/{file}": digest for file, digest in (await writing).items()}
            state = replace(pending.state, history=[*self._history])
            self.last = publish_checkpoint(pending.folder, state, saved_config(self.config), written)
            self._history.append(checkpoint_digest(self.last))
        self._pending = None
        trainer = self.config.trainer
        prune_checkpoints(self.run_dir, trainer.max_actor_ckpt_to_keep, trainer.keep_best_metric)

    @contextlib.contextmanager
    def completing(self) -> Iterator[None]:
        """Publish a started checkpoint at the end of the block, also after an error that its writers survived."""
        try:
            yield
        except GrpoDistError as error:
            if self._pending is not None and not self._pending.ends_with(error):
                with contextlib.suppress(GrpoDistError):  # the first error is the one to show
                    run(self.finish())
            raise
        run(self.finish())

    @contextlib.contextmanager
    def _giving_up(self, pending: _Pending) -> Iterator[None]:
        try:
            yield
        except GrpoDistError as error:
            self._pending = None
            discard_checkpoint(pending.folder)
            if isinstance(error, CheckpointError) and not str(error).startswith("cannot write"):
                raise cannot_write(pending.folder.with_suffix(""), error) from error
            raise


@dataclass(frozen=True)
class Resumed:
    """A checkpoint from which a run resumes, and the changes of the config since, as lines "key: old -> new"."""

    folder: Path
    state: RunState
    changes: Sequence[str]


def find_resumed(config: JobConfig, prompts: Mapping[str, Any]) -> Resumed | None:
    """Find the checkpoint to resume from, without loading it; None if there is none, or the config says not to.

    Raises:
        CheckpointError: there are checkpoints but none is intact, or the config does not fit.
    """
    trainer = config.trainer
    run_dir = Path(trainer.default_local_dir)
    if not trainer.val_only:  # the run that these checkpoints are of may be at work
        clear_leftovers(run_dir)
    folder = find_checkpoint(run_dir, trainer.resume_mode, trainer.resume_from_path)
    if folder is None:
        if not trainer.val_only:
            forget_last(run_dir)
        return None
    state = read_state(folder)
    changes = check_changes(folder, state, config, prompts, digest_code(config, state.code))
    if changes and (num_groups := sum(len(description["rows"]) for description in state.finished)):
        changes.append(f"so {num_groups} finished groups of coming steps are not used, but sampled again")
    return Resumed(folder, state, changes)


async def load_checkpoint(resumed: Resumed, config: JobConfig, gangs: Mapping[str, Gang]) -> None:
    """Have the roles load their shards: those that train, and others of which the checkpoint has some.

    Raises:
        CheckpointError: the shards do not fit the model, or cannot be read.
    """
    for row in roles_of(config):
        folder = resumed.folder.absolute() / row.name
        if row.name in gangs and (row.trains or (folder.is_dir() and row.resumes(config))):
            await gangs[row.name].load_checkpoint(str(folder))
