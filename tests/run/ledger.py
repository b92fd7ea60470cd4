"""Workers that compute nothing, and write down when their tensors would be on a GPU: a line for each beginning and end.

The workers' own code decides when; what is here stands in for kernels alone. All processes of a run write into one
file beside the model, which they know by the model's path.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_dist.algorithms.settings import TrainingSettings
from grpo_dist.engines.base import MiniBatchResult, Response
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
        self.offloads = model.fsdp_config.param_offload
        self._here = True
        note(model.path, f"{self.role}:weights", "begins")

    @contextlib.contextmanager
    def on_device(self, *, weights: bool = True, optimizer: bool = False, reads: bool = False) -> Iterator[None]:
        """As `Offload.on_device`; what streams through is a line of its own."""
        if not weights:
            yield
            return
        if not self._here:
            note(self.settings.path, f"{self.role}:weights", "begins")
        self._here = True
        yield
        if self.offloads:
            note(self.settings.path, f"{self.role}:weights", "ends")
            self._here = False

    def make_states(self) -> None:
        """From now on a save finds them."""
        assert self._here
        self.has_states = True

    def begin_save(self, folder: Path) -> None:
        """Write a file, and need no memory of the GPU."""
        assert self.has_states or not self.trains or not self.settings.shares_gpu
        super().begin_save(folder)

    def load_checkpoint(self, folder: Path) -> None:
        """Into tensors on the GPU."""
        assert self._here
        super().load_checkpoint(folder)

    def compute_columns(self, data: DataProto, names: Sequence[str], limits: PassLimits) -> dict[str, Any]:
        """On the GPU."""
        assert self._here, "a pass reads weights"
        note(self.settings.path, f"{self.role}:pass", "begins")
        computed = super().compute_columns(data, names, limits)
        note(self.settings.path, f"{self.role}:pass", "ends")
        return computed

    def train_mini_batch(self, data: DataProto, objective: TrainingSettings, limits: PassLimits) -> MiniBatchResult:
        """Likewise."""
        assert self._here
        note(self.settings.path, f"{self.role}:update", "begins")
        self.weights += 1
        note(self.settings.path, f"{self.role}:update", "ends")
        return MiniBatchResult({f"{self.role}/grad_norm": Mean(1.0, 1)}, None)


class ActorLedger(LedgerEngine):
    role = "actor"


class ReferenceLedger(LedgerEngine):
    role = "ref"


class CriticLedger(LedgerEngine):
    role = "critic"


class ScorerLedger(LedgerEngine):
    role = "reward_model"


class _Rank(PolicyWorker):
    ledger: type[LedgerEngine]

    def start(self, settings: RankSettings, host: str, port: int) -> None:
        """See `PolicyWorker.start`: on this machine's CPU."""
        engine = f"{__name__}:{self.ledger.__name__}"
        super().start(replace(settings, device="cpu", engine=engine), host, port)


class ActorOnLedger(_Rank, ActorWorker):
    ledger = ActorLedger


class ReferenceOnLedger(_Rank):
    ledger = ReferenceLedger


class CriticOnLedger(_Rank, TrainedWorker):
    ledger = CriticLedger


class ScorerOnLedger(_Rank, RewardModelWorker):
    ledger = ScorerLedger


class AwakeWeights(FakeWeights):
    """Of an engine that is awake from its start, or from `wake`, until it sleeps."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model, self.awake = model, False

    async def sleep(self) -> None:
        """Only once."""
        if self.awake:
            note(self.model, "rollout:awake", "ends")
        self.awake = False

    async def wake(self) -> None:
        """Likewise."""
        if not self.awake:
            note(self.model, "rollout:awake", "begins")
        self.awake = True


class EngineOnLedger(FakeRolloutEngine):
    """Samples only while it is awake."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.weights: AwakeWeights = AwakeWeights(settings.model.path)

    async def start(self) -> None:
        """It takes its memory."""
        await self.weights.wake()

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingSettings, request_id: str | None = None, media: Any = None
    ) -> list[Response] | None:
        """See `FakeRolloutEngine.generate`."""
        assert self.weights.awake
        return await super().generate(prompt, sampling, request_id)


class RolloutOnLedger(RolloutWorker):
    async def start(self, settings: EngineSettings) -> None:
        """See `RolloutWorker.start`: on this machine's CPU."""
        await super().start(replace(settings, device="cpu"))


WORKERS = {
    "actor": ActorOnLedger,
    "rollout": RolloutOnLedger,
    "ref": ReferenceOnLedger,
    "critic": CriticOnLedger,
    "reward_model": ScorerOnLedger,
}
