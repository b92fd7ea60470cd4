"""Reads, checks and tokenizes the rows that a reward model learns from, and shares a batch out to the ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_dist.assets import TRAINED_MODEL_KEY
from grpo_dist.assets.model_folder import ModelFolder
from grpo_dist.config.schema_supervised import SupervisedConfig
from grpo_dist.data.preference_tokens import Example, preference_batch, tokenize_preferences
from grpo_dist.data.preferences import LabelledSteps, Pair, load_preferences
from grpo_dist.data.sampler import PromptSampler
from grpo_dist.data.tokenize import load_tokenizer
from grpo_dist.engines.settings import LabelSettings, PreferenceSettings
from grpo_dist.engines.train.micro_batch_plan import Lengths
from grpo_dist.errors import DataError
from grpo_dist.protocol import DataProto
from grpo_dist.workers.balance import balance

# Rows that were left out and are listed; the others are counted.
MOST_ROWS_NAMED = 5


@dataclass(frozen=True)
class Rows:
    """The tokenized rows of a run.

    Attributes:
        train: those to train on.
        validation: those to validate on.
        objective: the loss of such rows: that of pairs, or that of labels.
    """

    train: Sequence[Example]
    validation: Sequence[Example]
    objective: PreferenceSettings | LabelSettings

    @property
    def kind(self) -> str:
        """What a row is, for messages."""
        return "pairs" if isinstance(self.objective, PreferenceSettings) else "answers with labelled steps"

    def identity(self) -> dict[str, Any]:
        """Number of the training rows, and a fingerprint of their tokens, labels and order."""
        digest = hashlib.blake2b(digest_size=16)
        for example in self.train:
            for part in (example.prompt, *example.responses, *example.labels):
                digest.update(len(part).to_bytes(4, "little") + part.tobytes())
        return {"count": len(self.train), "fingerprint": digest.hexdigest()}


def load_rows(config: SupervisedConfig, model: ModelFolder) -> tuple[Rows, list[str]]:
    """Read and tokenize all rows; returns them, and notes on them for the user.

    Args:
        config: the run's config.
        model: the model folder, which has the tokenizer.

    Raises:
        DataError: a file, a row or the tokenizer is invalid, training and validation rows are of different kinds, or
            a row has a token that the model does not know.
    """
    data = config.data
    tokenizer = load_tokenizer(
        str(model.folder), trust_remote_code=config.model.trust_remote_code, key=TRAINED_MODEL_KEY
    )
    kinds: dict[str, type] = {}
    examples: dict[str, list[Example]] = {}
    notes: list[str] = []
    for key, files, most in (
        ("data.train_files", data.train_files, data.train_max_samples),
        ("data.val_files", data.val_files, data.val_max_samples),
    ):
        if not files:
            continue
        read: list[Pair] | list[LabelledSteps] = load_preferences(files, key=key)
        kinds[key] = type(read[0])
        chosen = read[:most] if most > 0 else read
        examples[key], left_out = tokenize_preferences(
            chosen, tokenizer, max_length=data.max_length, apply_chat_template_kwargs={}
        )
        if left_out:
            named = "; ".join(row.location for row in left_out[:MOST_ROWS_NAMED])
            more = f"; and {len(left_out) - MOST_ROWS_NAMED} more" if len(left_out) > MOST_ROWS_NAMED else ""
            notes.append(
                f"{key}: {len(left_out)} of {len(chosen)} rows are longer than data.max_length={data.max_length} "
                f"tokens and were left out: {named}{more}"
            )
    if len(set(kinds.values())) > 1:
        raise DataError(
            f"data.train_files={','.join(data.train_files)}, data.val_files={','.join(data.val_files)}: one has pairs "
            "(chosen, rejected), the other labelled steps (completions, labels); give both the same columns"
        )
    if model.vocab_size is not None:
        _check_token_ids([row for rows in examples.values() for row in rows], model.vocab_size, config.model.path)
    objective = PreferenceSettings() if kinds["data.train_files"] is Pair else LabelSettings()
    return Rows(examples["data.train_files"], examples.get("data.val_files", []), objective), notes


def _check_token_ids(examples: Sequence[Example], vocab_size: int, path: str) -> None:
    for example in examples:
        highest = max(int(part.max()) for part in (example.prompt, *example.responses))
        if highest >= vocab_size:
            raise DataError(
                f"{TRAINED_MODEL_KEY}={path}: {example.location} has the token {highest}, and the model knows tokens "
                f"below {vocab_size} (vocab_size of config.json); its tokenizer is that of another model"
            )


def new_sampler(config: SupervisedConfig, rows: Rows) -> PromptSampler:
    """The order of the training rows, from the first batch."""
    data = config.data
    return PromptSampler(len(rows.train), data.train_batch_size, shuffle=data.shuffle, seed=config.data_seed)


def total_steps(config: SupervisedConfig, rows: Rows) -> int:
    """Number of training steps: trainer.total_training_steps, else total_epochs over the rows; at least 1."""
    per_epoch = new_sampler(config, rows).steps_per_epoch
    return config.trainer.total_training_steps or max(1, config.trainer.total_epochs * per_epoch)


def parts_of(examples: Sequence[Example], num_ranks: int) -> list[DataProto]:
    """The rows of each rank, at nearly equal cost; both answers of a pair are on the same one."""
    lengths = Lengths(
        np.arange(len(examples)),
        np.array([len(each.prompt) for each in examples], np.int64),
        np.array([sum(map(len, each.responses)) for each in examples], np.int64),
    )
    shares = balance(lengths, num_ranks)
    return [preference_batch([examples[i] for i in share]) if len(share) else DataProto() for share in shares]
