"""Worker classes without models, for the trainer's own tests: real Ray, real handles, made-up numbers."""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from grpo_dist.algorithms.settings import ObjectiveSettings, ValueSettings
from grpo_dist.assets.model_folder import Usage
from grpo_dist.engines.base import EngineLoad, Response
from grpo_dist.engines.train.durable_files import FileDigest, digest_file
from grpo_dist.errors import AgentError
from grpo_dist.protocol import DataProto, Mean, Ragged, Sum
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.runtime.mailbox import Mailbox
from grpo_dist.runtime.process import Process
from grpo_dist.workers.reward import RewardWorker
from grpo_dist.workers.rollout import group_batch


class FakeRolloutWorker(Mailbox, Process):
    """Answers every prompt with `length` tokens; response i of a group is longer by i.

    With `every` the groups of which the prompt's number is a multiple of it lack an episode.
    """

    length, version, every = 8, -1, 0
    asked: tuple = ()

    async def take_asked(self) -> tuple:
        """What it was asked for since it was asked this."""
        taken, self.asked = self.asked, ()
        return taken

    async def set_every(self, every: int) -> None:
        self.every = every

    async def set_length(self, length: int) -> None:
        self.length = length

    async def start(self, settings: object) -> None: ...

    async def generate(self, uid: str, prompt: np.ndarray, sampling: Any, task: object) -> Any:
        self.asked += ((uid, sampling),)
        is_short = self.every and int(uid.partition("prompt")[2] or 1) % self.every == 0
        lengths = [self.length + i for i in range(sampling.n - bool(is_short))]
        responses = [Response([5] * k, [-1.0] * k, False, [self.version] * k) for k in lengths]
        data = group_batch(uid, prompt, responses)
        failed = [AgentError("no server", was_last=True)] if is_short else []
        return (Label.of(data), EngineLoad(), failed), data

    async def load_weights(self, buckets: list, version: int) -> int:
        self.version = version
        return version

    async def shutdown(self) -> None: ...


class HeldRolloutWorker(FakeRolloutWorker):
    """Keeps some groups in flight until they are released or aborted; others it gives up without being asked to."""

    def __init__(self, held: Sequence[str] = (), given_up: Sequence[str] = ()) -> None:
        self.held, self.given_up = set(held), set(given_up)
        self.running: dict[str, asyncio.Future[bool]] = {}  # -> whether it is answered
        self.log: list[str] = []

    def is_held(self, uid: str) -> bool:
        return uid in self.held

    async def generate(self, uid: str, prompt: np.ndarray, sampling: Any, task: object) -> Any:
        self.log.append(f"asked {uid}")
        answered = uid not in self.given_up
        if self.is_held(uid):
            self.running[uid] = asyncio.get_running_loop().create_future()
            answered = await self.running[uid]
            del self.running[uid]
        if not answered:
            return (None, EngineLoad(), []), None
        return await super().generate(uid, prompt, sampling, task)

    async def release(self) -> None:
        for group in self.running.values():
            group.set_result(True)

    async def abort(self, uids: Sequence[str]) -> None:
        for uid in uids:
            assert uid in self.running, "it is in flight"
            self.log.append(f"aborted {uid}")
            self.running[uid].set_result(False)

    async def seen(self) -> list[str]:
        return self.log


class FakePolicyWorker(Process):
    """Every log-prob is -1.25."""

    column = "ref_log_probs"

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.updates: list = []

    def start(self, *args: object) -> None: ...

    def forward_report(self) -> str:
        return "shared prompts"

    def load_weights(self, buckets: list, share: float) -> None:
        self.updates.append(share)

    def seen(self) -> list:
        return self.updates

    def forget(self) -> None:
        self.updates = []

    def checkpoint_bytes(self) -> int:
        return len("weights")

    def begin_save(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self.saved = Path(folder) / f"rank{self.rank}"
        self.saved.write_text("weights")

    def finished_save(self, wait: bool) -> dict[str, FileDigest] | None:
        return {self.saved.name: digest_file(self.saved)}

    def load_checkpoint(self, folder: str) -> None:
        assert open(f"{folder}/rank{self.rank}").read() == "weights"

    def compute_log_probs(self, rows: DataProtoRef) -> tuple[Label, DataProto]:
        responses = rows.fetch(("responses",))["responses"]
        log_probs = [np.full(length, -1.25) for length in responses.lengths.tolist()]
        data = DataProto.from_dict({self.column: Ragged.from_rows(log_probs, torch.float32)})
        return Label.of(data), data


class FakeActorWorker(FakePolicyWorker):
    """Remembers the rows it was given; a mini-batch's loss is its number of rows. It knows no float16."""

    column = "old_log_probs"
    rounding: ClassVar = {"float32": 0.1, "bfloat16": 0.05}

    def compute_in_type(self, rows: DataProtoRef, dtype: str) -> tuple[Label, DataProto]:
        _, own = self.compute_log_probs(rows)
        values = own["old_log_probs"].values + self.rounding[dtype]
        data = DataProto.from_dict({"rollout_log_probs": Ragged(values, own["old_log_probs"].offsets)})
        return Label.of(data), data

    def update(self, rows: DataProtoRef, mini_batches: list, objective: ObjectiveSettings, step: int) -> Any:
        data = rows.fetch(("responses", "uid", *objective.columns))
        self.updates.append([data["uid"][positions].tolist() for positions in mini_batches])
        metrics = [{"actor/loss": Sum(len(p)), "actor/grad_norm": Mean(1.0, 1)} for p in mini_batches]
        if objective.actor.computes_entropy:  # falls from 0.3 by 0.1 an update
            metrics[0]["actor/entropy"] = Mean(0.4 - 0.1 * len(self.updates), 1)
        if not objective.on_policy:
            return (metrics, None), None
        label, old = self.compute_log_probs(rows.reorder(mini_batches[0]))
        return (metrics, label), old

    def export_parameters(self) -> list:
        return self.export_weights("float32")

    def export_weights(self, dtype: str) -> list:
        return []

    def export_hf_model(self, folder: str, dtype: str, usage: Usage) -> None: ...


class FakeCriticWorker(FakePolicyWorker):
    """Every value is -1.25; its training step and the mini-batches' rows are remembered."""

    column = "values"

    def update(self, rows: DataProtoRef, mini_batches: list, objective: ValueSettings, step: int) -> Any:
        data = rows.fetch(("response_mask", "uid", *objective.columns))
        self.updates.append((step, [data["uid"][positions].tolist() for positions in mini_batches]))
        return ([{"critic/vf_loss": Sum(len(p)), "critic/lr": Mean(1.0, 1)} for p in mini_batches], None), None


class StuckRewardWorker(RewardWorker):
    """Never returns a score."""

    def score(self, *args: object) -> Any:
        time.sleep(1000)
        raise AssertionError
