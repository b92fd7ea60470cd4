"""Iterative RL (DeepSeekMath, arXiv 2402.03300, algorithm 1): the reward model learns from what the policy samples.

An iteration is M training steps (`reward_model.retrain.freq`). At its end the reward model is trained on the responses
of these steps, which the rule has judged, and on a share of those before (`reward_model.replay_share`). The other part
of an iteration, the reference that becomes the policy, is `actor_rollout_ref.ref.ref_model_sync_steps`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_dist.assets import REWARD_MODEL_KEY, resolve_model_path
from grpo_dist.assets.tokenizer import load_tokenizer
from grpo_dist.config.model_rules import max_positions
from grpo_dist.config.model_shape import model_config_at_hand
from grpo_dist.config.schema import RunConfig
from grpo_dist.data.preference_tokens import Example, preference_batch, tokenize_preferences
from grpo_dist.data.replay import ReplayStore, Selection
from grpo_dist.data.step_tokens import step_form
from grpo_dist.engines.settings import LabelSettings
from grpo_dist.protocol import metric_values
from grpo_dist.trainer.supervised.rows import rank_shares
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.gang import averaged
from grpo_dist.workers.reward_model import RewardModelGroup
from grpo_dist.workers.reward_pool import RewardPool
from grpo_dist.workers.rollout_group import GroupRequest

FOLDER = "replay"  # in the run directory


class Retraining:
    """Keeps the judged responses of each step, and trains the reward model on them at the end of an iteration.

    Args:
        config: the run's config.
        reward_model: started workers.
        reward: the reward processes, which have judged the responses.
    """

    def __init__(self, config: RunConfig, reward_model: RewardModelGroup, reward: RewardPool) -> None:
        self.config, self.reward_model, self.reward = config, reward_model, reward
        self.settings = config.reward_model.retrain
        self.store = ReplayStore(Path(config.trainer.default_local_dir).absolute() / FOLDER)
        self._tokenizer: Any = None

    def resumed_from(self, checkpoint: Path, step: int) -> None:
        """Take over the responses of the run that wrote a checkpoint after this step, if it has another folder.

        Raises:
            DataError: those of a step are missing, or cannot be copied.
        """
        within = step % self.settings.freq
        needed = range(1 if self.config.reward_model.replay_share else step - within + 1, step + 1)
        theirs = ReplayStore(checkpoint.absolute().parent / FOLDER)
        theirs.check(needed)
        if theirs.folder.resolve() != self.store.folder.resolve():
            theirs.copy(needed, self.store)

    async def end_step(self, step: int, batch: DataProtoRef, requests: Sequence[GroupRequest]) -> dict[str, float]:
        """Write the responses of a step. If an iteration ends with it, train the reward model, and return metrics."""
        conversations = {request.uid: request.task.messages for request in requests}
        await self.reward.write_judged(batch, str(self.store.file(step)), conversations)
        return {} if step % self.settings.freq else await self._retrain(step)

    async def _retrain(self, step: int) -> dict[str, float]:
        selection, examples = await asyncio.to_thread(self._examples, step)
        size, metrics = self.settings.train_batch_size, []
        for epoch in range(self.settings.train_epochs):
            order = np.random.default_rng([self.config.trainer.seed, step, epoch]).permutation(len(examples))
            for start in range(0, len(order), size):
                chosen = [examples[i] for i in order[start : start + size]]
                parts = rank_shares(chosen, len(self.reward_model.workers), preference_batch)
                metrics.append(await self.reward_model.train(parts, LabelSettings(), step))
        counts = {"fresh_rows": len(selection.fresh), "replayed_rows": len(selection.replayed)}
        left_out = len(selection.fresh) + len(selection.replayed) - len(examples)
        return (metric_values(averaged(metrics)) if metrics else {}) | {
            f"reward_model/{name}": float(number) for name, number in (counts | {"long_rows": left_out}).items()
        }

    def _examples(self, step: int) -> tuple[Selection, list[Example]]:
        """The responses to train on; those longer than the reward model reads are left out."""
        section, trainer = self.config.reward_model, self.config.trainer
        first = step - self.settings.freq + 1
        selection = self.store.select(first, step, section.replay_share, seed=trainer.seed)
        if self._tokenizer is None:
            model = section.model
            folder = resolve_model_path(str(model.path), weights=False, key=REWARD_MODEL_KEY)
            self._tokenizer = load_tokenizer(folder, trust_remote_code=model.trust_remote_code, key=REWARD_MODEL_KEY)
        positions = max_positions(model_config_at_hand(str(section.model.path)) or {})
        examples, _ = tokenize_preferences(
            [*selection.fresh, *selection.replayed],
            self._tokenizer,
            max_length=section.max_length or (positions[1] if positions else sys.maxsize),
            form=step_form(self.config),
            key="reward_model.max_length",
        )
        return selection, examples
