"""Preference data to token ids and labels: the rows that a reward model trains on.

A model is worth something only where it was trained: at the token where conversations.py has a conversation judged.
Some chat templates (Qwen's) put a newline behind the end-of-sequence token, where a policy's response ends; the reward
model's worker renders them in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grpo_dist.data.conversations import encode_conversation, render_conversation, without_padding
from grpo_dist.data.preferences import LabelledSteps, Pair
from grpo_dist.data.step_tokens import StepForm, step_tokens
from grpo_dist.data.tokenize import template_errors, within_length
from grpo_dist.errors import DataError
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.fields import NO_LABEL


@dataclass(frozen=True, eq=False)
class Example:
    """A pair, or an answer whose steps have labels.

    Attributes:
        location: file and row.
        prompt: [P] int32 token ids, P > 0, with which all responses begin.
        responses: [R_i] int32 each, R_i > 0: of a pair the chosen and the rejected one, of labelled steps the one.
        labels: [R_i] int8 each: at the token that completes what is judged 1 or 0, else -1.
    """

    location: str
    prompt: np.ndarray
    responses: list[np.ndarray]
    labels: list[np.ndarray]

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        """All its numbers, the prompt's token ids first."""
        return (self.prompt, *self.responses, *self.labels)

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt, once, and of all responses."""
        return len(self.prompt) + sum(map(len, self.responses))

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest conversation."""
        return len(self.prompt) + max(map(len, self.responses))


def tokenize_preferences(
    rows: Sequence[Pair | LabelledSteps],
    tokenizer: Any,
    *,
    max_length: int,
    padding_id: int | None,
    form: StepForm,
) -> tuple[list[Example], list[Pair | LabelledSteps]]:
    """Token ids and labels of checked rows.

    A pair's prompt is what its two conversations have in common, token by token, and its labels are where they are
    judged. For labelled steps see `label_answer`.

    Args:
        rows: from `load_pairs` or `load_steps`.
        tokenizer: a transformers tokenizer.
        max_length: most tokens of a conversation. Longer ones are left out whole, since a cut one is another answer.
        padding_id: of the model, see `conversations.padding_id`.
        form: how steps are written. Without `form.token`, rows of which none has two steps are judged as a whole.

    Returns:
        The examples, in order, and the rows that were left out.

    Raises:
        DataError: a row cannot be rendered or teaches nothing, or all rows are too long.
    """
    several = any(isinstance(row, LabelledSteps) and len(row.steps) > 1 for row in rows)
    judged = form if several or form.token is not None else None

    def tokenized(row: Pair | LabelledSteps) -> Example:
        if isinstance(row, Pair):
            return _pair(row, tokenizer, padding_id)
        return label_answer(row, tokenizer, padding_id=padding_id, form=judged)

    return within_length(rows, tokenized, max_length=max_length)


def label_answer(row: LabelledSteps, tokenizer: Any, *, padding_id: int | None, form: StepForm | None) -> Example:
    """Return an answer with its labels where a reward model scores it.

    Args:
        row: the answer.
        tokenizer: a transformers tokenizer.
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
    with template_errors(row.location):
        text = render_conversation(tokenizer, row.prompt, [{"role": "assistant", "content": row.steps[0]}])
    token_ids = without_padding(encode_conversation(*text, tokenizer)[0], padding_id)
    if len(token_ids) < 2:
        raise DataError(f"{row.location}: its conversation has no two tokens; leave out the row")
    return Example(row.location, token_ids[:-1], [token_ids[-1:]], [np.array(row.labels, dtype=np.int8)])


def preference_batch(examples: Sequence[Example]) -> DataProto:
    """The columns `prompts`, `responses`, `labels` and `uid`, with a row for each response, those of a pair in turn."""
    prompts = [each.prompt for each in examples for _ in each.responses]
    responses = [response for each in examples for response in each.responses]
    labels = [of_response for each in examples for of_response in each.labels]
    columns = {
        "prompts": Ragged.from_rows(prompts, torch.int32),
        "responses": Ragged.from_rows(responses, torch.int32),
        "labels": Ragged.from_rows(labels, torch.int8),
    }
    uid = [f"{i}: {each.location}" for i, each in enumerate(examples) for _ in each.responses]
    return DataProto.from_dict(columns, {"uid": uid})


def _pair(pair: Pair, tokenizer: Any, padding_id: int | None) -> Example:
    with template_errors(pair.location):
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
    return Example(pair.location, chosen[:common], responses, labels)


def _steps(row: LabelledSteps, tokenizer: Any, padding_id: int | None, form: StepForm) -> Example:
    if not tokenizer.is_fast:
        raise DataError(
            f"{row.location}: steps are found by the places of tokens in the text, which this tokenizer "
            f"({type(tokenizer).__name__}) does not tell; use a model with a tokenizer.json"
        )
    with template_errors(row.location):
        token_ids, first, ends = step_tokens(tokenizer, row.prompt, row.steps, form, padding_id)
    if len(np.unique(ends)) < len(ends):
        raise DataError(
            f"{row.location}: completions: two steps end in the same token; join them, or leave out the row"
        )
    response = token_ids[first:]
    return Example(row.location, token_ids[:first], [response], [_labels(response, ends - first, row.labels)])


def _labels(response: np.ndarray, places: Sequence[int] | np.ndarray, labels: Sequence[bool]) -> np.ndarray:
    found = np.full(len(response), NO_LABEL, dtype=np.int8)
    found[places] = labels
    return found
