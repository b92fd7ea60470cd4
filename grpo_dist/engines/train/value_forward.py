"""The forward pass of a model with a linear head: from rows of a batch to numbers at their tokens."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_dist.engines.train.classifier import HEAD
from grpo_dist.engines.train.forward import CHECKED_TOKENS, PolicyForward
from grpo_dist.engines.train.micro_batch import MicroBatch
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.fields import NO_LABEL

# The token that is appended to a sequence whose score is wanted. No other token sees it, so any id of the vocabulary
# does.
SCORE_TOKEN = 0


class Values(NamedTuple):
    """(M,) float32 values of the M response tokens: the head's output at the token before each of them; of a head with
    two outputs, bad and good, the log odds of good: the second less the first.
    """

    values: Tensor


class ValueForward(PolicyForward):
    """Runs a token classifier over micro-batches, in the layouts of a policy. Takes the arguments of `PolicyForward`.

    The value of a response token is read at the token that precedes it: what the model says of the state in which the
    token is chosen, as verl's critic. Who wants the value at a sequence's last token appends one more token to it.
    """

    computes, unit = "values", " of their size"
    without_head = ""

    def __call__(self, micro_batch: MicroBatch, **options: Any) -> Values:  # type: ignore[override]
        """The values of the response tokens; `options` are those of a policy, which has more to say."""
        logits = self._at_predictors(micro_batch, self._run(micro_batch).logits)
        return Values(logits[:, 0] if logits.shape[-1] == 1 else logits[:, 1] - logits[:, 0])

    def _at_predictors(self, micro_batch: MicroBatch, outputs: Tensor) -> Tensor:
        """(M, ...) float32 of the model's outputs at this rank's tokens, (B, L, ...)."""
        group = self.group_of(micro_batch)
        numbers, predictors = group.own(micro_batch.predictors, micro_batch.input_ids.shape[1])
        return group.whole(outputs.flatten(0, 1)[predictors].float(), numbers, len(micro_batch.targets))

    def scale(self, alone: Tensor) -> float:
        """Values have no unit: a reward model may give scores around 20, whose rounding is as much larger."""
        return max(1.0, alone.abs().mean().item())

    def compared(self, micro_batch: MicroBatch) -> Tensor:
        """See `PolicyForward.compared`; the values of a head that is drawn for the check.

        The model's own may be near 0, as a critic's is at first: it would hide any difference between its inputs.
        """
        inputs: list[Tensor] = []
        with getattr(self.model, HEAD).register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0])):
            self._run(micro_batch)
        states = self._at_predictors(micro_batch, inputs[0])
        drawn = torch.randn(states.shape[1], generator=torch.Generator().manual_seed(0))
        return states @ (drawn / math.sqrt(states.shape[1])).to(states.device)

    def compared_alone(self, row: MicroBatch) -> Tensor:
        """See `PolicyForward.compared_alone`."""
        return self.compared(row)[-CHECKED_TOKENS:]


def with_score_token(data: DataProto) -> DataProto:
    """Rows of which a model with one output gives the score: each response gets one more token.

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
