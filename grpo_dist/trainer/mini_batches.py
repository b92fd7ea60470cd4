"""Which rows of a batch make up each optimizer step."""

from __future__ import annotations

import numpy as np

from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_models import CriticConfig
from grpo_dist.config.schema_roles import ActorConfig


def mini_batches(config: RunConfig, section: ActorConfig | CriticConfig, num_rows: int, step: int) -> list[np.ndarray]:
    """Row positions of each mini-batch of each epoch; a group is never cut, so its responses meet one policy.

    Args:
        config: of the run.
        section: of the role that trains.
        num_rows: of the batch: groups of `rollout.n`, one after another.
        step: training steps that are done.
    """
    groups = np.arange(num_rows).reshape(-1, config.actor_rollout_ref.rollout.n)
    batches: list[np.ndarray] = []
    for epoch in range(section.ppo_epochs):
        order = np.arange(len(groups))
        if section.shuffle:
            order = np.random.default_rng([config.trainer.seed, step, epoch]).permutation(order)
        parts = np.array_split(order, len(groups) // section.ppo_mini_batch_size)
        batches.extend(groups[part].reshape(-1) for part in parts)
    return batches
