"""Rows of supervised fine-tuning, in verl's and TRL's forms:

    messages             a whole conversation, a list of chat messages; all messages of the assistant are trained
    prompt, completion   texts, or lists of messages; the assistant's messages of the completion are trained

As a prompt a text stands for one message of the user, as a completion for one of the assistant. Other columns are not
read. Every row is checked when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_dist.data.columns import check_text_only, column_of, unread
from grpo_dist.data.files import locate_rows, shown
from grpo_dist.data.prompts import checked_messages
from grpo_dist.errors import DataError

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Chat:
    """A conversation to learn from.

    Attributes:
        location: file and row.
        messages: chat messages, each with "role" and "content" (str).
        trained: positions in `messages` of those to learn, at least one and never 0, in order.
        unread: see `Prompt.unread`.
    """

    location: str
    messages: Messages
    trained: tuple[int, ...]
    unread: Sequence[str] = ()


def load_chats(files: Sequence[str], *, key: str, messages_key: str) -> list[Chat]:
    """Read and check all rows.

    Args:
        files: entries in the forms of config/data_files.py.
        key: the config key that names the files, for messages.
        messages_key: column of whole conversations.

    Raises:
        DataError: a file cannot be read, or a row is no conversation to learn from; the message names file, row and
            column.
    """
    return [_chat(row, location, f"{key}: {location}", messages_key) for location, row in locate_rows(files, key=key)]


def _chat(row: dict[str, Any], location: str, where: str, messages_key: str) -> Chat:
    check_text_only(row, where)
    if row.get(messages_key) is None and row.get("completion") is not None:
        prompt = checked_messages(column_of(row, "prompt", where), f"{where}: prompt")
        completion = checked_messages(row["completion"], f"{where}: completion", "assistant")
        if prompt[-1]["role"] == completion[0]["role"] == "assistant":
            raise DataError(
                f"{where}: prompt ends in a turn of the assistant that completion goes on with; write the whole turn "
                "in completion"
            )
        chat = Chat(location, prompt + completion, _of_assistant(completion, len(prompt)), unread(row))
        return _checked(chat, f"{where}: completion")
    setting = f" (data.messages_key={messages_key})"
    column = column_of(row, messages_key, where, setting=f"{setting}, nor 'prompt' and 'completion'")
    if row.get("completion") is not None:
        raise DataError(
            f"{where}: {messages_key}{setting} and completion both say what to train; leave out one of them"
        )
    if isinstance(column, str):
        raise DataError(f"{where}: {messages_key}{setting} must be a list of messages, got {shown(column)}")
    messages = checked_messages(column, f"{where}: {messages_key}")
    return _checked(Chat(location, messages, _of_assistant(messages, 0), unread(row)), f"{where}: {messages_key}")


def _of_assistant(messages: Messages, first: int) -> tuple[int, ...]:
    """Positions of the assistant's messages, of which the first one has number `first`."""
    return tuple(number for number, message in enumerate(messages, first) if message["role"] == "assistant")


def _checked(chat: Chat, where: str) -> Chat:
    if not chat.trained:
        roles = ", ".join(dict.fromkeys(message["role"] for message in chat.messages))
        raise DataError(
            f"{where} has no message of the role 'assistant', and only those are trained; the roles of the row are "
            f"{roles}; rename the one that answers, or leave out the row"
        )
    if chat.trained[0] == 0:
        raise DataError(
            f"{where} begins with a message of the assistant, which answers nothing; put a message of the user in "
            "front of it, or leave it out"
        )
    for number in chat.trained:
        turn = chat.messages[number]
        if not turn["content"].strip() and not turn.get("tool_calls"):
            raise DataError(
                f"{where}: message {number + 1} of the conversation, of the assistant, is empty; write what it should "
                "say or call, or leave out the row"
            )
    return chat
