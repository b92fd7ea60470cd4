"""Workers that compute nothing, and note in a file beside the model when their tensors would come onto a GPU and go."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_dist.algorithms.settings import TrainingSettings
from grpo_dist.engines.base import MiniBatchResult
from grpo_dist.engines.settings import EngineSettings, ModelSettings, PassLimits, RankSettings, SamplingSettings
from grpo_dist.protocol import DataProto, Mean
from grpo_dist.workers.actor import ActorWorker
from grpo_dist.workers.gang import PolicyWorker, TrainedWorker
from grpo_dist.workers.reward_model import RewardModelWorker
from grpo_dist.workers.rollout import RolloutWorker
from tests.engines.fakes import FakeRolloutEngine, FakeTrainEngine, FakeWeights

LEDGER = "ledger"


def note(model: str, what: str, state: str) -> None:
    """Write a line: seconds of this machine, what is on the GPU, `begins` or `ends`."""
    with Path(model).with_name(LEDGER).open("a") as file:
        file.write(f"{time.monotonic()} {what} {state}\n")


class LedgerEngine(FakeTrainEngine):
    """Weights are on the GPU from their load until they are offloaded, and later as the worker asks for them."""

    role = ""

    def __init__(self, model: ModelSettings, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.settings, self.trains, self.has_states = model, settings["optimizer"] is not None, False
        self.offloads, self._here = model.fsdp_config.param_offload, True
        self.note("weights", "begins")

    def note(self, what: str, state: str) -> None:
        note(self.settings.path, f"{self.role}:{what}", state)

    @contextlib.contextmanager
    def on_device(self, *, weights: bool = True, optimizer: bool = False, reads: bool = False) -> Iterator[None]:
        if not weights:
            yield
            return
        if not self._here:
            self.note("weights", "begins")
        self._here = True
        yield
        if self.offloads:
            self.note("weights", "ends")
            self._here = False

    def make_states(self) -> None:
        assert self._here
        self.has_states = True

    def begin_save(self, folder: Path) -> None:
        assert self.has_states or not self.trains or not self.settings.shares_gpu
        super().begin_save(folder)

    def load_checkpoint(self, folder: Path) -> None:
        assert self._here
        super().load_checkpoint(folder)

    def compute_columns(self, data: DataProto, names: Sequence[str], limits: PassLimits) -> dict[str, Any]:
        assert self._here, "a pass reads weights"
        self.note("pass", "begins")
        computed = super().compute_columns(data, names, limits)
        self.note("pass", "ends")
        return computed

    def train_mini_batch(self, data: DataProto, objective: TrainingSettings, limits: PassLimits) -> MiniBatchResult:
        assert self._here
        self.note("update", "begins")
        self.weights += 1
        self.note("update", "ends")
        return MiniBatchResult({f"{self.role}/grad_norm": Mean(1.0, 1)}, None)


class ReferenceOnLedger(PolicyWorker):
    role = "ref"

    def start(self, settings: RankSettings, host: str, port: int) -> None:
        LedgerEngine.role = self.role  # a process has one
        super().start(replace(settings, device="cpu", engine=f"{__name__}:LedgerEngine"), host, port)


class ActorOnLedger(ReferenceOnLedger, ActorWorker):
    role = "actor"


class CriticOnLedger(ReferenceOnLedger, TrainedWorker):
    role = "critic"


class ScorerOnLedger(ReferenceOnLedger, RewardModelWorker):
    role = "reward_model"


class AwakeWeights(FakeWeights):
    """Of an engine that is awake from its start, or from `wake`, until it sleeps."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model, self.awake = model, False

    async def sleep(self) -> None:
        if self.awake:
            note(self.model, "rollout:awake", "ends")
        self.awake = False

    async def wake(self) -> None:
        if not self.awake:
            note(self.model, "rollout:awake", "begins")
        self.awake = True


class EngineOnLedger(FakeRolloutEngine):
    """Samples only while it is awake."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.weights: AwakeWeights = AwakeWeights(settings.model.path)

    async def start(self) -> None:
        await self.weights.wake()

    async def generate(self, prompt: Sequence[int], sampling: SamplingSettings, *more: Any, **kwargs: Any) -> Any:
        assert self.weights.awake
        return await super().generate(prompt, sampling, *more, **kwargs)


class RolloutOnLedger(RolloutWorker):
    async def start(self, settings: EngineSettings) -> None:
        await super().start(replace(settings, device="cpu"))


WORKERS = {worker.role: worker for worker in (ActorOnLedger, ReferenceOnLedger, CriticOnLedger, ScorerOnLedger)}
WORKERS |= {"rollout": RolloutOnLedger}
