"""The rollout worker: one vLLM engine in an asynchronous Ray actor. Many prompts are in flight at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import ray
import torch

from grpo_dist.engines.settings import EngineSettings, GroupAddress, SamplingSettings
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.process import Process

if TYPE_CHECKING:
    from grpo_dist.engines.vllm_engine import EngineLoad, Response, VLLMEngine

# Columns that travel inside the handle: one number or string per sequence.
SMALL_COLUMNS = (
    "uid",
    "prompt_length",
    "response_length",
    "truncated",
    "weight_version",
    "last_weight_version",
)


class RolloutWorker(Process):
    """Generates responses and takes new weights."""

    engine: VLLMEngine

    async def start(self, settings: EngineSettings) -> None:
        """Start the engine."""
        from grpo_dist.assets import resolve_model_path
        from grpo_dist.engines.vllm_engine import VLLMEngine

        self.engine = VLLMEngine(replace(settings, model_path=resolve_model_path(settings.model_path)))
        await self.engine.start()

    async def generate(
        self, uid: str, prompt: np.ndarray, sampling: SamplingSettings
    ) -> tuple[DataProtoRef | None, EngineLoad]:
        """Sample a group of responses to one prompt.

        Returns:
            (a handle with one row per response, or None if the group was aborted; how busy the engine is).
        """
        responses = await self.engine.generate(prompt.tolist(), sampling, uid)
        if responses is None:
            return None, self.engine.load
        return DataProtoRef.put(group_batch(uid, prompt, responses), small=SMALL_COLUMNS), self.engine.load

    async def abort(self, uids: Sequence[str]) -> None:
        """End the generation of these groups."""
        for uid in uids:
            await self.engine.abort(uid)

    async def num_running(self) -> int:
        """Sequences that the engine runs now."""
        return self.engine.load.running

    async def load_weights(self, buckets: Sequence[ray.ObjectRef], version: int) -> int:
        """Replace the weights by the buckets' and return the version now held."""
        await self.engine.weights.load([await bucket for bucket in buckets], version)
        return self.engine.weight_version

    async def join_weight_group(self, address: GroupAddress, first_rank: int) -> None:
        """Join the group to which the actor broadcasts, with ranks from `first_rank` on."""
        await self.engine.weights.join(address, first_rank)

    async def receive_weights(self, version: int) -> int:
        """Replace the weights by those that the actor broadcasts and return the version now held."""
        await self.engine.weights.receive(version)
        return self.engine.weight_version

    async def shutdown(self) -> None:
        """Stop the engine."""
        self.engine.shutdown()


def group_batch(uid: str, prompt: np.ndarray, responses: Sequence[Response]) -> DataProto:
    """The responses to one prompt as a batch. The mask comes from lengths: the end-of-sequence token trains too."""
    lengths = [len(response.token_ids) for response in responses]
    versions = [response.weight_versions for response in responses]
    n = len(responses)
    return DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([prompt] * n, torch.int32),
            "responses": Ragged.from_rows([r.token_ids for r in responses], torch.int32),
            "response_mask": Ragged.from_rows([np.ones(length) for length in lengths], torch.int8),
            "rollout_log_probs": Ragged.from_rows([r.log_probs for r in responses], torch.float32),
            "prompt_length": torch.full((n,), len(prompt), dtype=torch.int64),
            "response_length": torch.tensor(lengths, dtype=torch.int64),
            "truncated": torch.tensor([int(r.truncated) for r in responses], dtype=torch.int64),
            "weight_versions": Ragged.from_rows(versions, torch.int32),
            "weight_version": torch.tensor([min(row, default=-1) for row in versions], dtype=torch.int64),
            "last_weight_version": torch.tensor([max(row, default=-1) for row in versions], dtype=torch.int64),
        },
        {"uid": [uid] * n},
    )
