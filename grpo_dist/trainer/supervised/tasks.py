"""What is different between the commands that train one model: their rows, the check of the model, and its head."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_dist.assets import TRAINED_MODEL_KEY
from grpo_dist.assets.model_folder import ModelFolder, end_token_ids
from grpo_dist.assets.tokenizer import load_tokenizer
from grpo_dist.config.schema_supervised import RewardModelTrainingConfig, SFTConfig, SupervisedConfig
from grpo_dist.data.chat_rows import Chat, load_chats
from grpo_dist.data.chat_tokens import chat_batch, tokenize_chats
from grpo_dist.data.columns import unread_notes
from grpo_dist.data.conversations import padding_id
from grpo_dist.data.preference_tokens import preference_batch, tokenize_preferences
from grpo_dist.data.preferences import LabelledSteps, Pair, load_preferences
from grpo_dist.data.step_tokens import StepForm
from grpo_dist.data.tokenize import check_token_ids, named_rows
from grpo_dist.engines.settings import LabelSettings, PreferenceSettings, SFTSettings, TrainingSettings
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.protocol import DataProto
from grpo_dist.trainer.reward_model_check import check_classifier, read_model_config
from grpo_dist.trainer.supervised.rows import Example, Rows

_JUDGED = ("reward_model/loss", "reward_model/accuracy")

# From rows and a tokenizer to examples and the rows that were left out.
Tokenize = Callable[[Sequence[Any], Any], tuple[Sequence[Example], Sequence[Any]]]


@dataclass(frozen=True)
class Task:
    """What a command trains a model for.

    Attributes:
        read: (config, config key, files) -> the checked rows of these files.
        tokenizing: (config, model folder) -> how rows are tokenized.
        kinds: by the class of a row: what it is, for messages, its loss, and the metrics of that.
        batch: makes the columns that the loss reads.
        check_model: (model folder, the key and value that name it) -> a remark on it, or ""; raises if it cannot be
            trained so.
    """

    read: Callable[[Any, str, Sequence[str]], Sequence[Any]]
    tokenizing: Callable[[Any, ModelFolder], Tokenize]
    kinds: Mapping[type, tuple[str, TrainingSettings, tuple[str, ...]]]
    batch: Callable[[Sequence[Any]], DataProto]
    check_model: Callable[[ModelFolder, str], str]


def read_rows(config: SupervisedConfig) -> dict[str, Sequence[Any]]:
    """The rows by config key, with all checks that need no tokenizer.

    Raises:
        DataError: a file or a row is invalid, or training and validation rows are of different kinds.
    """
    data = config.data
    named = {
        "data.train_files": (data.train_files, data.train_max_samples),
        "data.val_files": (data.val_files, data.val_max_samples),
    }
    found: dict[str, Sequence[Any]] = {}
    for key, (files, most) in named.items():
        rows = TASKS[config.role].read(config, key, files) if files else []
        found[key] = rows[:most] if most > 0 else rows
    if len({type(rows[0]) for rows in found.values() if rows}) > 1:
        both = ", ".join(f"{key}={','.join(files)}" for key, (files, _) in named.items())
        raise DataError(
            f"{both}: one has pairs (chosen, rejected), the other labelled steps (completions, labels); give both the "
            "same columns"
        )
    return found


def load_rows(config: SupervisedConfig, model: ModelFolder) -> tuple[Rows, list[str]]:
    """Read and tokenize all rows; returns them, and notes on them for the user.

    Args:
        config: the run's config.
        model: the model folder, which has the tokenizer.

    Raises:
        DataError: a file, a row or the tokenizer is invalid, training and validation rows are of different kinds, or
            a row has a token that the model does not know.
    """
    task, data, trust = TASKS[config.role], config.data, config.model.trust_remote_code
    read = read_rows(config)
    tokenizer = load_tokenizer(str(model.folder), trust_remote_code=trust, key=TRAINED_MODEL_KEY)
    tokenize = task.tokenizing(config, model)
    found: dict[str, Sequence[Example]] = {}
    notes: list[str] = []
    for key, rows in read.items():
        found[key], left_out = tokenize(rows, tokenizer) if rows else ([], [])
        if model.vocab_size is not None:
            largest = ((each.location, max(int(column.max()) for column in each.columns)) for each in found[key])
            check_token_ids(largest, model.vocab_size, setting=f"{TRAINED_MODEL_KEY}={config.model.path}")
        notes += unread_notes(key, [row for row in rows if isinstance(row, Chat)])
        if left_out:
            named = named_rows([row.location for row in left_out])
            notes.append(
                f"{key}: {len(left_out)} of {len(rows)} rows are longer than data.max_length={data.max_length} "
                f"tokens and were left out: {named}"
            )
    kind = task.kinds[type(read["data.train_files"][0])]
    return Rows(found["data.train_files"], found["data.val_files"], *kind, task.batch), notes


def _tokenizing_preferences(config: RewardModelTrainingConfig, model: ModelFolder) -> Tokenize:
    read = read_model_config(model.folder, f"{TRAINED_MODEL_KEY}={config.model.path}")
    return functools.partial(
        tokenize_preferences,
        max_length=config.data.max_length,
        padding_id=padding_id(read),
        form=StepForm(config.data.step_separator, config.data.step_tag),
    )


def _tokenizing_chats(config: SFTConfig, model: ModelFolder) -> Tokenize:
    return functools.partial(
        tokenize_chats,
        max_length=config.data.max_length,
        apply_chat_template_kwargs=config.data.apply_chat_template_kwargs,
        end_ids=end_token_ids(model.folder, setting=f"{TRAINED_MODEL_KEY}={config.model.path}"),
    )


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
    RewardModelTrainingConfig.role: Task(
        read=lambda config, key, files: load_preferences(files, key=key),
        tokenizing=_tokenizing_preferences,
        kinds={
            Pair: ("pairs", PreferenceSettings(), (*_JUDGED, "reward_model/margin")),
            LabelledSteps: ("answers with labelled steps", LabelSettings(), _JUDGED),
        },
        batch=preference_batch,
        check_model=check_backbone,
    ),
    SFTConfig.role: Task(
        read=lambda config, key, files: load_chats(files, key=key, messages_key=config.data.messages_key),
        tokenizing=_tokenizing_chats,
        kinds={Chat: ("conversations", SFTSettings(), ("sft/loss",))},
        batch=chat_batch,
        check_model=check_language_model,
    ),
}
