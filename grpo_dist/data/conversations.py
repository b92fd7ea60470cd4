"""Messages to text and token ids: what prompts, training rows and reward models have in common.

A conversation is rendered whole by the tokenizer's chat template, without a generation prompt. A tokenizer without one
(of a base model) gets the contents of the prompt's messages joined by newlines, the answer's right behind them, and the
end-of-sequence token, as such a model's policy. A reward model is trained on what it reads when it scores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from grpo_dist.assets.model_folder import continued
from grpo_dist.errors import DataError
from grpo_dist.redact import redact

Messages = Sequence[Mapping[str, Any]]
Tokens = TypeVar("Tokens", list[int], np.ndarray)

INPUT_KEY = "reward_model.model.input_tokenizer"
KWARGS_KEY = "data.apply_chat_template_kwargs"
MOST_PROBLEM_TEXT = 500  # characters of what a chat template says
_ANSWER = "ANSWER"


def render_conversation(
    tokenizer: Any,
    prompt: Messages,
    answer: Messages,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    may_go_on: bool = True,
) -> tuple[str, bool]:
    """Return the text of a conversation, and whether the tokenizer's own special tokens are still to come.

    Args:
        may_go_on: an answer goes on from the turn that a prompt has begun, as a policy does; False: has its own.

    Raises:
        Exception: of any kind, by the chat template.
    """
    if tokenizer.chat_template:
        whole = continued(prompt, answer) if may_go_on else [*prompt, *answer]
        return tokenizer.apply_chat_template(whole, tokenize=False, **(template_kwargs or {})), False
    parts = ("\n".join(message["content"] for message in messages) for messages in (prompt, answer))
    return "".join(parts), True


def check_template_kwargs(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> None:
    """Check that there is a chat template, if there are variables for it."""
    if template_kwargs and not tokenizer.chat_template:
        raise DataError(
            f"{KWARGS_KEY}={redact(template_kwargs)}: the tokenizer has no chat template to give them to; leave it "
            "empty"
        )


def open_text_ids(text: str, tokenizer: Any) -> list[int]:
    """Return the token ids of a text that a base model goes on from: opened by its tokenizer, but not closed."""
    token_ids = list(tokenizer(text)["input_ids"])
    if token_ids and token_ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        token_ids.pop()  # some tokenizers close every text; a response would then start after the end
    return token_ids


def encode_conversation(text: str, special: bool, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids, int32, and where fast tokenizers know it, at which character of the text each token ends."""
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=tokenizer.is_fast)
    token_ids = list(encoded["input_ids"])
    ends = [end for _, end in encoded.get("offset_mapping", ())]
    if special and tokenizer.eos_token_id is not None and token_ids[-1:] != [tokenizer.eos_token_id]:
        token_ids.append(tokenizer.eos_token_id)
        ends.append(len(text))
    # special tokens that are not in the text have no place; they are where the token before them ends
    return np.array(token_ids, dtype=np.int32), np.maximum.accumulate(np.array(ends, dtype=np.int64))


def padding_id(config: Any) -> int | None:
    """Return the padding token that a model's config, as transformers reads it, names; not that of the tokenizer."""
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


def template_problem(error: Exception) -> str:
    """Return what a chat template said, for a message."""
    return f"{type(error).__name__}: {error}"[:MOST_PROBLEM_TEXT]


@contextlib.contextmanager
def _template_errors(refusal: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # templates raise jinja2 errors of their own making
        raise DataError(f"{refusal}: {template_problem(error)}; {remedy}") from error


def row_errors(
    location: str, template_kwargs: Mapping[str, Any] | None = None
) -> contextlib.AbstractContextManager[None]:
    """Turn what the trained model's chat template raises in the block into a DataError that names the row.

    `template_kwargs` are data.apply_chat_template_kwargs; None: the command has no such key.
    """
    variables = f" or {KWARGS_KEY}={redact(template_kwargs)}" if template_kwargs else ""
    return _template_errors(
        f"{location}: the model's chat template refuses the row", f"mend the row's messages{variables}"
    )


def reward_model_errors(setting: str, messages: Messages) -> contextlib.AbstractContextManager[None]:
    """Turn what a reward model's chat template raises in the block into a DataError that names the model."""
    roles = ", ".join([*(str(message["role"]) for message in messages), "assistant"])
    return _template_errors(
        f"{setting}: its chat template refuses a conversation of {roles}",
        "change the messages of the rows (data.system_prompt), or use another reward model",
    )


class ConversationRenderer:
    """From a prompt and the policy's response to the tokens that a reward model reads.

    With an input tokenizer, the policy's, the response is decoded without special tokens, as a reward function gets it,
    and the conversation is rendered. Without one the reward model has the same tokens: the policy's are taken as they
    are, and closed with what the chat template writes behind an answer.
    """

    def __init__(self, tokenizer: Any, setting: str, input_tokenizer: Any = None) -> None:
        self.tokenizer, self.setting, self.input_tokenizer = tokenizer, setting, input_tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self.ends = {*tokenizer.all_special_ids, *(token_id for token_id, token in added if token.special)}
        self.closing = self._closing() if input_tokenizer is None else []

    def __call__(self, messages: Messages, prompt: list[int], response: list[int]) -> list[int]:
        """Return the token ids of the whole conversation; `prompt` is read without an input tokenizer.

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
        """Return the tokens that the chat template writes behind an answer; without one the end of sequence."""
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
        with reward_model_errors(self.setting, messages):
            return render_conversation(self.tokenizer, messages, [{"role": "assistant", "content": answer}])
