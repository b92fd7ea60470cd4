"""Training rows to token ids, with marks where the loss reads them.

Conversations (`tokenize_chats`): a message is trained as a policy would say it, from the first character behind the
generation prompt up to the end-of-sequence token that closes it. What a chat template writes behind that token (Qwen's
a newline) is read by the messages that follow, and not trained; what stands behind the last trained one is left out.
Where each message begins and ends is found by rendering the conversation up to it, so that any chat template does that
does not change what it wrote before. In front of a trained message stands exactly what the policy reads in a rollout.

Pairs and labelled steps (`tokenize_preferences`): a reward model is worth something only where it was trained, at the
token where conversations.py has a conversation judged. Some chat templates (Qwen's) put a newline behind the
end-of-sequence token, where a policy's response ends; the reward model's worker renders them in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from grpo_dist.data.conversations import (
    check_template_kwargs,
    encode_conversation,
    open_text_ids,
    render_conversation,
    row_errors,
    without_padding,
)
from grpo_dist.data.files import shown
from grpo_dist.data.step_tokens import StepForm, check_places, step_tokens
from grpo_dist.data.training_rows import Conversation, LabelledSteps, Pair, TrainingExample, within_length
from grpo_dist.errors import DataError
from grpo_dist.protocol.fields import NO_LABEL


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


def tokenize_preferences(
    rows: Sequence[Pair | LabelledSteps],
    tokenizer: Any,
    *,
    max_length: int,
    padding_id: int | None,
    form: StepForm,
) -> tuple[list[TrainingExample], list[Pair | LabelledSteps]]:
    """Return the examples of checked rows, in order, and the rows that were left out.

    A pair's prompt is what its two conversations have in common, token by token, and its labels are where they are
    judged. For labelled steps see `label_answer`.

    Args:
        max_length: most tokens of a conversation. Longer ones are left out whole, since a cut one is another answer.
        form: how steps are written. Without `form.token`, rows of which none has two steps are judged as a whole.

    Raises:
        DataError: a row cannot be rendered or teaches nothing, or all rows are too long.
    """
    several = any(isinstance(row, LabelledSteps) and len(row.steps) > 1 for row in rows)
    judged = form if several or form.token is not None else None

    def tokenized(row: Pair | LabelledSteps) -> TrainingExample:
        if isinstance(row, Pair):
            return _pair(row, tokenizer, padding_id)
        return label_answer(row, tokenizer, padding_id=padding_id, form=judged)

    return within_length(rows, tokenized, max_length=max_length)


def label_answer(
    row: LabelledSteps, tokenizer: Any, *, padding_id: int | None, form: StepForm | None
) -> TrainingExample:
    """Return an answer with its labels where a reward model scores it.

    Args:
        form: how the steps are written that a process reward model judges, each where `StepForm` has it judged. None:
            the answer is one step, and judged as a whole.

    Raises:
        DataError: the row cannot be rendered, or there are not as many places as labels.
    """
    if form is not None:
        return _steps(row, tokenizer, padding_id, form)
    if len(row.labels) != 1:
        raise DataError(f"{row.location}: {len(row.labels)} labels, and the reward model judges whole answers")
    with row_errors(row.location):
        text = render_conversation(tokenizer, row.prompt, [{"role": "assistant", "content": row.steps[0]}])
    token_ids = without_padding(encode_conversation(*text, tokenizer)[0], padding_id)
    if len(token_ids) < 2:
        raise DataError(f"{row.location}: its conversation has no two tokens; leave out the row")
    return TrainingExample(row.location, token_ids[:-1], [token_ids[-1:]], [np.array(row.labels, dtype=np.int8)])


def _pair(pair: Pair, tokenizer: Any, padding_id: int | None) -> TrainingExample:
    with row_errors(pair.location):
        texts = [render_conversation(tokenizer, pair.prompt, a) for a in (pair.chosen, pair.rejected)]
    chosen, rejected = (without_padding(encode_conversation(*text, tokenizer)[0], padding_id) for text in texts)
    if np.array_equal(chosen, rejected):
        raise DataError(
            f"{pair.location}: chosen and rejected have the same tokens, so neither is preferred; leave out the row"
        )
    shorter = min(len(chosen), len(rejected))
    differs = np.append(chosen[:shorter] != rejected[:shorter], True)
    # a token is left to each, so that no response is empty where one goes on from the other
    common = min(int(differs.argmax()), shorter - 1)
    if common < 1:
        raise DataError(
            f"{pair.location}: chosen and rejected have no first token in common, and a pair needs one; both must "
            "answer the same prompt"
        )
    responses = [chosen[common:], rejected[common:]]
    labels = [_labels(response, [-1], [good]) for response, good in zip(responses, (True, False), strict=True)]
    return TrainingExample(pair.location, chosen[:common], responses, labels)


def _steps(row: LabelledSteps, tokenizer: Any, padding_id: int | None, form: StepForm) -> TrainingExample:
    check_places(tokenizer, row.location)
    with row_errors(row.location):
        token_ids, first, ends = step_tokens(tokenizer, row.prompt, row.steps, form, padding_id)
    if len(np.unique(ends)) < len(ends):
        raise DataError(
            f"{row.location}: completions: two steps end in the same token; join them, or leave out the row"
        )
    response = token_ids[first:]
    return TrainingExample(row.location, token_ids[:first], [response], [_labels(response, ends - first, row.labels)])


def _labels(response: np.ndarray, places: Sequence[int] | np.ndarray, labels: Sequence[bool]) -> np.ndarray:
    marks = np.full(len(response), NO_LABEL, dtype=np.int8)
    marks[places] = labels
    return marks
