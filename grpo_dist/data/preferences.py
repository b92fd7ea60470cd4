"""What a reward model learns from, in TRL's forms: pairs of answers, one of them chosen, and steps with labels.

Pairs (`load_pairs`), one per row:

    prompt, chosen, rejected   texts, or lists of messages; answers as messages may begin with those of the prompt
    chosen, rejected           lists of messages, of which the common ones at the start are the prompt

Labelled steps (`load_steps`):

    prompt, completions, labels   the steps of an answer as texts, and whether each is good (true or 1) or bad (false or
                                  0); an answer with one label is one step

A text stands for one message, of the user or of the assistant. Every row is checked when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_dist.data.columns import check_text_only, column_of
from grpo_dist.data.files import locate_rows, shown
from grpo_dist.data.prompts import checked_messages
from grpo_dist.errors import DataError

Messages = list[dict[str, Any]]


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


def load_pairs(files: Sequence[str], *, key: str) -> list[Pair]:
    """Read and check all rows.

    Args:
        files: entries in the forms of config/data_files.py.
        key: the config key that names the files, for messages.

    Raises:
        DataError: a file cannot be read, or a row is no pair; the message names file, row and column.
    """
    return [_pair(row, location, f"{key}: {location}") for location, row in locate_rows(files, key=key)]


def load_steps(files: Sequence[str], *, key: str) -> list[LabelledSteps]:
    """Read and check all rows. Takes the arguments of `load_pairs`.

    Raises:
        DataError: a file cannot be read, or a row has no labelled steps; the message names file, row and column.
    """
    return [_labelled(row, location, f"{key}: {location}") for location, row in locate_rows(files, key=key)]


def load_preferences(files: Sequence[str], *, key: str) -> list[Pair] | list[LabelledSteps]:
    """Read and check all rows, pairs or labelled steps, as the columns of the first row have it.

    Takes the arguments of `load_pairs`, and raises what it raises.
    """
    _, first = next(iter(locate_rows(files, key=key)))
    return load_steps(files, key=key) if "completions" in first else load_pairs(files, key=key)


def _pair(row: dict[str, Any], location: str, where: str) -> Pair:
    check_text_only(row, where)
    chosen, rejected = (
        checked_messages(column_of(row, name, where), f"{where}: {name}", "assistant")
        for name in ("chosen", "rejected")
    )
    if chosen == rejected:
        raise DataError(f"{where}: chosen and rejected are the same, so neither is preferred; leave out the row")
    if row.get("prompt") is not None:
        prompt = checked_messages(row["prompt"], f"{where}: prompt")
    else:
        prompt = _common_start(row, chosen, rejected, where)
    chosen, rejected = (_without(prompt, answer) for answer in (chosen, rejected))
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
    """The messages with which two whole conversations begin."""
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


def _without(prompt: Messages, answer: Messages) -> Messages:
    """An answer's own messages: those after the prompt's, if it begins with them."""
    return answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer


def _labelled(row: dict[str, Any], location: str, where: str) -> LabelledSteps:
    check_text_only(row, where)
    prompt = checked_messages(column_of(row, "prompt", where), f"{where}: prompt")
    steps, labels = (column_of(row, name, where) for name in ("completions", "labels"))
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step.strip() for step in steps):
        raise DataError(f"{where}: completions must be a list of texts, one for each step, got {shown(steps)}")
    if not isinstance(labels, list) or len(labels) != len(steps) or any(label not in (0, 1) for label in labels):
        raise DataError(
            f"{where}: labels must be a list of true and false (or 1 and 0), one for each of the {len(steps)} "
            f"completions, got {shown(labels)}"
        )
    return LabelledSteps(location, prompt, steps, [bool(label) for label in labels])
