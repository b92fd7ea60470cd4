"""Tries the estimators, losses, KL terms and samplers that a config names as code of its own, before anything starts.

They are called as a run calls them, with made-up numbers of the shapes and types of a run, so that what would end the
run at its first update ends it here. What a run may do without, such as a response of which no token trains or a group
that lacks a response, is not made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from grpo_dist.algorithms.advantage import ADVANTAGE, compute_advantage
from grpo_dist.algorithms.kl import KL, kl_penalty
from grpo_dist.algorithms.policy_loss import POLICY_LOSS, compute_policy_loss
from grpo_dist.algorithms.targets import TargetSettings
from grpo_dist.config.schema import RunConfig
from grpo_dist.data.curriculum import CustomSampler
from grpo_dist.data.sampler import PromptSampler
from grpo_dist.engines.settings import ObjectiveSettings
from grpo_dist.errors import BatchError, ConfigError
from grpo_dist.trainer.loss_settings import objective_settings, target_settings

GROUPS, LENGTH = 2, 4  # of the made-up batch: prompts, and most tokens of a response


class MadeUpBatch:
    """Responses of 1 to `LENGTH` tokens to `GROUPS` prompts, (N, T) or (N,) float32 as in a run.

    The scores of a group differ, but those of the last one are equal where a run trains on such groups too.
    """

    def __init__(self, config: RunConfig) -> None:
        n = config.actor_rollout_ref.rollout.n
        rows, equal = torch.arange(GROUPS * n), not config.algorithm.filter_groups.enable
        random = torch.Generator().manual_seed(0)
        self.index = (rows // n).tolist()
        self.scores = ((rows % n + 1) % 2).float().where((rows < n) | torch.tensor(not equal), 1.0)
        lengths = rows % LENGTH + 1
        self.mask = (torch.arange(LENGTH) < lengths[:, None]).float()
        self.last_token = torch.nn.functional.one_hot(lengths - 1, LENGTH).float()
        self.log_probs, self.old_log_probs, self.ref_log_probs, self.values = (
            -torch.rand(len(rows), LENGTH, generator=random) * self.mask for _ in range(4)
        )
        self.advantages = (2 * (rows % 2).float() - 1)[:, None] * self.mask
        self.log_probs.requires_grad_()


def own_functions(config: RunConfig) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield (`key=name`, a call that tries it) for each function of the config's own that the run calls.

    The call raises a ConfigError where the run would fail.
    """
    batch, targets, objective = MadeUpBatch(config), target_settings(config), objective_settings(config)
    kl, kl_loss = targets.kl_penalty or "", objective.kl_loss_type if objective.use_kl_loss else ""
    named: tuple[tuple[str, str, Callable[[], object]], ...] = (
        (ADVANTAGE.key, targets.adv_estimator, lambda: _advantages(batch, targets)),
        (
            "algorithm.kl_penalty",
            kl,
            lambda: kl_penalty(kl, batch.old_log_probs, batch.ref_log_probs, key="algorithm.kl_penalty"),
        ),
        (KL.key, kl_loss, lambda: kl_penalty(kl_loss, batch.log_probs, batch.ref_log_probs)),
        (POLICY_LOSS.key, objective.loss_mode, lambda: _policy_loss(batch, objective)),
    )
    for key, name, call in named:
        # names of reward components are those of the rows' reward functions, which are not called here
        if ":" in name and not (key == ADVANTAGE.key and "reward_components" in targets.needs):
            yield f"{key}={name}", call


def _advantages(batch: MadeUpBatch, settings: TargetSettings) -> None:
    needs = settings.needs
    without_critic = torch.zeros_like(batch.mask) if "values" in needs else None
    try:
        compute_advantage(
            settings.adv_estimator,
            token_level_rewards=batch.scores[:, None] * batch.last_token,
            response_mask=batch.mask,
            index=batch.index,
            values=batch.values if settings.critic else without_critic,
            reward_baselines=torch.zeros_like(batch.scores) if "reward_baselines" in needs else None,
            step_mask=batch.last_token if "step_mask" in needs else None,
            reward_components={},
            config=settings.options,
        )
    except BatchError as error:  # it asks for what it has not declared
        raise ConfigError(f"{ADVANTAGE.key}={settings.adv_estimator}: {error}") from error


def _policy_loss(batch: MadeUpBatch, settings: ObjectiveSettings) -> None:
    weighted = settings.weighted or settings.correction is not None
    compute_policy_loss(
        settings.loss_mode,
        old_log_probs=batch.log_probs.detach() if settings.on_policy else batch.old_log_probs,
        log_probs=batch.log_probs,
        advantages=batch.advantages,
        response_mask=batch.mask,
        loss_agg_mode=settings.loss_agg_mode,
        config=settings.options,
        rollout_is_weights=torch.ones_like(batch.mask) if weighted else None,
        global_tokens=batch.mask.sum(),
        global_sequences=len(batch.mask),
        loss_scale_factor=settings.loss_scale_factor,
    )


def try_sampler(config: RunConfig, sampler: PromptSampler | CustomSampler) -> None:
    """Have the sampler choose a batch, learn from made-up scores, and go back to where it was.

    Raises:
        DataError: it fails, or returns what it must not.
    """
    state, scores = sampler.state_dict(), np.zeros(config.actor_rollout_ref.rollout.n, np.float32)
    sampler.update({int(position): scores for position in sampler.next_batch()})
    sampler.load_state_dict(state)
