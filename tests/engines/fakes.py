"""Engines without a model, for tests of what surrounds them: they answer at once.

Their values are well formed and easy to foresee. The whole job runs without vLLM with
`actor_rollout_ref.rollout.name=tests/engines/fakes.py:FakeRolloutEngine`.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_dist.algorithms.settings import TrainingSettings
from grpo_dist.assets.model_folder import Usage
from grpo_dist.config.schema_roles import AdamWConfig
from grpo_dist.engines.base import EngineLoad, Response
from grpo_dist.engines.settings import EngineSettings, GroupAddress, ModelSettings, PassLimits, SamplingSettings
from grpo_dist.engines.train.durable_files import FileDigest, digest_file
from grpo_dist.engines.weights.buckets import Bucket, check_buckets
from grpo_dist.errors import CheckpointError
from grpo_dist.protocol import DataProto, Metric, Ragged, Sum

TOKEN = 5  # of every response
LOG_PROB = -1.25


class FakeWeights:
    """Weights that are a version number, that of those in force."""

    def __init__(self) -> None:
        self.version = -1

    async def pause(self) -> None:
        """Nothing waits: responses have the version at their end."""

    async def sleep(self) -> None:
        """There is no memory to release."""

    async def wake(self) -> None:
        """Nor to take again."""

    async def load(self, buckets: Sequence[Bucket], version: int) -> None:
        """Check the buckets, if there are any, and take their version."""
        if buckets:
            check_buckets(buckets)
        await self.receive(version)

    async def join(self, address: GroupAddress, first_rank: int) -> None:
        """There is no group."""

    async def receive(self, version: int) -> None:
        self.version = version


class FakeRolloutEngine:
    """Answers every prompt with `length` tokens; response i of a group is longer by i * `growth`, if it may be."""

    def __init__(self, settings: EngineSettings | None = None, *, length: int = 8, growth: int = 1) -> None:
        self.settings: Any = settings
        self.load, self.weights = EngineLoad(), FakeWeights()
        self.length, self.growth = length, growth

    async def start(self) -> None:
        """There is nothing to load."""

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingSettings, request_id: str | None = None, media: Any = None
    ) -> list[Response] | None:
        lengths = [min(self.length + i * self.growth, sampling.max_tokens) for i in range(sampling.n)]
        version = self.weights.version
        return [Response([TOKEN] * k, [LOG_PROB] * k, k == sampling.max_tokens, [version] * k) for k in lengths]

    async def abort(self, request_id: str) -> None:
        """No request waits."""

    def shutdown(self) -> None:
        """There is nothing to stop."""


class FakeTrainEngine:
    """Every log-prob is `LOG_PROB`; the loss of rows is their number. How it trains is for subclasses to say.

    Attributes:
        rank: of the process group, if there is one.
        weights: (4,) float32, 0 at first.
    """

    def __init__(
        self,
        model: ModelSettings | None = None,
        *,
        device: str = "cpu",
        temperature: float = 1.0,
        optimizer: AdamWConfig | None = None,
        total_steps: int = 1,
        grad_clip: float = float("inf"),
    ) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.reference_head: Any = None
        self.forward = SimpleNamespace(report="no model", compiler=None)
        self.weights = torch.zeros(4)
        self._saved: Path | None = None

    def on_device(self, **phase: bool) -> AbstractContextManager[None]:
        """Nothing moves."""
        return contextlib.nullcontext()

    def make_states(self) -> None:
        """There are none."""

    def compute_columns(self, data: DataProto, names: Sequence[str], limits: PassLimits) -> dict[str, Ragged]:
        """`LOG_PROB`, entropies of 1, values of 0 and hidden states of four zeros."""
        values = {"log_probs": torch.tensor(LOG_PROB), "entropies": torch.tensor(1.0), "hidden_states": torch.zeros(4)}
        values["values"] = torch.tensor(0.0)
        lengths = data["responses"].lengths.tolist()
        rows = {name: [values[name].expand(k, *values[name].shape) for k in lengths] for name in names}
        return {name: Ragged.from_rows(rows[name], torch.float32) for name in names}

    def compute_reference_columns(self, data: DataProto, names: Sequence[str], limits: PassLimits) -> dict[str, Ragged]:
        return self.compute_columns(data, names, limits)

    def evaluate(self, data: DataProto, objective: TrainingSettings, limits: PassLimits) -> dict[str, Metric]:
        return {"actor/loss": Sum(len(data))}

    def full_parameters(
        self, dtype: str, device: str = "cpu", *, as_in_files: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        yield "weights", self.weights.to(device, getattr(torch, dtype))

    def lora_factors(self, dtype: str, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
        """The first of the weights, under another name."""
        yield "factor", self.weights[:1].to(device, getattr(torch, dtype))

    def mix_parameters(self, tensors: Iterable[tuple[str, Tensor]], share: float) -> None:
        for _, tensor in tensors:
            self.weights = share * tensor.float() + (1 - share) * self.weights

    def checkpoint_bytes(self) -> int:
        return self.weights.nbytes

    def begin_save(self, folder: Path) -> None:
        """Write the weights as text."""
        folder.mkdir(parents=True, exist_ok=True)
        self._saved = folder / f"rank{self.rank}.json"
        self._saved.write_text(json.dumps(self.weights.tolist()))

    def finished_save(self, *, wait: bool) -> dict[str, FileDigest] | None:
        assert self._saved is not None, "begin_save comes first"
        return {self._saved.name: digest_file(self._saved)}

    def load_checkpoint(self, folder: Path) -> None:
        """Read the weights that a rank has written."""
        file = next(iter(sorted(folder.glob("rank*.json"))), None)
        if file is None:
            raise CheckpointError(f"{folder} cannot be read as a checkpoint of this model: there is no rank*.json")
        self.weights = torch.tensor(json.loads(file.read_text()))

    def export_hf_model(self, folder: Path, dtype: str, usage: Usage | None = None) -> None:
        """Write the weights as text."""
        folder.mkdir(parents=True, exist_ok=True)
        if usage is not None:
            usage.write(folder)
        (folder / "weights.json").write_text(json.dumps({"dtype": dtype, "weights": self.weights.tolist()}))
