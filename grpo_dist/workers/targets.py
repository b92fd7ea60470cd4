"""What reward processes make of whole batches: advantages and other inputs of the update, and how far the sampler's
log-probs are from the trainer's.

The driver holds only handles, so work on tensors needs a worker. The reward processes are idle while the actor is
updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from grpo_dist.algorithms.agreement import apart
from grpo_dist.algorithms.correction import compute_rollout_correction, mismatch_by_cause
from grpo_dist.algorithms.settings import TargetSettings
from grpo_dist.algorithms.targets import compute_targets
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.fields import EXTRA, SOURCE, columns_for
from grpo_dist.protocol.sequences import PREDECESSORS
from grpo_dist.rewards.scorer import printing_to
from grpo_dist.rewards.weighted import chosen_components
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.runtime.process import Process

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Why sampler and trainer may differ: see `trainer.metrics.mismatch_causes`.
Causes = tuple[np.ndarray | None, np.ndarray | None, bool]


class TargetMaker(Process):
    """Makes targets. What it is made of is the scorer's.

    Attributes:
        components: the reward components that the reward function declares, with their weights.
        overlong_penalty: the penalty for long responses; None: no penalty.
    """

    tokenizer: PreTrainedTokenizerBase
    components: Mapping[str, float]
    overlong_penalty: Callable[[torch.Tensor], torch.Tensor] | None

    def compute_targets(
        self, batch: DataProtoRef, settings: TargetSettings, kl_coef: float, seed: int
    ) -> tuple[tuple[Label, dict[str, float], tuple[list[str], int]], DataProto]:
        """Advantages and the other inputs of the update, from the whole batch; see `algorithms.targets`.

        Returns:
            ((label with `advantage_mean` and `reward` per sequence, metrics, what custom estimators have printed), the
            columns of `algorithms.targets`).
        """
        data = batch.fetch(("uid", *settings.columns))
        label, metrics, targets = self.targets_of(data, batch.small, settings, kl_coef, seed)
        return (label, metrics, self.take_printed()), targets

    def targets_of(
        self, data: DataProto, given: Mapping[str, np.ndarray], settings: TargetSettings, kl_coef: float, seed: int
    ) -> tuple[Label, dict[str, float], DataProto]:
        """The same for a batch that is here, and numbers of its sequences (`truncated`, `score`, ...)."""
        lengths = data["token_level_scores"].lengths
        small = {name: torch.as_tensor(values) for name, values in given.items() if values.dtype.kind in "fiub"}
        components = {k.removeprefix(EXTRA): v for k, v in small.items() if k.startswith(EXTRA)}
        if "reward_components" in settings.needs:
            settings = self._with_components(settings, components)
            # a declared component may apply to no response of this batch
            absent = torch.full((len(lengths),), torch.nan)
            components = dict.fromkeys(self.components, absent) | components
        with printing_to(self.printed):
            out, metrics = compute_targets(
                {name: data[name].to_padded(-1 if name == PREDECESSORS else 0) for name in settings.columns},
                settings,
                index=data["uid"],
                truncated=small["truncated"],
                scored=~small["score"].isnan(),
                kl_coef=kl_coef,
                sources=small.get(SOURCE),
                reward_baselines=small.get("reward_baseline"),
                reward_components=components,
                generator=torch.Generator().manual_seed(seed),
            )
        out["response_mask"] = out["response_mask"].to(torch.int8)
        columns: dict[str, Any] = {name: Ragged.from_padded(value, lengths) for name, value in out.items()}
        columns["advantage_mean"] = out["advantages"].sum(-1) / out["response_mask"].sum(-1).clamp_min(1)
        columns["reward"] = out["token_level_rewards"].sum(-1)
        targets = DataProto.from_dict(columns)
        return Label.of(targets), metrics, targets

    def _with_components(self, settings: TargetSettings, returned: Iterable[str]) -> TargetSettings:
        chosen = chosen_components(
            settings.options.get("gdpo_reward_keys"),
            settings.options.get("gdpo_reward_weights"),
            declared=self.components,
            overlong_penalty=self.overlong_penalty is not None,
            returned=returned,
        )
        named = {"gdpo_reward_keys": tuple(chosen), "gdpo_reward_weights": tuple(chosen.values())}
        return replace(settings, options={**settings.options, **named})

    def rollout_diagnostics(
        self, batch: DataProtoRef, correction: Mapping[str, Any] | None, causes: Causes | None = None
    ) -> dict[str, float]:
        """The metrics of `algorithms.correction`, from old log-probs that the update returned, and of `mismatch`.

        Args:
            correction: arguments of `compute_rollout_correction`; None: its metrics are there already.
            causes: why both may differ; None: for one reason only.
        """
        names = ("old_log_probs", "rollout_log_probs", "response_mask")
        data = batch.fetch((*names, "weight_versions") if causes is not None else names)
        columns: dict[str, Any] = {name: data[name].to_padded(0) for name in names}
        metrics = {} if correction is None else compute_rollout_correction(**columns, **correction)[2]
        if causes is not None:
            newest, lacks_routes, filtered = causes
            versions = data["weight_versions"].to_padded(0)
            stale = None if newest is None else versions < torch.as_tensor(newest)[:, None]
            lacks = None if lacks_routes is None else torch.as_tensor(lacks_routes)
            metrics |= mismatch_by_cause(**columns, is_stale=stale, lacks_routes=lacks, filtered=filtered)
        return metrics

    def compare_log_probs(self, batch: DataProtoRef, version: int) -> tuple[int, float, float, str]:
        """Compare the sampler's log-probs with the old ones.

        Returns:
            (number of tokens that train and were sampled by weights of this version, or newer ones; how far they are
            apart on average and at most, nats; the token where that is, in words).
        """
        data = batch.fetch(columns_for(batch.columns, "diagnostics"))
        mask = (data["response_mask"].values > 0) & (data["weight_versions"].values >= version)
        if not mask.any():
            return 0, 0.0, 0.0, ""
        sampler, trainer, offsets = (
            data["rollout_log_probs"].values,
            data["old_log_probs"].values,
            data["responses"].offsets,
        )
        mean, largest, worst = apart(sampler, trainer, mask)
        row, token = int((offsets <= worst).sum()) - 1, int(data["responses"].values[worst])
        place = f"token {worst - int(offsets[row])} of a response to prompt {data['uid'][row]}"
        both = f"log-prob {sampler[worst]:.6g} in the engine, {trainer[worst]:.6g} in the trainer"
        return int(mask.sum()), mean, largest, f"{self.tokenizer.decode([token])!r} (id {token}), {place}: {both}"
