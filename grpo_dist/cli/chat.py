"""A chat with a model on a terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import zip_longest

from grpo_dist.terminal import printable, show

HELP = "an empty line ends the chat; /new begins another conversation; /take 2 goes on from the second answer"
NARROWEST = 24  # columns of text beside each other


class Chat:
    """A conversation that goes on, with several answers side by side if several are sampled.

    Args:
        answer: from the messages so far to the answers; the first one becomes part of the conversation.
        name: of the model.
    """

    def __init__(self, answer: Callable[[list[dict[str, str]]], Awaitable[list[str]]], name: str) -> None:
        self._answer, self._name = answer, name
        self.messages: list[dict[str, str]] = []
        self._answers: list[str] = []

    async def run(self) -> None:
        """Ask the user for messages until there is none."""
        show(f"chat with {self._name}: {HELP}\n")
        while line := _line():  # nothing else has to go on meanwhile
            await self.take(line)

    async def take(self, line: str) -> None:
        """One line of the user: a command, or a message that is answered."""
        command, _, rest = line.partition(" ")
        if command == "/new":
            self.messages, self._answers = [], []
        elif command == "/take" and rest.isdecimal() and 1 <= int(rest) <= len(self._answers):
            self.messages[-1] = {"role": "assistant", "content": self._answers[int(rest) - 1]}
        elif command.startswith("/"):
            show(HELP + "\n")
        else:
            asked = [*self.messages, {"role": "user", "content": line}]
            self._answers = await self._answer(asked)
            self.messages = [*asked, {"role": "assistant", "content": self._answers[0]}]
            show("\n".join(side_by_side(self._answers, shutil.get_terminal_size().columns)) + "\n")


def side_by_side(texts: Sequence[str], width: int) -> Iterator[str]:
    """Texts in columns, as many beside each other as have room.

    Args:
        texts: the texts.
        width: of the terminal, in characters.
    """
    texts = [printable(text) for text in texts]
    if len(texts) == 1:
        yield texts[0]
        return
    count = max(1, min(len(texts), width // (NARROWEST + 2)))
    column = width // count - 2
    for start in range(0, len(texts), count):
        parts = [
            [
                f"[{start + i + 1}]",
                *(line for part in text.splitlines() for line in textwrap.wrap(part, column) or [""]),
            ]
            for i, text in enumerate(texts[start : start + count])
        ]
        for lines in zip_longest(*parts, fillvalue=""):
            yield "  ".join(line.ljust(column) for line in lines).rstrip()


def _line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
