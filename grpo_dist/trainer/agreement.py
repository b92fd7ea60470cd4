"""The sampler and the trainer on the same tokens, operation by operation (algorithms/agreement.py)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_dist.algorithms.agreement import LOG_PROBS, Operation, distances, first_difference, operation
from grpo_dist.algorithms.kl import k3
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.model_loading import DTYPES
from grpo_dist.engines.train.watching import watched
from grpo_dist.engines.weights.buckets import pack
from grpo_dist.trainer.rollout.job import group_seed
from grpo_dist.workers.rollout import group_batch


@dataclass(frozen=True)
class Agreement:
    """How far sampler and trainer agree.

    Attributes:
        operations: that were seen at both ends, in the trainer's order; the log-probs are the last.
        unseen: names of the trainer's operations that were not seen in the sampler, or not in the same shape.
        places: response, position in it and token id of all T sampled tokens.
        sampler: (T,) log-probs of the sampler, nats.
        trainer: (T,) of the trainer.
    """

    operations: list[Operation]
    unseen: list[str]
    places: list[tuple[int, int, int]]
    sampler: Tensor
    trainer: Tensor

    @property
    def first(self) -> Operation | None:
        """The first operation that differs by more than rounding."""
        return first_difference(self.operations)

    @property
    def kl(self) -> float:
        """KL(sampler || trainer) by k3, nats per token."""
        return float(k3(self.sampler.double(), self.trainer.double()).mean())  # in float32 it is 0 below 1e-7

    @property
    def worst(self) -> int:
        """Number of the token whose log-probs are the furthest apart."""
        return int((self.sampler - self.trainer).abs().argmax())


async def send_weights(sampler: Any, trainer: FSDPEngine, bucket_bytes: int) -> None:
    """Send the sampler what a run sends it: whole weights, with LoRA's factors merged, or its factors alone."""
    dtype = sampler.settings.dtype
    factors = sampler.settings.lora is not None
    tensors = trainer.lora_factors(dtype) if factors else trainer.full_parameters(dtype, as_in_files=True)
    await sampler.weights.load(list(pack(tensors, bucket_bytes=bucket_bytes)), sampler.weights.version + 1)


async def compare(
    sampler: Any, trainer: FSDPEngine, prompts: Sequence[Sequence[int]], sampling: SamplingSettings
) -> Agreement:
    """Sample a response to each prompt (token ids), and run the trainer over the same tokens, one after the other.

    Args:
        sampler: a `VLLMEngine` without prefix cache, with the trainer's weights.
        trainer: on one rank.
        prompts: token ids.
        sampling: of the sampler.
    """
    dtypes = (getattr(torch, sampler.settings.dtype), DTYPES[trainer.settings.compute_dtype])
    coarser = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    apart: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    unseen: dict[str, None] = {}
    places: list[tuple[int, int, int]] = []
    log_probs: list[tuple[Tensor, ...]] = []
    for row, prompt in enumerate(prompts):
        seeded = replace(sampling, n=1, seed=group_seed(sampling.seed or 0, 0, row))
        response, theirs = await sampler.watched(prompt, seeded)
        data = group_batch(str(row), np.asarray(prompt), [response])
        theirs[LOG_PROBS] = data["rollout_log_probs"].values.unsqueeze(1)
        if row == 0:  # which compares layouts first
            trainer.compute_log_probs(data, micro_batch_size=1)
        own, wobbled = watched(trainer, data), watched(trainer, data, torch.finfo(coarser).eps)
        for name, output in own.items():
            n = min(len(output), len(theirs.get(name, ())))
            if n < len(output) - 1 or theirs[name].shape[1] != output.shape[1]:  # a last token is no input of a sampler
                unseen[name] = None
                continue
            difference, wobble = (distances(name, other[name][:n], output[:n]) for other in (theirs, wobbled))
            apart[name].append((difference, wobble))
        places += [(row, position, token) for position, token in enumerate(response.token_ids)]
        log_probs.append((theirs[LOG_PROBS][:, 0], own[LOG_PROBS][:, 0]))
    operations = []
    for name, pairs in apart.items():
        differences, wobbles = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        operations.append(operation(name, differences, wobbles, coarser))
    both = (torch.cat(parts) for parts in zip(*log_probs, strict=True))
    return Agreement(operations, list(unseen), places, *both)
