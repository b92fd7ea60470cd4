"""`grpo-dist generate RUN_OR_MODEL`: answers to prompts of a file, of the command line, or in a chat on a terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, TextIO

from grpo_dist.assets import expanded
from grpo_dist.checks.own_code import started_scorer
from grpo_dist.cli.arguments import MODEL_ARGUMENTS, SAMPLING_ARGUMENTS, add_shared, check_output, command_parser
from grpo_dist.cli.trained import PROMPTS, Asker, TrainedModel, asking, find_trained, given_prompts, sampling_of
from grpo_dist.data.prompts import Prompt
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.plugins.names import REWARD_MODEL_FUNCTION
from grpo_dist.rewards import check_data_sources
from grpo_dist.rewards.scorer import Scorer
from grpo_dist.terminal import json_line, printable, show


def main(arguments: Sequence[str]) -> int:
    """Answer prompts."""
    what = "Answer prompts with a trained model, asked as its run asked it. Without prompts: a chat."
    parser = command_parser("generate", what)
    add_shared(parser, *MODEL_ARGUMENTS)
    parser.add_argument("--prompts", **PROMPTS)
    output = "write rows as JSON lines: prompt, responses, truncated, and scores if the rows have ground truths"
    parser.add_argument("--output", metavar="FILE", help=output)
    parser.add_argument("--n", type=int, default=1, help="answers to each prompt; %(default)s")
    add_shared(parser, *SAMPLING_ARGUMENTS)
    options = parser.parse_intermixed_args(arguments)
    check_output(options.output)
    model = find_trained(options.model, options.overrides, options.step, trust=options.trust)
    sampling = sampling_of(model, options)
    prompts, rows = _prompts(model, options.prompts)
    asyncio.run(_run(model, sampling, options, prompts, rows=rows))
    return 0


async def _run(
    model: TrainedModel, sampling: SamplingSettings, options: argparse.Namespace, prompts: list[Prompt], *, rows: bool
) -> None:
    async with asking(model, sampling, options.max_model_len) as asker:
        if not prompts:
            await Chat(asker.chat, model.name).run()
        elif options.output is not None:
            with expanded(options.output).open("x", encoding="utf-8") as file:
                await _write_rows(asker, prompts, file)
            show(f"{len(prompts)} prompts answered: {options.output}\n", sys.stderr)
        elif rows:
            await _write_rows(asker, prompts, sys.stdout)
        else:
            async for answers in asker.answers(prompts):
                show("".join(f"{text}\n" for text in answers.texts))


def _prompts(model: TrainedModel, given: Sequence[str]) -> tuple[list[Prompt], bool]:
    """Return the prompts, and whether they are rows of files; on a terminal none: a chat."""
    if not given and not sys.stdin.isatty():
        given = [line.strip() for line in sys.stdin if line.strip()]
        if not given:
            raise DataError("no prompts: nothing came on standard input; give --prompts FILE or --prompts TEXT")
    return given_prompts(model, given)


async def _write_rows(asker: Asker, prompts: Sequence[Prompt], file: TextIO) -> None:
    """Write a JSON line for each prompt, as soon as it and those before it are answered."""
    with _scorer(asker.model, prompts) as scorer:
        async for answers in asker.answers(prompts, scorer):
            row: dict[str, Any] = {"prompt": answers.prompt.messages, "responses": answers.texts}
            row["truncated"] = [response.truncated for response in answers.responses]
            if answers.prompt.ground_truth is not None:
                row["ground_truth"] = answers.prompt.ground_truth
            if scorer is not None:
                row["scores"] = answers.scores
            file.write(json_line(row))
            file.flush()


def _scorer(model: TrainedModel, prompts: Sequence[Prompt]) -> contextlib.AbstractContextManager[Scorer | None]:
    """Start the run's reward function for a block, if the rows have what it compares with."""
    config = model.config
    if config.reward_function == REWARD_MODEL_FUNCTION or all(prompt.ground_truth is None for prompt in prompts):
        return contextlib.nullcontext()
    if model.unscored:
        show(f"without scores: {model.unscored}\n", sys.stderr)
        return contextlib.nullcontext()
    if None in config.reward_paths:
        try:
            check_data_sources(prompt.data_source for prompt in prompts)
        except ConfigError as error:
            show(f"without scores: {error}\n", sys.stderr)
            return contextlib.nullcontext()
    return started_scorer(config)


HELP = "an empty line ends the chat; /new begins another conversation; /take 2 goes on from the second answer"
NARROWEST = 24  # columns of text beside each other


class Chat:
    """A conversation that goes on, with several answers side by side if several are sampled.

    Args:
        answer: from the messages so far to the answers; the first one becomes part of the conversation.
    """

    def __init__(self, answer: Callable[[list[dict[str, str]]], Awaitable[list[str]]], name: str) -> None:
        self._answer, self._name = answer, name
        self.messages: list[dict[str, str]] = []
        self._answers: list[str] = []

    async def run(self) -> None:
        """Ask the user for messages until there is none."""
        show(f"chat with {self._name}: {HELP}\n")
        with contextlib.suppress(EOFError):
            while line := input("> ").strip():  # nothing else has to go on meanwhile
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
    """Yield the lines of texts in columns, as many beside each other as have room in `width` characters."""
    texts = [printable(text) for text in texts]
    if len(texts) == 1:
        yield texts[0]
        return
    count = max(1, min(len(texts), width // (NARROWEST + 2)))
    column = width // count - 2
    for start in range(0, len(texts), count):
        parts = []
        for number, text in enumerate(texts[start : start + count], start + 1):
            wrapped = (line for part in text.splitlines() for line in textwrap.wrap(part, column) or [""])
            parts.append([f"[{number}]", *wrapped])
        for lines in zip_longest(*parts, fillvalue=""):
            yield "  ".join(line.ljust(column) for line in lines).rstrip()
