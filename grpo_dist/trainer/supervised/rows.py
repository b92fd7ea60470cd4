"""The rows of a command that trains one model: read, tokenized, and shared out to the ranks."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_dist.algorithms.settings import LabelSettings, PreferenceSettings, SFTSettings, TrainingSettings
from grpo_dist.assets import TRAINED_MODEL_KEY
from grpo_dist.assets.model_folder import ModelFolder, end_token_ids, load_tokenizer, read_model_config
from grpo_dist.config.schema_job import RewardModelTrainingConfig, SFTConfig, SupervisedConfig
from grpo_dist.data.conversations import padding_id
from grpo_dist.data.prompts import unread_notes
from grpo_dist.data.sampler import PromptSampler
from grpo_dist.data.step_tokens import StepForm
from grpo_dist.data.tokenize import check_token_ids, named_rows
from grpo_dist.data.training_rows import (
    Conversation,
    LabelledSteps,
    Pair,
    TrainingExample,
    checked_rows,
    conversation_row,
    load_preferences,
    training_batch,
)
from grpo_dist.data.training_tokens import tokenize_chats, tokenize_preferences
from grpo_dist.engines.train.micro_batch_plan import Lengths, balance
from grpo_dist.errors import DataError
from grpo_dist.protocol import DataProto


@dataclass(frozen=True)
class Kind:
    """A kind of rows: its name in messages, its loss with the metrics, and the column with the marks of tokens."""

    named: str
    objective: TrainingSettings
    metrics: tuple[str, ...]
    marks: str


_JUDGED = ("reward_model/loss", "reward_model/accuracy")
# By the class of a row.
KINDS: dict[type, Kind] = {
    Pair: Kind("pairs", PreferenceSettings(), (*_JUDGED, "reward_model/margin"), "labels"),
    LabelledSteps: Kind("answers with labelled steps", LabelSettings(), _JUDGED, "labels"),
    Conversation: Kind("conversations", SFTSettings(), ("sft/loss",), "response_mask"),
}


@dataclass(frozen=True)
class Rows:
    """The tokenized rows of a run: those to train and to validate on, and of which kind they are."""

    train: Sequence[TrainingExample]
    validation: Sequence[TrainingExample]
    kind: Kind

    @property
    def counts(self) -> str:
        """Say how many rows there are, in a line."""
        return f"rows: {len(self.train)} {self.kind.named} for training, {len(self.validation)} for validation"

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Return the number of training rows, and a fingerprint of their tokens, labels and order."""
        digest = hashlib.blake2b(digest_size=16)
        for example in self.train:
            for column in example.columns:
                digest.update(len(column).to_bytes(4, "little") + column.tobytes())
        return {"count": len(self.train), "fingerprint": digest.hexdigest()}


def load(config: SupervisedConfig, model: ModelFolder | None, needs: object) -> tuple[Rows, int, list[str]] | None:
    """Load the rows; returns them, the number of training steps, and notes. Without a model only check the rows.

    Raises:
        DataError: a file, a row or the tokenizer is invalid, training and validation rows are of different kinds, a
            row has a token that the model does not know, or there are fewer rows than a batch needs.
    """
    read = _read(config)
    if model is None:
        return None
    trust = config.model.trust_remote_code
    tokenizer = load_tokenizer(str(model.folder), trust_remote_code=trust, key=TRAINED_MODEL_KEY)
    examples: dict[str, Sequence[TrainingExample]] = {}
    notes: list[str] = []
    for key, rows in read.items():
        examples[key], left_out = _tokenized(config, model, rows, tokenizer) if rows else ([], [])
        if model.vocab_size is not None:
            largest = ((row.location, max(int(column.max()) for column in row.columns)) for row in examples[key])
            check_token_ids(largest, model.vocab_size, setting=f"{TRAINED_MODEL_KEY}={config.model.path}")
        notes += unread_notes(key, [row for row in rows if isinstance(row, Conversation)])
        if left_out:
            notes.append(
                f"{key}: {len(left_out)} of {len(rows)} rows are longer than data.max_length={config.data.max_length} "
                f"tokens and were left out: {named_rows([row.location for row in left_out])}"
            )
    kind = KINDS[type(read["data.train_files"][0])]
    loaded = Rows(examples["data.train_files"], examples["data.val_files"], kind)
    return loaded, total_steps(config, loaded), notes


def _read(config: SupervisedConfig) -> dict[str, Sequence[Any]]:
    """Return the rows by config key, with all checks that need no tokenizer."""
    data = config.data
    named = {
        "data.train_files": (data.train_files, data.train_max_samples),
        "data.val_files": (data.val_files, data.val_max_samples),
    }
    rows_of: dict[str, Sequence[Any]] = {}
    for key, (files, most) in named.items():
        rows: Sequence[Any] = []
        if files and isinstance(config, SFTConfig):
            check = functools.partial(conversation_row, messages_key=config.data.messages_key)
            rows = checked_rows(files, key=key, check=check)
        elif files:
            rows = load_preferences(files, key=key)
        rows_of[key] = rows[:most] if most > 0 else rows
    if len({type(rows[0]) for rows in rows_of.values() if rows}) > 1:
        both = ", ".join(f"{key}={','.join(files)}" for key, (files, _) in named.items())
        raise DataError(
            f"{both}: one has pairs (chosen, rejected), the other labelled steps (completions, labels); give both the "
            "same columns"
        )
    return rows_of


def _tokenized(
    config: SupervisedConfig, model: ModelFolder, rows: Sequence[Any], tokenizer: Any
) -> tuple[Sequence[TrainingExample], Sequence[Any]]:
    """Return rows as token ids, and those that were left out as too long."""
    setting, longest = f"{TRAINED_MODEL_KEY}={config.model.path}", config.data.max_length
    if isinstance(config, SFTConfig):
        variables, ends = config.data.apply_chat_template_kwargs, end_token_ids(model.folder, setting=setting)
        return tokenize_chats(rows, tokenizer, max_length=longest, apply_chat_template_kwargs=variables, end_ids=ends)
    assert isinstance(config, RewardModelTrainingConfig)
    form, padding = StepForm(config.data.step_separator, config.data.step_tag), read_model_config(model.folder, setting)
    return tokenize_preferences(rows, tokenizer, max_length=longest, padding_id=padding_id(padding), form=form)


def rank_shares(examples: Sequence[TrainingExample], num_ranks: int, marks: str) -> list[DataProto]:
    """Return the columns of each rank's share, at nearly equal cost; the sequences of a row are on the same rank."""
    prompts = np.array([len(example.prompt) for example in examples], np.int64)
    totals = np.array([example.total_tokens for example in examples], np.int64)
    shares = balance(Lengths(np.arange(len(examples)), prompts, totals - prompts), num_ranks)
    return [training_batch([examples[i] for i in share], marks) if len(share) else DataProto() for share in shares]


def new_sampler(config: SupervisedConfig, rows: Rows) -> PromptSampler:
    """Return the order of the training rows, from the first batch."""
    data = config.data
    return PromptSampler(len(rows.train), data.train_batch_size, shuffle=data.shuffle, seed=config.data_seed)


def total_steps(config: SupervisedConfig, rows: Rows) -> int:
    """Return the training steps: trainer.total_training_steps, else total_epochs over the rows; at least 1."""
    per_epoch = new_sampler(config, rows).steps_per_epoch
    return config.trainer.total_training_steps or max(1, config.trainer.total_epochs * per_epoch)
