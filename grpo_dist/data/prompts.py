"""Prompts: rows in verl's schema, or in another one.

One row: `data_source` (str), `prompt` (list of chat messages, or a plain string: one user message),
`reward_model` = {"ground_truth": ...}, `extra_info` (dict, optional), and any others. What verl's schema misses is
looked for: the prompt in a column `messages`, `question` or `problem`, the ground truth in `answer`, `solution` or
`ground_truth`, and then in the last turn of `messages`, if that is the assistant's. The keys of `data` name other
columns. Where two columns could be meant, the row is refused. Where a model scores, `data_source` and `reward_model`
may be missing, as in TRL's tldr rows.

Every row is checked when it is read, so that a broken row is named by file and row before anything expensive starts.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from grpo_dist.data.files import locate_rows, shown, source_name
from grpo_dist.data.images import KEY as IMAGE_KEY
from grpo_dist.data.images import Images, take_images, text_with_marks
from grpo_dist.errors import DataError
from grpo_dist.plugins.names import AGENT_LOOPS

PROMPT, MESSAGES, SOURCE = "prompt", "messages", "data_source"
PROMPTS = (MESSAGES, "question", "problem")  # where there is no column `prompt`
ANSWERS = ("answer", "solution", "ground_truth")  # where there is no reward_model.ground_truth
PROMPT_KEY, ANSWER_KEY, SOURCE_KEY = "data.prompt_key", "data.answer_key", "data.data_source"
TEMPLATE_KEY, EXCLUDE_KEY = "data.prompt_template", "data.exclude_rows"
# Columns with a place of their own among a reward function's arguments.
KNOWN = {PROMPT, SOURCE, "reward_model", "extra_info"}
MOST_COLUMN_TEXT = 300  # characters of a row's column names, in messages

# Columns of verl's and TRL's rows with what the policy would have to see or hear: refused.
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
AGENT_NAME = "agent_name"
# Columns of theirs, and entries of extra_info, that would change what the policy is asked, and why they are not read:
# said at the start of a run.
_ALL_ALIKE = "all rows are rendered with data.apply_chat_template_kwargs"
_ALL_TOOLS = "all rows have the tools of rollout.agent.agent_kwargs, or of data.apply_chat_template_kwargs"
_NO_ARGUMENTS = (
    "tools get nothing of a row; an environment of yours (agent_kwargs.environment) or agent loop gets extra_info"
)
UNREAD = {
    AGENT_NAME: "all rows run rollout.agent.default_agent_loop",
    "tools": _ALL_TOOLS,
    "chat_template_kwargs": _ALL_ALIKE,
    "enable_thinking": _ALL_ALIKE,
    "extra_info.tools_kwargs": _NO_ARGUMENTS,
    "extra_info.need_tools_kwargs": _NO_ARGUMENTS,
    "extra_info.tool_selection": _ALL_TOOLS,
    "extra_info.interaction_kwargs": "nobody answers the policy but an environment or agent loop of yours",
}

_FIELD = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Columns:
    """The way in which rows are read: what the keys of `data` say, and what the reward function asks for.

    Attributes:
        needs_source: whether a row without a data source is refused; else its file's name takes the place.
        needed: columns, or entries of extra_info, that the reward function cannot do without.
        kept: other columns that it takes; None: all.
    """

    prompt_key: str = PROMPT
    reward_fn_key: str = SOURCE
    answer_key: str | None = None
    prompt_template: str | None = None
    image_key: str | None = None
    data_source: str | None = None
    needs_ground_truth: bool = True
    needs_source: bool = True
    needed: Collection[str] = ()
    kept: Collection[str] | None = ()

    def source(self, row: Row, location: str, where: str, taken: dict[str, str]) -> str:
        """Return the data source.

        What is not in the row by the name that the config gives it is noted in `taken`, with the config key and the
        value that say the same; so do `prompt` and `answer`.
        """
        value = row.get(self.reward_fn_key)
        if value is None and self.data_source is not None:
            value = self.data_source
        elif value is None and not self.needs_source:
            value = taken[SOURCE_KEY] = source_name(location)
        elif value is None:
            setting = f" (data.reward_fn_key={self.reward_fn_key})"
            remedy = f"; name it with {SOURCE_KEY}=, or set custom_reward_function.path, which needs none"
            raise missing(row, self.reward_fn_key, where, setting, remedy)
        if not isinstance(value, str) or not value:
            raise DataError(f"{where}: {self.reward_fn_key} must be a non-empty string, got {shown(value)}")
        return value

    def prompt(self, row: Row, where: str, taken: dict[str, str]) -> tuple[str, Any]:
        """Return the name and the value of what the prompt is made of."""
        if self.prompt_template is not None:
            return TEMPLATE_KEY, filled(self.prompt_template, row, where)
        name = self.prompt_key
        if row.get(name) is None and name == PROMPT:
            present = _present(row, PROMPTS)
            if len(present) > 1:
                raise _ambiguous(present, "prompt", PROMPT_KEY, where)
            name = taken[PROMPT_KEY] = present[0] if present else name
        return name, column_of(row, name, where, setting=f" ({PROMPT_KEY}={name})")

    def answer(self, row: Row, turn: str | None, where: str, taken: dict[str, str]) -> tuple[str, Any]:
        """Return the name and the value of the ground truth; None where there is none and none is needed.

        Args:
            turn: the last turn of its messages, if that is the assistant's.
            taken: see `source`.
        """
        if self.answer_key is not None:
            setting = f" ({ANSWER_KEY}={self.answer_key})"
            if self.needs_ground_truth:
                return self.answer_key, column_of(row, self.answer_key, where, setting=setting)
            return self.answer_key, row.get(self.answer_key)
        model = row.get("reward_model")
        if model is not None and not isinstance(model, dict):
            raise DataError(f"{where}: reward_model must be {{'ground_truth': ...}}, got {shown(model)}")
        if model and model.get("ground_truth") is not None:
            return "reward_model.ground_truth", model["ground_truth"]
        present = _present(row, ANSWERS)
        if len(present) > 1 and self.needs_ground_truth:
            raise _ambiguous(present, "ground truth", ANSWER_KEY, where)
        if len(present) == 1:
            taken[ANSWER_KEY] = present[0]
            return present[0], row[present[0]]
        if turn is not None and not present:
            taken[ANSWER_KEY] = f"{MESSAGES}[-1]"
            return f"{MESSAGES}[-1]", turn
        if self.needs_ground_truth and model is not None:
            raise DataError(f"{where}: reward_model must be {{'ground_truth': ...}}, got {shown(model)}")
        if self.needs_ground_truth:
            others = f" (nor {', '.join(map(repr, ANSWERS[1:]))} or 'reward_model')"
            remedy = (
                f". Add one of them to this row, or name the column that has the answer: {ANSWER_KEY}=COLUMN. If the "
                "reward function needs no answer, write it with ground_truth=None"
            )
            raise missing(row, ANSWERS[0], where, others, remedy)
        return ANSWER_KEY, None

    def others(self, row: Row, extra_info: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the other columns that the reward function takes."""
        for name in self.needed:
            if name not in row and name not in extra_info:
                remedy = "; the reward function takes it: add the column, or give the argument a default value"
                raise missing(row, name, where, remedy=remedy)
        return {
            name: value for name, value in row.items() if name not in KNOWN and (self.kept is None or name in self.kept)
        }


def check_text_only(row: Row, where: str, read: Collection[str] = (), *, may_see: bool = False) -> None:
    """Check that a row has no images, films or sounds, which no model gets, but in columns that are `read`.

    `may_see` is whether `data.image_key` may name a column of images.
    """
    for name in MEDIA:
        if row.get(name) and name not in read:
            sees = f"set {IMAGE_KEY}={name} if the model takes images, or " if may_see and name in MEDIA[:2] else ""
            raise DataError(
                f"{where}: {name} has {shown(row[name])}, and the model reads text only; {sees}leave out the column if "
                "the prompt can be answered without it, or else the row"
            )


def unread(row: Row) -> tuple[str, ...]:
    """Return the names in `UNREAD` that a row has something for; `agent_name` with its value."""
    info = row.get("extra_info")
    names = []
    for name in UNREAD:
        place, _, entry = name.rpartition(".")
        if value := (info if isinstance(info, dict) else {}).get(entry) if place else row.get(name):
            names.append(f"{name}={value}" if name == AGENT_NAME else name)
    return tuple(names)


def unread_notes(
    key: str, rows: Sequence[Any], agent_loop: str | None = None, *, has_environment: bool = False
) -> Iterator[str]:
    """Yield notes for the user on what rows have and nobody reads.

    Args:
        rows: checked rows, which have it as `unread`.
        agent_loop: the run's; one of the user's own reads extra_info. None: there is none.
        has_environment: whether a class of environments reads it.
    """
    own = has_environment or (agent_loop is not None and agent_loop not in AGENT_LOOPS[:2])  # external tasks get it too
    counts = Counter(name for row in rows for name in row.unread)
    counts.pop(f"{AGENT_NAME}={agent_loop}", None)
    for name, count in counts.items():
        if not (own and name.startswith("extra_info.")):
            yield f"{key}: {name} ({count} of {len(rows)} rows) is not read: {UNREAD[name.partition('=')[0]]}"


def filled(template: str, row: Row, where: str) -> str:
    r"""Return a template with the row's values.

    `{column}` is replaced, `{{column}}` becomes {column}, and `\n`, as it comes from the command line, is a line break.
    Other braces stay as they are.
    """

    def value_of(match: re.Match[str]) -> str:
        literal, name = match.groups()
        if literal is not None:
            return f"{{{literal}}}"
        value = column_of(row, name, where, setting=f" ({TEMPLATE_KEY} names it)")
        if not isinstance(value, str | int | float):
            raise DataError(f"{where}: {TEMPLATE_KEY} names {name}, which must be text or a number, got {shown(value)}")
        return str(value)

    if not any(match[2] for match in _FIELD.finditer(template)):
        raise DataError(
            f"{TEMPLATE_KEY}={template}: names no column, so all prompts would be the same; write one as {{question}}"
        )
    return _FIELD.sub(value_of, template.replace("\\n", "\n"))


def column_of(row: Row, name: str, where: str, *, setting: str = "") -> Any:
    """Return the value of a row's column."""
    if row.get(name) is None:
        raise missing(row, name, where, setting)
    return row[name]


def messages_in(row: Row, name: str, where: str, role: str = "user") -> list[dict[str, Any]]:
    """Return the chat messages in a row's column; see `checked_messages`."""
    return checked_messages(column_of(row, name, where), f"{where}: {name}", role)


def missing(row: Row, name: str, where: str, setting: str = "", remedy: str = "") -> DataError:
    """Return the error that a row has no such column, or nothing in it."""
    columns = ", ".join(map(str, row))[:MOST_COLUMN_TEXT] or "nothing"
    return DataError(f"{where}: no column {name!r}{setting}; the row has {columns}{remedy}")


def _present(row: Row, names: Collection[str]) -> list[str]:
    return [name for name in names if row.get(name) is not None]


def _ambiguous(columns: list[str], what: str, key: str, where: str) -> DataError:
    ways = " or ".join(f"{key}={name}" for name in columns)
    return DataError(f"{where}: the {what} may be in the columns {', '.join(columns)}; say which: {ways}")


# Data source of rows without one, where a model scores.
NO_DATA_SOURCE = "data"
# A text that is no prompt, but what JSON makes of one.
_MESSAGES_AS_JSON = re.compile(r'\s*\[\s*\{\s*"(role|content)"\s*:')


@dataclass(frozen=True)
class Prompt:
    """One checked row.

    Attributes:
        index: position among all rows of the files, from 0, whatever `max_samples` and shuffling choose.
        data_source: name of the data set; picks the built-in scorer and groups validation metrics.
        messages: chat messages, each with "role" and "content" (str).
        ground_truth: what the scorer compares with, as it stands in the file; None where a row has none and needs none.
        extra_info: anything else for the scorer; {} where the row has none.
        location: file and row, for messages, such as "train.jsonl, line 3".
        columns: the row's other columns, as far as the reward function takes them.
        is_text: whether the row's prompt is a text, which became one message of the user.
        taken: what was found without being named, as config keys and the values that say the same.
        unread: what the row has that would change what the policy is asked, and is not read; see `columns.UNREAD`.
        is_plain: whether it is asked as it stands, without the chat template.
        images: a file's bytes, or its path, for each `<image>` in the messages.
        has_added_system: whether the first message is one that `add_system_prompt` has put there.
    """

    index: int
    data_source: str
    messages: list[dict[str, Any]]
    ground_truth: Any
    extra_info: dict[str, Any]
    location: str
    columns: dict[str, Any] = field(default_factory=dict)
    is_text: bool = False
    taken: Mapping[str, str] = field(default_factory=dict)
    unread: Sequence[str] = ()
    is_plain: bool = False
    has_added_system: bool = False
    images: tuple[bytes | str, ...] = ()

    @property
    def digest(self) -> str:
        """Name the row by what it asks and its ground truth, as they were read; equal rows have one name."""
        asked = json.dumps([self.messages[self.has_added_system :], self.ground_truth], default=str).encode()
        images = (image if isinstance(image, bytes) else image.encode() for image in self.images)
        return hashlib.blake2b(b"".join([asked, *images]), digest_size=16).hexdigest()


def load_prompts(
    files: Sequence[str],
    *,
    key: str,
    max_samples: int,
    shuffle_seed: int | None,
    **columns: Any,
) -> list[Prompt]:
    """Read and check all rows, then choose `max_samples` of them.

    Args:
        files: entries in the forms of config/data_files.py.
        max_samples: how many rows to keep; -1, or more than there are: all.
        shuffle_seed: keep a random subset drawn with this seed, in file order; None: keep the first rows.
        **columns: the fields of `columns.Columns`, such as prompt_key.

    Raises:
        DataError: a file cannot be read, or a row breaks the schema (the message names file and row).
    """
    read = Columns(**columns)
    located = locate_rows(files, key=key)
    prompts = [checked_prompt(row, index, location, key, read) for index, (location, row) in enumerate(located)]
    if max_samples < 0 or max_samples >= len(prompts):
        return prompts
    if shuffle_seed is None:
        return prompts[:max_samples]
    chosen = np.random.default_rng(shuffle_seed).choice(len(prompts), size=max_samples, replace=False)
    return [prompts[i] for i in sorted(chosen)]


def sifted(prompts: Sequence[Prompt], file: str, key: str, notes: list[str]) -> list[Prompt]:
    """Return the rows that a file of `data.exclude_rows` does not list, and note how many it does; 0: a DataError."""
    listed = {column_of(row, "row", f"{EXCLUDE_KEY}: {where}") for where, row in locate_rows([file], key=EXCLUDE_KEY)}
    kept = [prompt for prompt in prompts if prompt.digest not in listed]
    if len(kept) == len(prompts):
        raise DataError(
            f"{EXCLUDE_KEY}={file}: none of its {len(listed)} rows, by prompt and truth, is among the {len(prompts)} "
            f"rows of {key}; list them anew with grpo-dist audit, or set it to null"
        )
    notes.append(f"{key}: {len(prompts) - len(kept)} of {len(prompts)} rows are left out ({EXCLUDE_KEY}={file})")
    return kept


def add_system_prompt(prompts: Sequence[Prompt], text: str) -> tuple[list[Prompt], int]:
    """Put a system message before the prompts that have none; how many have one of their own, which they keep."""
    message, num_kept, changed = {"role": "system", "content": text}, 0, []
    for prompt in prompts:
        if any(turn["role"] == "system" for turn in prompt.messages):
            num_kept += 1
            changed.append(prompt)
        else:
            changed.append(replace(prompt, messages=[dict(message), *prompt.messages], has_added_system=True))
    return changed, num_kept


def checked_prompt(row: dict[str, Any], index: int, location: str, key: str, columns: Columns) -> Prompt:
    """Check one row."""
    where, taken = f"{key}: {location}", dict[str, str]()
    seen = columns.image_key
    check_text_only(row, where, [*(columns.kept or ()), *([seen] if seen else [])], may_see=seen is None)
    data_source = columns.source(row, location, where, taken)
    extra_info = row.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise DataError(f"{where}: extra_info must be an object, got {shown(extra_info)}")
    name, value = columns.prompt(row, where, taken)
    found: list[Any] | None = None if seen is None else []
    messages, turn = checked_messages(value, f"{where}: {name}", images=found), None
    if name == MESSAGES and messages[-1]["role"] == "assistant":  # the answer, which the policy is to find
        turn = messages.pop()["content"]
        if not messages:
            raise DataError(f"{where}: {name} has nothing but an answer of the assistant; put the question before it")
    if messages[-1]["role"] == "assistant" and messages[-1].get("tool_calls"):  # other begun turns are gone on from
        raise DataError(
            f"{where}: {name} ends in a call of a tool; put the tool's answer behind it, or leave out the call"
        )
    truth_name, truth = columns.answer(row, turn, where, taken)
    if isinstance(truth, float) and not math.isfinite(truth):  # a table's "nothing is there", which nothing equals
        raise DataError(f"{where}: {truth_name} is {truth}; write a finite number, or text, or drop the row")
    info, others = extra_info or {}, columns.others(row, extra_info or {}, where)
    images = () if seen is None else take_images(messages, found or (), row.get(seen), seen, where)
    others |= {seen: Images(images, where)} if seen in others else {}
    is_text = isinstance(value, str)
    checked = Prompt(index, data_source, messages, truth, info, location, others, is_text, taken, unread(row))
    return replace(checked, images=images) if images else checked


def checked_messages(
    value: Any, where: str, role: str = "user", images: list[Any] | None = None
) -> list[dict[str, Any]]:
    """Return chat messages, a text as one of `role`; a DataError that begins with `where` if they are none.

    Images in them go to `images`; None: there may be none.
    """
    if isinstance(value, str):
        if _MESSAGES_AS_JSON.match(value):
            raise DataError(f"{where} is the JSON text of a list of messages; write the list itself: {shown(value)}")
        value = [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{where} must be a non-empty list of messages, or a string, got {shown(value)}")
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: message {number} must have a role, got {shown(message)}")
        content = text_with_marks(message.get("content"), images)
        if content is None and message.get("tool_calls"):
            content = ""
        if not isinstance(content, str):
            raise DataError(f"{where}: the content of message {number} must be text, got {shown(content)}")
        messages.append(_without_nulls(message) | {"content": content})
    if not any(message["content"].strip() or message.get("tool_calls") for message in messages):
        raise DataError(f"{where} is empty")
    return messages


def _without_nulls(value: Any) -> Any:
    """Return a message, or a part of one, without the fields that are null, at any depth.

    Parquet and `datasets` give every object of a column the union of all fields, such as the arguments of all tools:
    null stands for "not there". Nulls among the entries of a list say something, and stay.
    """
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    return value
