"""The steps of a response: where each one ends, and where a process reward model judges it.

It judges at the same places when it is trained and when it scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from grpo_dist.config.schema_roles import ProcessRewardConfig
from grpo_dist.data.conversations import (
    Messages,
    encode_conversation,
    render_conversation,
    reward_model_errors,
    without_padding,
)
from grpo_dist.errors import ConfigError, DataError

# The keys that name the tokens for bad and good of a causal LM that judges steps.
JUDGING_KEYS = ("reward_model.process.bad", "reward_model.process.good")
# Stands for the answer while a chat template is rendered, so that no template changes the text of the steps.
_PLACE = "ANSWER-7f3a"


@dataclass(frozen=True)
class StepForm:
    r"""The form in which the steps of an answer are written for the model that judges them.

    Attributes:
        separator: between two steps.
        token: text behind every step, the last one too, in place of the separator: a step is judged at its last
            character that is no white space. Math-Shepherd (arXiv 2312.08935) writes " ки\n", Qwen's process reward
            models "<extra_0>". None: a step is judged where the separator behind it ends, and the last one where the
            conversation is (`conversations.without_padding`).
    """

    separator: str = "\n"
    token: str | None = None

    def parts(self, steps: Sequence[str]) -> list[str]:
        """Return the texts whose sequence is the answer, one for each step."""
        plain = [step.removesuffix(self.separator) for step in steps]
        if self.token is not None:
            return [step + self.token for step in plain]
        return [step + self.separator for step in plain[:-1]] + list(steps[-1:])


def step_form(process: ProcessRewardConfig, separator: str) -> StepForm | None:
    """Return how a reward model reads steps between separators; None: it judges whole responses."""
    return StepForm(separator, process.step_tag) if process.enable else None


class StepTokens(NamedTuple):
    """A conversation whose answer has steps.

    Attributes:
        token_ids: (T,) int32.
        first: position of the answer's first token, at least 1.
        ends: (S,) int64 positions at which the S steps are judged; two steps may share one.
    """

    token_ids: np.ndarray
    first: int
    ends: np.ndarray


def step_tokens(
    tokenizer: Any, prompt: Messages, steps: Sequence[str], form: StepForm, padding_id: int | None
) -> StepTokens:
    """Render and encode a conversation whose answer has at least one step.

    Args:
        tokenizer: a fast transformers tokenizer, which tells where its tokens are in the text.
        prompt: the messages before the answer.
        steps: texts of the answer's steps, with or without the separator at their ends.

    Raises:
        Exception: of any kind, by the chat template; ValueError if it leaves out the answer.
    """
    parts = form.parts(steps)
    text, special = render_conversation(tokenizer, prompt, [{"role": "assistant", "content": _PLACE}])
    start = text.rfind(_PLACE)
    if start < 0:
        raise ValueError("the chat template leaves out the answer")
    text = text[:start] + "".join(parts) + text[start + len(_PLACE) :]
    token_ids, token_ends = encode_conversation(text, special, tokenizer)
    stops = start + np.cumsum([len(part) for part in parts])
    if form.token is not None:
        stops -= len(form.token) - len(form.token.rstrip())
    # of the tokens that share a character, the last one completes it
    ends = np.maximum(np.searchsorted(token_ends, stops, "left"), np.searchsorted(token_ends, stops, "right") - 1)
    first = int(np.searchsorted(token_ends, start, "right"))
    if form.token is None:
        ends[-1] = len(without_padding(token_ids, padding_id)) - 1
        first = min(first, ends[-1])  # an answer may be nothing but padding
    first = max(first, 1)
    return StepTokens(token_ids, first, np.maximum(ends, first))


def check_places(tokenizer: Any, where: str) -> None:
    """Check that a tokenizer tells where its tokens are in a text; `where` begins the message."""
    if not tokenizer.is_fast:
        raise DataError(
            f"{where}: steps are found by the places of tokens in the text, which this tokenizer "
            f"({type(tokenizer).__name__}) does not tell; use a model with a tokenizer.json"
        )


def split_steps(text: str, separator: str) -> list[str]:
    """Return the texts of a response's steps, without the separators: as many as `step_ends` finds ends.

    A step is the text up to a separator, or up to the end; white space alone is not a step. A reward function that
    judges steps returns `{"score": ..., "step_scores": [...]}` with one number for each step of its `solution_str`.
    """
    return [step for step in text.split(separator) if step.strip()]


def step_ends(token_texts: Sequence[str], separator: str) -> list[int]:
    """Return the position of each step's last token: the one that completes the separator, or the last one of all.

    Args:
        token_texts: the text of each token of a response ("" for special tokens).
        separator: between steps; may span tokens.

    Returns:
        One position for each step of the text, ascending. Steps that share a token share its position.
    """
    text = "".join(token_texts)
    ends, start, token, consumed = [], 0, 0, len(token_texts[0]) if token_texts else 0
    while start < len(text):
        behind = text.find(separator, start)
        stop = len(text) if behind < 0 else behind + len(separator)
        while consumed < stop:
            token += 1
            consumed += len(token_texts[token])
        if text[start : stop if behind < 0 else behind].strip():
            ends.append(token)
        start = stop
    if ends and not text[text.rfind(separator) + len(separator) :].strip() and separator in text:
        return ends  # what follows the last separator is no step of its own
    return [*ends[:-1], len(token_texts) - 1] if ends else []


def judging_token(tokenizer: Any, text: str, key: str) -> int:
    """Return the id of the one token that a text is; a ConfigError, with `key`, if it is none or several."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if len(token_ids) != 1:
        raise ConfigError(
            f"{key}={text!r}: is {len(token_ids)} tokens for the reward model's tokenizer, and must be one; name the "
            "token that the model was trained to write behind a step"
        )
    return int(token_ids[0])


class StepRenderer:
    """From a prompt and the policy's response to the tokens that a process reward model reads.

    Args:
        form: how it reads steps; its separator is also what splits the response.
        input_tokenizer: of the policy; None: the reward model has the same tokens.
    """

    def __init__(
        self, tokenizer: Any, setting: str, form: StepForm, padding_id: int | None, input_tokenizer: Any = None
    ) -> None:
        check_places(tokenizer, setting)
        self.tokenizer, self.setting, self.form, self.padding_id = tokenizer, setting, form, padding_id
        self.decoder = tokenizer if input_tokenizer is None else input_tokenizer

    def __call__(self, messages: Messages, response: Sequence[int]) -> tuple[StepTokens, int]:
        """Return the conversation's tokens, and the number of the response's steps.

        Without a step the response is rendered as an empty one, so that there is always something to judge.

        Raises:
            DataError: the chat template refuses the conversation.
        """
        steps = split_steps(self.decoder.decode(response, skip_special_tokens=True), self.form.separator)
        with reward_model_errors(self.setting, messages):
            return step_tokens(self.tokenizer, messages, steps or [""], self.form, self.padding_id), len(steps)
