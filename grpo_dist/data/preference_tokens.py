"""Preference data to token ids and labels: the rows that a reward model trains on.

A model is worth something only where it was trained: at the token where conversations.py has a conversation judged.
Some chat templates (Qwen's) put a newline behind the end-of-sequence token, where a policy's response ends; the reward
model's worker renders them in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_dist.data.conversations import encode_conversation, render_conversation, row_errors, without_padding
from grpo_dist.data.step_tokens import StepForm, check_places, step_tokens
from grpo_dist.data.training_rows import LabelledSteps, Pair, TrainingExample, within_length
from grpo_dist.errors import DataError
from grpo_dist.protocol.fields import NO_LABEL


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
        padding_id: of the model, see `conversations.padding_id`.
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
        padding_id: of the model, see `conversations.padding_id`.
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
