"""The tokenized rows of a command that trains one model: their order, and the share of each rank."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from grpo_dist.config.schema_supervised import SupervisedConfig
from grpo_dist.data.sampler import PromptSampler
from grpo_dist.engines.settings import TrainingSettings
from grpo_dist.engines.train.micro_batch_plan import Lengths
from grpo_dist.protocol import DataProto
from grpo_dist.workers.balance import balance


class Example(Protocol):
    """A row to train on: a pair of answers, an answer with labelled steps, or a conversation."""

    @property
    def location(self) -> str:
        """File and row."""

    @property
    def prompt(self) -> np.ndarray:
        """Token ids with which all its sequences begin."""

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        """All its numbers: token ids, labels or masks."""

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt, once, and of what follows it."""


@dataclass(frozen=True)
class Rows:
    """The tokenized rows of a run.

    Attributes:
        train: those to train on.
        validation: those to validate on.
        kind: what a row is, for messages, such as "pairs".
        objective: the loss of such rows.
        metrics: names of what the loss tells of rows, such as "reward_model/accuracy".
        batch: makes the columns that the loss reads; a row may become several sequences.
    """

    train: Sequence[Example]
    validation: Sequence[Example]
    kind: str
    objective: TrainingSettings
    metrics: tuple[str, ...]
    batch: Callable[[Sequence[Any]], DataProto]

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Number of the training rows, and a fingerprint of their tokens, labels and order."""
        digest = hashlib.blake2b(digest_size=16)
        for example in self.train:
            for column in example.columns:
                digest.update(len(column).to_bytes(4, "little") + column.tobytes())
        return {"count": len(self.train), "fingerprint": digest.hexdigest()}

    def shares(self, examples: Sequence[Example], num_ranks: int) -> list[DataProto]:
        """The columns of each rank's share; see `rank_shares`."""
        return rank_shares(examples, num_ranks, self.batch)


def rank_shares(
    examples: Sequence[Example], num_ranks: int, batch: Callable[[Sequence[Any]], DataProto]
) -> list[DataProto]:
    """The columns of each rank's share, at nearly equal cost; the sequences of a row are on the same rank.

    Args:
        examples: the rows.
        num_ranks: of the model.
        batch: makes the columns that the loss reads.
    """
    prompts = np.array([len(each.prompt) for each in examples], np.int64)
    totals = np.array([each.total_tokens for each in examples], np.int64)
    shares = balance(Lengths(np.arange(len(examples)), prompts, totals - prompts), num_ranks)
    return [batch([examples[i] for i in share]) if len(share) else DataProto() for share in shares]


def new_sampler(config: SupervisedConfig, rows: Rows) -> PromptSampler:
    """The order of the training rows, from the first batch."""
    data = config.data
    return PromptSampler(len(rows.train), data.train_batch_size, shuffle=data.shuffle, seed=config.data_seed)


def total_steps(config: SupervisedConfig, rows: Rows) -> int:
    """Number of training steps: trainer.total_training_steps, else total_epochs over the rows; at least 1."""
    per_epoch = new_sampler(config, rows).steps_per_epoch
    return config.trainer.total_training_steps or max(1, config.trainer.total_epochs * per_epoch)
