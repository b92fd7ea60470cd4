"""Conversations to token ids, with marks on those to train: the rows of supervised fine-tuning.

A message is trained as a policy would say it: from the first character behind the generation prompt up to the
end-of-sequence token that closes it. What a chat template writes behind that token (Qwen's a newline) is read by the
messages that follow, and not trained; what stands behind the last trained message is left out.

Where each message begins and ends is found by rendering the conversation up to it, so that any chat template does that
does not change what it wrote before. In front of a trained message stands exactly what the policy reads in a rollout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from grpo_dist.data.conversations import check_template_kwargs, open_text_ids, render_conversation, row_errors
from grpo_dist.data.files import shown
from grpo_dist.data.training_rows import Conversation, TrainingExample, within_length
from grpo_dist.errors import DataError


def tokenize_chats(
    rows: Sequence[Conversation],
    tokenizer: Any,
    *,
    max_length: int,
    apply_chat_template_kwargs: Mapping[str, Any],
    end_ids: Collection[int],
) -> tuple[list[TrainingExample], list[Conversation]]:
    """Return the examples of checked rows, in order, and the rows that were left out.

    A tokenizer without a chat template (of a base model) gets the contents of the messages in front of the trained one
    joined by newlines, its content right behind them, and the end-of-sequence token; there can be one trained message.

    Args:
        max_length: most tokens of an example. Longer ones are left out whole, since a cut one is another answer.
        end_ids: tokens that end a response, besides the tokenizer's end of sequence; see `model_folder.end_token_ids`.

    Raises:
        DataError: a row cannot be rendered, or what to train of it cannot be told; all rows are too long; or there are
            variables for a chat template that is not there.
    """
    check_template_kwargs(tokenizer, apply_chat_template_kwargs)
    if not tokenizer.chat_template and tokenizer.eos_token is None:
        raise DataError(
            "the model's tokenizer has neither a chat template nor an end-of-sequence token, so a policy would not "
            "learn to stop; name the token in its tokenizer_config.json (eos_token)"
        )
    known = {*end_ids, tokenizer.eos_token_id} - {None}
    ends = sorted({tokenizer.decode([token_id]) for token_id in known} - {""})

    def tokenized(row: Conversation) -> TrainingExample:
        text, cuts = _rendered(row, tokenizer, apply_chat_template_kwargs, ends)
        pieces = _pieces(text, cuts, tokenizer, row.location)
        if not pieces[0]:
            raise DataError(f"{row.location}: there are no tokens in front of the first trained message; add a prompt")
        prompt, *rest = (np.array(piece, dtype=np.int32) for piece in pieces)
        trained = [np.full(len(piece), 1 - number % 2, dtype=np.int8) for number, piece in enumerate(rest)]
        return TrainingExample(row.location, prompt, [np.concatenate(rest)], [np.concatenate(trained)])

    return within_length(rows, tokenized, max_length=max_length)


def _rendered(
    row: Conversation, tokenizer: Any, template_kwargs: Mapping[str, Any], ends: Sequence[str]
) -> tuple[str, list[int]]:
    """Return the text up to the end of the last trained message, and where in it each of them begins and ends."""
    parts: list[tuple[str, str]] = []
    with row_errors(row.location, template_kwargs):
        for number in row.trained:
            before, message = row.messages[:number], row.messages[number : number + 1]
            head, _ = render_conversation(tokenizer, before, [], {**template_kwargs, "add_generation_prompt": True})
            whole, special = render_conversation(tokenizer, before, message, template_kwargs, may_go_on=False)
            parts.append((head, whole + tokenizer.eos_token if special else whole))
    text, cuts = parts[-1][1], [0]
    for number, (head, whole) in zip(row.trained, parts, strict=True):
        where = f"{row.location}: message {number + 1} of the conversation"
        if not whole.startswith(head):
            raise DataError(
                f"{where}: the model's chat template renders it without the generation prompt that a policy reads "
                f"({shown(head[-40:])}), so what to train cannot be told; see whether a variable of the template helps "
                "(data.apply_chat_template_kwargs), or use a model with another template"
            )
        stop = len(head) + _length(whole[len(head) :], ends, where)
        if whole[len(head) : stop].strip() in ends:
            raise DataError(
                f"{where}: the model's chat template leaves out all that it says or calls; leave out the row, or use a "
                "model whose template has it"
            )
        if not text.startswith(whole[:stop]) or len(head) < cuts[-1]:
            raise DataError(
                f"{where}: with the messages that follow it is rendered in another way, as by chat templates that drop "
                "earlier reasoning, or where there is no template; write each answer as a row of its own (prompt and "
                "completion)"
            )
        cuts += [len(head), stop]
    return text[: cuts[-1]], cuts


def _length(text: str, ends: Sequence[str], where: str) -> int:
    """Return how many characters a rendered message has up to its end of sequence, which is included."""
    lengths = [text.index(end) + len(end) for end in ends if end in text]
    if not lengths:
        raise DataError(
            f"{where}: the model's chat template closes it ({shown(text[-40:])}) with none of the tokens that end a "
            f"response ({', '.join(ends) or 'there are none'}), so a policy would not learn to stop; name the closing "
            "token in the model's generation_config.json (eos_token_id)"
        )
    behind = text[min(lengths) :]
    for end in ends:
        behind = behind.replace(end, "")
    if behind.strip():
        raise DataError(
            f"{where}: text stands behind an end of sequence ({', '.join(ends)}): {shown(behind)}; a response ends "
            "there, so take that token out of the message's content"
        )
    return min(lengths)


def _pieces(text: str, cuts: Sequence[int], tokenizer: Any, location: str) -> list[list[int]]:
    """Return the token ids of the pieces between cuts: those that each adds to the text in front of it.

    A token may reach across a cut, such as one of two newlines, where the generation prompt ends in a newline and the
    message begins with one. A policy reads the prompt by itself, so then the piece's tokens are those of it alone.
    """
    pieces: list[list[int]] = []
    before: list[int] = []
    for start, stop in pairwise(cuts):
        ids = tokenizer(text[:stop], add_special_tokens=False)["input_ids"]
        own = ids[len(before) :]
        if ids[: len(before)] != before:
            own = tokenizer(text[start:stop], add_special_tokens=False)["input_ids"]
            if tokenizer.decode([*before, *own]) != tokenizer.decode(ids):
                raise DataError(
                    f"{location}: the tokenizer joins the beginning of {shown(text[start:stop])} with what stands in "
                    "front of it, and writes it in another way alone; leave out white space at the beginning of the "
                    "message"
                )
        pieces.append(own)
        before = ids
    if not tokenizer.chat_template:
        pieces[0] = open_text_ids(text[: cuts[1]], tokenizer)
    return pieces
