"""Conversations as a reward model reads them: the same way when it is trained and when it scores.

A conversation is rendered whole by the tokenizer's chat template, without a generation prompt. A tokenizer without one
(of a base model) gets the contents of the prompt's messages joined by newlines, the answer's right behind them, and the
end-of-sequence token: what such a model's policy reads and writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from grpo_dist.data.tokenize import MOST_PROBLEM_TEXT
from grpo_dist.errors import DataError

Messages = Sequence[Mapping[str, Any]]
Tokens = TypeVar("Tokens", list[int], np.ndarray)

INPUT_KEY = "reward_model.model.input_tokenizer"
_ANSWER = "ANSWER"


def render_conversation(
    tokenizer: Any,
    prompt: Messages,
    answer: Messages,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    may_go_on: bool = True,
) -> tuple[str, bool]:
    """The text of a conversation, and whether the tokenizer's own special tokens are still to come.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: the messages of the prompt.
        answer: those that answer it.
        template_kwargs: variables of the chat template.
        may_go_on: whether an answer goes on from the turn that a prompt has begun, as a policy does; False: it is a
            turn of its own.

    Raises:
        Exception: of any kind, by the chat template.
    """
    if tokenizer.chat_template:
        whole = _joined(prompt, answer) if may_go_on else [*prompt, *answer]
        return tokenizer.apply_chat_template(whole, tokenize=False, **(template_kwargs or {})), False
    parts = ("\n".join(message["content"] for message in messages) for messages in (prompt, answer))
    return "".join(parts), True


def _joined(prompt: Messages, answer: Messages) -> list[Mapping[str, Any]]:
    """A conversation in which the answer goes on from the prompt's last turn, if both are the assistant's."""
    if not (prompt and answer and prompt[-1]["role"] == answer[0]["role"] == "assistant"):
        return [*prompt, *answer]
    turn = {**prompt[-1], **answer[0], "content": prompt[-1]["content"] + answer[0]["content"]}
    return [*prompt[:-1], turn, *answer[1:]]


def encode_conversation(text: str, special: bool, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, int32, and where fast tokenizers know it, at which character of the text each token ends."""
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=tokenizer.is_fast)
    token_ids = list(encoded["input_ids"])
    ends = [end for _, end in encoded.get("offset_mapping", ())]
    if special and tokenizer.eos_token_id is not None and token_ids[-1:] != [tokenizer.eos_token_id]:
        token_ids.append(tokenizer.eos_token_id)
        ends.append(len(text))
    # special tokens that are not in the text have no place; they are where the token before them ends
    return np.array(token_ids, dtype=np.int32), np.maximum.accumulate(np.array(ends, dtype=np.int64))


def padding_id(config: Any) -> int | None:
    """Return the padding token that a model's config.json names; the tokenizer's own does not count for a classifier.

    Args:
        config: as transformers reads it, with the family's default.
    """
    return config.get_text_config().pad_token_id


def without_padding(token_ids: Tokens, padding_id: int | None) -> Tokens:
    """Return a conversation up to the token at which it is judged: the last one that is not the padding token.

    That is where transformers' sequence classifiers read a score, so scoring, retraining and the training of a reward
    model all cut a conversation here. It matters where a conversation ends in the padding token: in models whose
    padding token is the end of sequence. A token is left where there is nothing else.
    """
    length = len(token_ids)
    while length > 1 and token_ids[length - 1] == padding_id:
        length -= 1
    return token_ids[:length]


class ConversationRenderer:
    """From a prompt and the policy's response to the tokens that a reward model reads.

    With an input tokenizer the response is decoded without special tokens, as a reward function gets it, and the
    conversation is rendered. Without one the policy's tokens are taken as they are, and closed with what the chat
    template writes behind an answer.

    Args:
        tokenizer: of the reward model.
        setting: the key and value that name the reward model, for messages.
        input_tokenizer: of the policy; None: the reward model has the same tokens.

    Raises:
        DataError: the chat template refuses a conversation, or how it closes an answer cannot be told.
    """

    def __init__(self, tokenizer: Any, setting: str, input_tokenizer: Any = None) -> None:
        self.tokenizer, self.setting, self.input_tokenizer = tokenizer, setting, input_tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self.ends = {*tokenizer.all_special_ids, *(token_id for token_id, token in added if token.special)}
        self.closing = self._closing() if input_tokenizer is None else []

    def __call__(self, messages: Messages, prompt: list[int], response: list[int]) -> list[int]:
        """The token ids of the whole conversation.

        Args:
            messages: those of the prompt.
            prompt: the prompt's token ids; read without an input tokenizer.
            response: the response's token ids.

        Raises:
            DataError: the chat template refuses the conversation, or it has no tokens.
        """
        if self.input_tokenizer is None:
            while response and response[-1] in self.ends:
                response = response[:-1]
            return [*prompt, *response, *self.closing]
        text, special = self._text(messages, self.input_tokenizer.decode(response, skip_special_tokens=True))
        token_ids, _ = encode_conversation(text, special, self.tokenizer)
        if not len(token_ids):
            raise DataError(f"{self.setting}: a conversation has no tokens in its tokenizer: {text!r}")
        return token_ids.tolist()

    def _closing(self) -> list[int]:
        """The tokens that the chat template writes behind an answer; without one the end of sequence."""
        text, special = self._text([{"role": "user", "content": "PROMPT"}], _ANSWER)
        if special:
            return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        token_ids, ends = encode_conversation(text, special, self.tokenizer)
        if _ANSWER not in text or len(ends) != len(token_ids):
            raise DataError(
                f"{self.setting}: how its chat template closes an answer cannot be told, so the policy's tokens cannot "
                f"be closed in the same way; leave out {INPUT_KEY}=null, and conversations are rendered whole"
            )
        return token_ids[ends > text.rindex(_ANSWER) + len(_ANSWER)].tolist()

    def _text(self, messages: Messages, answer: str) -> tuple[str, bool]:
        with reward_template_errors(self.setting, messages):
            return render_conversation(self.tokenizer, messages, [{"role": "assistant", "content": answer}])


@contextlib.contextmanager
def reward_template_errors(setting: str, messages: Messages) -> Iterator[None]:
    """Turn what the reward model's chat template raises in the block into an error that names the model.

    Args:
        setting: the key and value that name the reward model.
        messages: those before the answer.

    Raises:
        DataError: the template refuses the conversation.
    """
    try:
        yield
    except Exception as error:  # templates raise jinja2 errors of their own making
        roles = ", ".join([*(str(message["role"]) for message in messages), "assistant"])
        problem = f"{type(error).__name__}: {error}"[:MOST_PROBLEM_TEXT]
        raise DataError(
            f"{setting}: its chat template refuses a conversation of {roles}: {problem}; change the messages "
            "of the rows (data.system_prompt), or use another reward model"
        ) from error
