"""Rows that one model is trained on, in verl's and TRL's forms, and the token ids that become of them.

Conversations (`conversation_row`), for supervised fine-tuning:

    messages             a whole conversation, a list of chat messages; all messages of the assistant are trained
    prompt, completion   texts, or lists of messages; the assistant's messages of the completion are trained

Pairs of answers (`pair_row`), one of them chosen, for a reward model:

    prompt, chosen, rejected   texts, or lists of messages; answers as messages may begin with those of the prompt
    chosen, rejected           lists of messages, of which the common ones at the start are the prompt

Labelled steps (`steps_row`), for a reward model:

    prompt, completions, labels   the steps of an answer as texts, and whether each is good (true or 1) or bad (false or
                                  0); an answer with one label is one step

As a prompt a text stands for one message of the user, as an answer for one of the assistant. Other columns are unread.

`JudgedResponses` are labelled steps that a run has written itself: what its reward model is trained on again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from grpo_dist.data.files import locate_rows, shown
from grpo_dist.data.prompts import check_text_only, checked_messages, column_of, messages_in, unread
from grpo_dist.errors import DataError, DiskError
from grpo_dist.protocol import DataProto, Ragged

REPLAY_KEY = "reward_model.replay_share"

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """A conversation to learn from: the messages at the positions `trained`, at least one and never 0, in order."""

    location: str
    messages: Messages
    trained: tuple[int, ...]
    unread: Sequence[str] = ()


@dataclass(frozen=True)
class Pair:
    """Two answers to a prompt, of which one is preferred, as chat messages; `location` is the file and the row."""

    location: str
    prompt: Messages
    chosen: Messages
    rejected: Messages


@dataclass(frozen=True)
class LabelledSteps:
    """The steps of an answer to a prompt, and for each whether it is good; `location` is the file and the row."""

    location: str
    prompt: Messages
    steps: list[str]
    labels: list[bool]


@dataclass(frozen=True, eq=False)
class TrainingExample:
    """A row as token ids.

    Attributes:
        prompt: [P] int32 token ids, P > 0, before all responses; of a conversation up to the first trained token.
        responses: [R_i] int32 each, R_i > 0: of a pair the chosen and the rejected one, of other rows the one.
        marks: [R_i] int8 each, what the loss reads at each token. Of a conversation 1 on the tokens to train. For a
            reward model, at the token that completes what is judged, 1 or 0, else -1.
    """

    location: str
    prompt: np.ndarray
    responses: list[np.ndarray]
    marks: list[np.ndarray]

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        """Return all its numbers, the prompt's token ids first."""
        return (self.prompt, *self.responses, *self.marks)

    @property
    def total_tokens(self) -> int:
        """Return the number of tokens of the prompt, once, and of all responses."""
        return len(self.prompt) + sum(map(len, self.responses))

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the longest sequence."""
        return len(self.prompt) + max(map(len, self.responses))


TrainingRow = TypeVar("TrainingRow", Conversation, Pair, LabelledSteps, Pair | LabelledSteps)


def checked_rows(
    files: Sequence[str], *, key: str, check: Callable[[dict[str, Any], str, str], TrainingRow]
) -> list[TrainingRow]:
    """Read and check all rows of all files.

    Args:
        files: entries in the forms of config/data_files.py.
        check: makes the row of (columns, location, location with the key for messages), as `pair_row` does.

    Raises:
        DataError: a file cannot be read, or a row has not the form; the message names file, row and column.
    """
    rows = []
    for location, row in locate_rows(files, key=key):
        where = f"{key}: {location}"
        check_text_only(row, where)
        rows.append(check(row, location, where))
    return rows


def load_preferences(files: Sequence[str], *, key: str) -> list[Pair] | list[LabelledSteps]:
    """Read and check all rows, pairs or labelled steps, as the columns of the first row have it."""
    _, first = next(iter(locate_rows(files, key=key)))
    if "completions" in first:
        return checked_rows(files, key=key, check=steps_row)
    return checked_rows(files, key=key, check=pair_row)


def conversation_row(row: dict[str, Any], location: str, where: str, *, messages_key: str) -> Conversation:
    """Check a row of supervised fine-tuning; `messages_key` is the column of whole conversations."""
    if row.get(messages_key) is None and row.get("completion") is not None:
        prompt, completion = messages_in(row, "prompt", where), messages_in(row, "completion", where, "assistant")
        if prompt[-1]["role"] == completion[0]["role"] == "assistant":
            raise DataError(
                f"{where}: prompt ends in a turn of the assistant that completion goes on with; write the whole turn "
                "in completion"
            )
        return _to_train(location, prompt + completion, len(prompt), row, f"{where}: completion")
    setting = f" (data.messages_key={messages_key})"
    column = column_of(row, messages_key, where, setting=f"{setting}, nor 'prompt' and 'completion'")
    if row.get("completion") is not None:
        raise DataError(
            f"{where}: {messages_key}{setting} and completion both say what to train; leave out one of them"
        )
    if isinstance(column, str):
        raise DataError(f"{where}: {messages_key}{setting} must be a list of messages, got {shown(column)}")
    where = f"{where}: {messages_key}"
    return _to_train(location, checked_messages(column, where), 0, row, where)


def _to_train(location: str, messages: Messages, first: int, row: dict[str, Any], where: str) -> Conversation:
    """Make a conversation of which the assistant's messages from position `first` on are trained."""
    trained = tuple(i for i, message in enumerate(messages) if i >= first and message["role"] == "assistant")
    if not trained:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise DataError(
            f"{where} has no message of the role 'assistant', and only those are trained; the roles of the row are "
            f"{roles}; rename the one that answers, or leave out the row"
        )
    if trained[0] == 0:
        raise DataError(
            f"{where} begins with a message of the assistant, which answers nothing; put a message of the user in "
            "front of it, or leave it out"
        )
    for number in trained:
        turn = messages[number]
        if not turn["content"].strip() and not turn.get("tool_calls"):
            raise DataError(
                f"{where}: message {number + 1} of the conversation, of the assistant, is empty; write what it should "
                "say or call, or leave out the row"
            )
    return Conversation(location, messages, trained, unread(row))


def pair_row(row: dict[str, Any], location: str, where: str) -> Pair:
    """Check a row with a chosen and a rejected answer."""
    chosen, rejected = (messages_in(row, name, where, "assistant") for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise DataError(f"{where}: chosen and rejected are the same, so neither is preferred; leave out the row")
    given = row.get("prompt") is not None
    prompt = messages_in(row, "prompt", where) if given else _common_start(row, chosen, rejected, where)
    # an answer may begin with the prompt's messages
    chosen, rejected = (
        answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer for answer in (chosen, rejected)
    )
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer:
            raise DataError(f"{where}: {name} has no message after the prompt; add the answer, or leave out the row")
        if answer[-1]["role"] != "assistant":
            raise DataError(
                f"{where}: {name} ends with a message of the role {answer[-1]['role']!r}; an answer ends with one of "
                "the assistant's"
            )
    return Pair(location, prompt, chosen, rejected)


def _common_start(row: dict[str, Any], chosen: Messages, rejected: Messages, where: str) -> Messages:
    for name in ("chosen", "rejected"):
        if isinstance(row[name], str):
            raise DataError(
                f"{where}: {name} is text and there is no column 'prompt'; add it, or write both as lists of messages "
                "that begin with those of the prompt"
            )
    same = [a == b for a, b in zip(chosen, rejected, strict=False)]
    prompt = chosen[: [*same, False].index(False)]
    if not prompt:
        raise DataError(
            f"{where}: chosen and rejected begin with different messages; both must answer the same prompt, so let "
            "both begin with its messages, or add a column 'prompt'"
        )
    return prompt


def steps_row(row: dict[str, Any], location: str, where: str) -> LabelledSteps:
    """Check a row with the steps of an answer and their labels."""
    prompt = messages_in(row, "prompt", where)
    steps, labels = (column_of(row, name, where) for name in ("completions", "labels"))
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step.strip() for step in steps):
        raise DataError(f"{where}: completions must be a list of texts, one for each step, got {shown(steps)}")
    if not isinstance(labels, list) or len(labels) != len(steps) or any(label not in (0, 1) for label in labels):
        raise DataError(
            f"{where}: labels must be a list of true and false (or 1 and 0), one for each of the {len(steps)} "
            f"completions, got {shown(labels)}"
        )
    return LabelledSteps(location, prompt, steps, [bool(label) for label in labels])


def within_length(
    rows: Sequence[TrainingRow], tokenized: Callable[[TrainingRow], TrainingExample], *, max_length: int
) -> tuple[list[TrainingExample], list[TrainingRow]]:
    """Return rows as token ids, and the rows that are left out as too long: a cut one would be another answer."""
    examples, left_out = [], []
    for row in rows:
        example = tokenized(row)
        if example.num_tokens > max_length:
            left_out.append(row)
        else:
            examples.append(example)
    if rows and not examples:
        raise DataError(
            f"data.max_length={max_length}: all {len(left_out)} rows have more tokens, none is left (the first is "
            f"{left_out[0].location}); raise it"
        )
    return examples, left_out


def training_batch(examples: Sequence[TrainingExample], marks: str) -> DataProto:
    """Return the columns `prompts`, `responses`, `uid` and the marks by the name that the loss reads them under.

    There is a row for each response, those of a pair in turn.
    """
    columns = {
        "prompts": Ragged.from_rows([row.prompt for row in examples for _ in row.responses], torch.int32),
        "responses": Ragged.from_rows([response for row in examples for response in row.responses], torch.int32),
        marks: Ragged.from_rows([of_response for row in examples for of_response in row.marks], torch.int8),
    }
    uid = [f"{i}: {row.location}" for i, row in enumerate(examples) for _ in row.responses]
    return DataProto.from_dict(columns, {"uid": uid})


class Selection(NamedTuple):
    """Rows to train on: those of an iteration, some of those before it, and how many of the iteration's are left out
    since a row before has the same conversation.
    """

    fresh: list[LabelledSteps]
    replayed: list[LabelledSteps]
    repeated: int


@dataclass(frozen=True)
class JudgedResponses:
    """Judged responses of all steps of a run, in a folder. A step that a resumed run repeats replaces its file.

    DeepSeekMath (arXiv 2402.03300, section 4.1.4) retrains the reward model in every iteration on what the policy has
    just sampled, and on a tenth of what it sampled before ("replay"), so that the model does not forget what bad
    answers of earlier policies look like. One JSON-lines file, FOLDER/12.jsonl, holds the responses of a training step
    in the form that `steps_row` and `grpo-dist reward-model` read.
    """

    folder: Path

    def file(self, step: int) -> Path:
        """Return the file of the rows of a step."""
        return self.folder / f"{step}.jsonl"

    def select(self, first: int, last: int, share: float, *, seed: int) -> Selection:
        """Return the rows of an iteration, and a random share of those before it; the same ones for the same seed.

        A conversation that comes more than once is taken once, where it came first.

        Args:
            first: the first step of the iteration; steps count from 1.
            share: of the earlier rows, in [0, 1]; rounded to whole rows.

        Raises:
            DataError: a file is missing or damaged.
        """
        known: set[bytes] = set()
        before = range(1, first if share else 1)
        count = sum(row is not None for row in self._rows(before, known))
        chosen = set(np.random.default_rng([seed, last]).permutation(count)[: round(share * count)].tolist())
        # read once more, since all responses of a run may be more than the memory holds
        again = filter(None, self._rows(before, set()))
        replayed = [row for i, row in enumerate(again) if i in chosen]
        rows = [*self._rows(range(first, last + 1), known)]
        return Selection([row for row in rows if row is not None], replayed, rows.count(None))

    def check(self, steps: Sequence[int]) -> None:
        """Check that the files of these steps are there."""
        for step in steps:
            if not self.file(step).is_file():
                raise DataError(
                    f"{REPLAY_KEY}: {self.file(step)} is missing, the judged responses of step {step}, which the "
                    "reward model is to be retrained on; give the file back, or start the run anew"
                )

    def copy(self, steps: Sequence[int], other: JudgedResponses) -> None:
        """Copy the rows of these steps into another store; a DiskError if a file cannot be copied."""
        try:
            other.folder.mkdir(parents=True, exist_ok=True)
            for step in steps:
                temporary = other.file(step).with_suffix(".tmp")
                shutil.copyfile(self.file(step), temporary)
                temporary.replace(other.file(step))
        except OSError as error:
            raise DiskError(
                f"{REPLAY_KEY}: the judged responses cannot be copied to {other.folder}: {error}"
            ) from error

    def _rows(self, steps: Sequence[int], known: set[bytes]) -> Iterator[LabelledSteps | None]:
        """Yield the rows of these steps, a file at a time; None for a known conversation. Others become known."""
        self.check(steps)
        for file in map(self.file, steps):
            for row in checked_rows([str(file)], key=REPLAY_KEY, check=steps_row) if file.stat().st_size else ():
                text = json.dumps([row.prompt, "".join(row.steps)])
                digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
                yield None if digest in known else row
                known.add(digest)
