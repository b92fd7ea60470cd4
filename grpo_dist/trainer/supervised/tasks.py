"""What is different between the commands that train one model: their rows, the check of the model, and its head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_dist.assets import TRAINED_MODEL_KEY
from grpo_dist.assets.model_folder import ModelFolder, end_token_ids
from grpo_dist.config.schema_supervised import RewardModelTrainingConfig, SFTConfig, SupervisedConfig
from grpo_dist.data.chat_rows import load_chats
from grpo_dist.data.chat_tokens import chat_batch, tokenize_chats
from grpo_dist.data.preference_tokens import preference_batch, tokenize_preferences
from grpo_dist.data.preferences import Pair, load_preferences
from grpo_dist.data.tokenize import load_tokenizer
from grpo_dist.engines.settings import LabelSettings, PreferenceSettings, SFTSettings
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.trainer.reward_model_check import check_classifier
from grpo_dist.trainer.supervised.rows import Example, Rows, check_token_ids

# Rows that were left out and are listed; the others are counted.
MOST_ROWS_NAMED = 5

# From a config key and its files to the rows; and from rows and a tokenizer to examples and the rows left out.
Read = Callable[[str, Sequence[str]], Sequence[Any]]
Tokenize = Callable[[Sequence[Any], Any], tuple[Sequence[Example], Sequence[Any]]]


@dataclass(frozen=True)
class Task:
    """What a command trains a model for.

    Attributes:
        load_rows: (config, model folder) -> (the tokenized rows, notes on them for the user).
        check_model: (model folder, the key and value that name it) -> a remark on it, or ""; raises if it cannot be
            trained so.
    """

    load_rows: Callable[[Any, ModelFolder], tuple[Rows, list[str]]]
    check_model: Callable[[ModelFolder, str], str]


def load_preference_rows(config: RewardModelTrainingConfig, model: ModelFolder) -> tuple[Rows, list[str]]:
    """Pairs, or answers with labelled steps.

    Raises:
        DataError: a file, a row or the tokenizer is invalid, training and validation rows are of different kinds, or
            a row has a token that the model does not know.
    """
    kinds: set[type] = set()

    def read(key: str, files: Sequence[str]) -> Sequence[Any]:
        rows = load_preferences(files, key=key)
        kinds.add(type(rows[0]))
        if len(kinds) > 1:
            raise DataError(
                f"data.train_files={','.join(config.data.train_files)}, data.val_files={','.join(files)}: one has "
                "pairs (chosen, rejected), the other labelled steps (completions, labels); give both the same columns"
            )
        return rows

    def tokenize(rows: Sequence[Any], tokenizer: Any) -> tuple[Sequence[Example], Sequence[Any]]:
        return tokenize_preferences(rows, tokenizer, max_length=config.data.max_length)

    train, validation, notes = _load(config, model, read, tokenize)
    if Pair in kinds:
        return Rows(train, validation, "pairs", PreferenceSettings(), preference_batch), notes
    return Rows(train, validation, "answers with labelled steps", LabelSettings(), preference_batch), notes


def load_chat_rows(config: SFTConfig, model: ModelFolder) -> tuple[Rows, list[str]]:
    """Conversations.

    Raises:
        DataError: a file, a row or the tokenizer is invalid, or a row has a token that the model does not know.
    """
    data = config.data
    ends = end_token_ids(model.folder, setting=f"{TRAINED_MODEL_KEY}={config.model.path}")

    def read(key: str, files: Sequence[str]) -> Sequence[Any]:
        return load_chats(files, key=key, messages_key=data.messages_key)

    def tokenize(rows: Sequence[Any], tokenizer: Any) -> tuple[Sequence[Example], Sequence[Any]]:
        kwargs = data.apply_chat_template_kwargs
        return tokenize_chats(
            rows, tokenizer, max_length=data.max_length, apply_chat_template_kwargs=kwargs, end_ids=ends
        )

    train, validation, notes = _load(config, model, read, tokenize)
    return Rows(train, validation, "conversations", SFTSettings(), chat_batch), notes


def _load(
    config: SupervisedConfig, model: ModelFolder, read: Read, tokenize: Tokenize
) -> tuple[Sequence[Example], Sequence[Example], list[str]]:
    """The rows to train and to validate on, and notes on what was left out."""
    data, trust = config.data, config.model.trust_remote_code
    tokenizer = load_tokenizer(str(model.folder), trust_remote_code=trust, key=TRAINED_MODEL_KEY)
    found: list[Sequence[Example]] = []
    notes: list[str] = []
    for key, files, most in (
        ("data.train_files", data.train_files, data.train_max_samples),
        ("data.val_files", data.val_files, data.val_max_samples),
    ):
        rows = read(key, files) if files else []
        chosen = rows[:most] if most > 0 else rows
        examples, left_out = tokenize(chosen, tokenizer) if chosen else ([], [])
        found.append(examples)
        if model.vocab_size is not None:
            check_token_ids(examples, model.vocab_size, config.model.path)
        if left_out:
            named = "; ".join(row.location for row in left_out[:MOST_ROWS_NAMED])
            more = f"; and {len(left_out) - MOST_ROWS_NAMED} more" if len(left_out) > MOST_ROWS_NAMED else ""
            notes.append(
                f"{key}: {len(left_out)} of {len(chosen)} rows are longer than data.max_length={data.max_length} "
                f"tokens and were left out: {named}{more}"
            )
    return found[0], found[1], notes


def check_backbone(model: ModelFolder, setting: str) -> str:
    """Check that a model has a linear head of one output, or may get one.

    Raises:
        ConfigError: it is another kind of model.
    """
    check_classifier(model, setting, needs_head=False)
    if not model.shapes:
        return ""
    return "its head is trained on" if "score.weight" in model.shapes else "it gets a new head"


def check_language_model(model: ModelFolder, setting: str) -> str:
    """Check that a model is no classifier.

    Raises:
        ConfigError: it has a linear head instead of an output layer.
    """
    if "score.weight" in model.shapes:
        raise ConfigError(
            f"{setting}: it has a head of its own (score.weight), as reward models have, and no output layer; use a "
            "causal LM"
        )
    return ""


TASKS: dict[str, Task] = {
    RewardModelTrainingConfig.role: Task(load_preference_rows, check_backbone),
    SFTConfig.role: Task(load_chat_rows, check_language_model),
}
