"""Rows whose sequences a model with one output scores: each response gets one more token."""

from __future__ import annotations

import torch

from grpo_dist.protocol.data_proto import DataProto
from grpo_dist.protocol.fields import NO_LABEL
from grpo_dist.protocol.ragged import Ragged

# The token that is appended to a sequence whose score is wanted. No other token sees it, so any id of the vocabulary
# does.
SCORE_TOKEN = 0


def with_score_token(data: DataProto) -> DataProto:
    """Return rows of which a model with one output gives the score: each response gets one more token.

    The score of a sequence is the value at its last token, and a label says what the value at its token should be.
    Values are read at the token before, so both belong to the token that follows: labels move one token on.

    Args:
        data: `prompts` and `responses` (which may be empty), and where there are some `labels` and `uid`.

    Returns:
        These columns, and `response_mask`: 1 on the tokens with a label; without labels on the appended token. Without
        rows the columns may be missing.
    """
    if not len(data):
        return data
    responses = [torch.cat([row, row.new_full((1,), SCORE_TOKEN)]) for row in data["responses"].rows()]
    columns = {"prompts": data["prompts"], "responses": Ragged.from_rows(responses, torch.int32)}
    if "labels" in data.batch:
        rows = [torch.cat([row.new_full((1,), NO_LABEL), row]) for row in data["labels"].rows()]
        columns["labels"] = Ragged.from_rows(rows, torch.int8)
        mask = [row != NO_LABEL for row in rows]
    else:
        mask = [torch.arange(len(row)) == len(row) - 1 for row in responses]
    columns["response_mask"] = Ragged.from_rows(mask, torch.int8)
    uid = {name: column for name, column in data.non_tensor_batch.items() if name == "uid"}
    return DataProto.from_dict(columns, uid)
