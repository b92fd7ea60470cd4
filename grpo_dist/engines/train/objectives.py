"""What a model is trained for: of each objective the loss of a micro-batch, its metrics, and what divides the loss.

An objective is made for one mini-batch. Its counts are summed over all ranks before the first backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grpo_dist.algorithms import policy_objective
from grpo_dist.algorithms.losses import compute_value_loss, label_loss, pair_loss, supervised_loss
from grpo_dist.algorithms.objective import SUMS
from grpo_dist.algorithms.settings import (
    TOP_IDS,
    TOP_LOG_PROBS,
    LabelSettings,
    ObjectiveSettings,
    PreferenceSettings,
    SFTSettings,
    TrainingSettings,
    ValueSettings,
)
from grpo_dist.engines.train.forward import PolicyForward, ValueForward, Values
from grpo_dist.engines.train.lm_head import HeadValues, ReferenceHead
from grpo_dist.engines.train.micro_batch import MicroBatch
from grpo_dist.errors import BatchError
from grpo_dist.protocol import DataProto, Mean, Metric, Sum, merge_metrics
from grpo_dist.protocol.fields import NO_LABEL
from grpo_dist.protocol.sequences import with_score_token


class Loss(NamedTuple):
    """The results of one micro-batch. All are tensors: whoever reads one waits until the device has computed it.

    Attributes:
        loss: ready for backward.
        sums: metrics that add up to the mini-batch's.
        means: metrics that are means over some tokens or pairs.
        denominator: how many these are.
        log_probs: (N, T), on policy; else None.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    means: Mapping[str, Tensor] = MappingProxyType({})
    denominator: Tensor | float = 0.0
    log_probs: Tensor | None = None

    def detached(self) -> Loss:
        """Return the same numbers without the graph of the pass, which would live on with them."""
        sums, means = ({name: value.detach() for name, value in part.items()} for part in (self.sums, self.means))
        return self._replace(loss=self.loss.detach(), sums=sums, means=means)


class Objective:
    """The methods that the engine calls of an objective; `role` begins the names of its metrics."""

    role: ClassVar[str]

    def __init__(self, settings: Any, forward: PolicyForward, reference_head: ReferenceHead | None) -> None:
        self.settings, self.forward, self.reference_head = settings, forward, reference_head

    def prepared(self, data: DataProto) -> DataProto:
        """The rows as the forward pass takes them."""
        return data

    def groups(self, data: DataProto) -> np.ndarray | None:
        """The number of each row's group, all rows of which must be in one micro-batch; None: any row may be alone."""
        return None

    def counts(self, data: DataProto) -> list[float]:
        """Return this rank's share of what divides the loss: tokens that train, and sequences with at least one."""
        if not len(data):
            return [0.0, 0.0]
        mask = data["response_mask"]
        return [float(mask.values.sum()), float(sum(bool(row.any()) for row in mask.rows()))]

    def trains(self, counts: Tensor) -> bool:
        """Tell if there is a loss, from the `counts` of all ranks."""
        return bool(counts[0] > 0)

    def __call__(self, micro_batch: MicroBatch, counts: Tensor) -> Loss:
        """Run the model. Summed over the micro-batches of all ranks, the loss is the mini-batch's."""
        raise NotImplementedError


_COUNTED = ("prompt_weights", "observation_mask")


class PolicyObjective(Objective):
    """GRPO's: `policy_objective`."""

    role = "actor"
    settings: ObjectiveSettings

    def counts(self, data: DataProto) -> list[float]:
        """Return tokens and sequences, and prompts and tokens of environments where they divide the loss."""
        columns = self.settings.columns if len(data) else ()
        more = [float(data[name].values.sum()) if name in columns else 0.0 for name in _COUNTED]
        return [*super().counts(data), *more]

    def trains(self, counts: Tensor) -> bool:
        """Tell if tokens of responses train, or of environments."""
        return bool(counts[0] > 0 or counts[3] > 0)

    def __call__(self, micro_batch: MicroBatch, counts: Tensor) -> Loss:
        settings, values = self.settings, self._values(micro_batch)
        read = {"log_probs": values.log_probs, "entropy": values.entropies, "exact_kl": values.exact_kl}
        read["top_mass"] = values.mass
        computed = {name: micro_batch.to_rows(value) for name, value in read.items() if value is not None}
        loss, means = policy_objective(
            {**micro_batch.columns, "response_mask": micro_batch.response_mask, **computed},
            settings,
            global_tokens=counts[0],
            global_sequences=counts[1],
            global_prompts=counts[2],
            global_observations=counts[3],
        )
        sums = {"actor/loss": loss} | {name: means.pop(name) for name in SUMS if name in means}
        log_probs = computed["log_probs"].detach() if settings.on_policy else None
        return Loss(loss, sums, means, micro_batch.response_mask.sum(), log_probs)

    def _values(self, micro_batch: MicroBatch) -> HeadValues:
        """Log-probs with the gradient, and where the loss asks for them entropies and the exact KL."""
        settings = self.settings
        columns = micro_batch.columns
        assert self.reference_head is not None or not settings.needs_head, "start with `exact_kl`"
        return self.forward(
            micro_batch,
            entropies=settings.actor.computes_entropy,
            reference=self.reference_head if settings.needs_head else None,
            reference_states=columns.get("ref_hidden_states"),
            top=(columns[TOP_IDS], columns[TOP_LOG_PROBS]) if settings.by_top_tokens else None,
        )


class SFTObjective(Objective):
    """Supervised fine-tuning's: `supervised_loss`."""

    role = "sft"
    settings: SFTSettings

    def __init__(self, settings: Any, forward: PolicyForward, reference_head: ReferenceHead | None) -> None:
        super().__init__(settings, forward, reference_head)
        assert not isinstance(forward, ValueForward), "a causal LM"
        assert forward.temperature == 1, "the loss is that of the model itself, not of one with scaled logits"

    def __call__(self, micro_batch: MicroBatch, counts: Tensor) -> Loss:
        log_probs = micro_batch.to_rows(self.forward(micro_batch).log_probs)
        loss = supervised_loss(log_probs, micro_batch.response_mask, global_tokens=counts[0])
        return Loss(loss, {"sft/loss": loss})


class _HeadObjective(Objective):
    """An objective of a model with a linear head, whose value is one number a token."""

    def __init__(self, settings: Any, forward: PolicyForward, reference_head: ReferenceHead | None) -> None:
        super().__init__(settings, forward, reference_head)
        assert isinstance(forward, ValueForward), "a model with a linear head"

    def _values(self, micro_batch: MicroBatch) -> Tensor:
        """(N, T) values with the gradient."""
        values = self.forward(micro_batch)
        assert isinstance(values, Values)
        return micro_batch.to_rows(values.values)


class _RewardObjective(_HeadObjective):
    """A reward model's: labels at the tokens where the head is read."""

    role = "reward_model"

    def prepared(self, data: DataProto) -> DataProto:
        """Each response with a token behind it, at which its last value is read."""
        return with_score_token(data)

    def counts(self, data: DataProto) -> list[float]:
        """Labelled tokens."""
        return [float((data["labels"].values != NO_LABEL).sum())] if len(data) else [0.0]

    def _result(self, loss: Tensor, means: dict[str, Tensor], count: Tensor | float) -> Loss:
        return Loss(loss, {"reward_model/loss": loss}, means, count)


class PairObjective(_RewardObjective):
    """The loss of pairs: `pair_loss`. The rows of a pair have the same uid, and a label at their last tokens only."""

    settings: PreferenceSettings

    def groups(self, data: DataProto) -> np.ndarray:
        """The number of each row's pair."""
        return np.unique([str(uid) for uid in data["uid"]], return_inverse=True)[1] if len(data) else np.empty(0, int)

    def counts(self, data: DataProto) -> list[float]:
        """Pairs.

        Raises:
            BatchError: rows of a uid are no pair.
        """
        if not len(data):
            return [0.0]
        labels = [row.tolist() for row in data["labels"].rows()]
        pairs = self.groups(data)
        for number in range(int(pairs.max()) + 1):
            rows = np.flatnonzero(pairs == number)
            if sorted(labels[row][-1] for row in rows) != [0, 1] or any(
                set(labels[row][:-1]) != {NO_LABEL} for row in rows
            ):
                raise BatchError(
                    f"uid {data['uid'][rows[0]]}: a pair is two rows, with labels 1 and 0 at their last tokens, and no "
                    f"others; there are {len(rows)}, with {[max(labels[row]) for row in rows]}"
                )
        return [len(data) / 2]

    def __call__(self, micro_batch: MicroBatch, counts: Tensor) -> Loss:
        # the rows of a pair are side by side, so the k-th chosen belongs to the k-th rejected
        values, is_response = self._values(micro_batch), micro_batch.response_mask.bool()
        chosen, rejected = (values[is_response & (micro_batch.columns["labels"] == label)] for label in (1, 0))
        return self._result(*pair_loss(chosen, rejected, global_pairs=counts[0]), len(chosen))


class LabelObjective(_RewardObjective):
    """The loss of labelled tokens: `label_loss`."""

    settings: LabelSettings

    def __call__(self, micro_batch: MicroBatch, counts: Tensor) -> Loss:
        values, mask = self._values(micro_batch), micro_batch.response_mask
        loss, means = label_loss(values, micro_batch.columns["labels"], mask, global_labels=counts[0])
        return self._result(loss, means, mask.sum())


class ValueObjective(_HeadObjective):
    """A critic's: `compute_value_loss`."""

    role = "critic"
    settings: ValueSettings

    def __call__(self, micro_batch: MicroBatch, counts: Tensor) -> Loss:
        loss, means = compute_value_loss(
            vpreds=self._values(micro_batch),
            values=micro_batch.columns["values"],
            returns=micro_batch.columns["returns"],
            response_mask=micro_batch.response_mask,
            cliprange_value=self.settings.section.cliprange_value,
            loss_agg_mode=self.settings.section.loss_agg_mode,
            global_tokens=counts[0],
            global_sequences=counts[1],
            loss_scale_factor=self.settings.loss_scale_factor,
        )
        return Loss(loss, {"critic/vf_loss": means.pop("critic/vf_loss")}, means, micro_batch.response_mask.sum())


OBJECTIVES: dict[type[TrainingSettings], type[Objective]] = {
    ObjectiveSettings: PolicyObjective,
    PreferenceSettings: PairObjective,
    LabelSettings: LabelObjective,
    SFTSettings: SFTObjective,
    ValueSettings: ValueObjective,
}


def read_metrics(losses: Sequence[Loss]) -> tuple[list[float], dict[str, Metric]]:
    """Read the loss of each micro-batch of a mini-batch, and the metrics of all of them, in one wait for the device."""
    device = losses[0].loss.device
    read: list[Tensor] = []
    for loss in losses:
        read += [loss.loss, torch.as_tensor(loss.denominator), *loss.sums.values(), *loss.means.values()]
    numbers = iter(torch.stack([value.float().to(device) for value in read]).tolist())
    values, metrics = [], []
    for loss in losses:
        values.append(next(numbers))
        count = next(numbers)
        sums: dict[str, Metric] = {name: Sum(next(numbers)) for name in loss.sums}
        metrics.append(sums | {name: Mean(next(numbers) * count, count) for name in loss.means})
    return values, merge_metrics(metrics)
