"""Iterative RL (DeepSeekMath, arXiv 2402.03300, algorithm 1): the reward model learns from what the policy samples.

An iteration is M training steps (`reward_model.retrain.freq`). At its end the reward model is trained on the responses
of these steps, which the rule has judged, and on a share of those before (`reward_model.replay_share`). The other part
of an iteration, the reference that becomes the policy, is `actor_rollout_ref.ref.ref_model_sync_steps`.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from grpo_dist.algorithms.settings import LabelSettings
from grpo_dist.assets import REWARD_MODEL_KEY, resolve_model_path
from grpo_dist.assets.model_folder import load_tokenizer, read_model_config
from grpo_dist.config.schema import RunConfig
from grpo_dist.data.conversations import padding_id
from grpo_dist.data.step_tokens import step_form
from grpo_dist.data.training_rows import JudgedResponses, LabelledSteps, TrainingExample
from grpo_dist.data.training_tokens import label_answer
from grpo_dist.errors import DataError
from grpo_dist.plan.model_rules import max_positions
from grpo_dist.protocol import metric_values
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.trainer.supervised.rows import rank_shares
from grpo_dist.workers.gang import averaged
from grpo_dist.workers.reward import RewardPool
from grpo_dist.workers.reward_model import RewardModelGroup
from grpo_dist.workers.rollout import GroupRequest

FOLDER = "replay"  # in the run directory


class Retraining:
    """Keeps the judged responses of each step, and trains the reward model on them at the end of an iteration."""

    def __init__(
        self, config: RunConfig, reward_model: RewardModelGroup, reward: RewardPool, tell: Callable[[str], None]
    ) -> None:
        self.config, self.reward_model, self.reward, self.tell = config, reward_model, reward, tell
        self.settings = config.reward_model.retrain
        self.store = JudgedResponses(Path(config.trainer.default_local_dir).absolute() / FOLDER)

    def resumed_from(self, checkpoint: Path, step: int) -> None:
        """Take over the responses of the run that wrote a checkpoint after this step, if it has another folder.

        Raises:
            DataError: those of a step are missing, or cannot be copied.
        """
        within = step % self.settings.freq
        needed = range(1 if self.config.reward_model.replay_share else step - within + 1, step + 1)
        theirs = JudgedResponses(checkpoint.absolute().parent / FOLDER)
        theirs.check(needed)
        if theirs.folder.resolve() != self.store.folder.resolve():
            theirs.copy(needed, self.store)

    async def end_step(self, step: int, batch: DataProtoRef, requests: Sequence[GroupRequest]) -> dict[str, float]:
        """Write the responses of a step. If an iteration ends with it, train the reward model, and return metrics."""
        conversations = {request.uid: request.task.messages for request in requests}
        await self.reward.write_judged(batch, str(self.store.file(step)), conversations)
        return {} if step % self.settings.freq else await self._retrain(step)

    async def _retrain(self, step: int) -> dict[str, float]:
        examples, counts = await asyncio.to_thread(self._examples, step)
        size, metrics = self.settings.train_batch_size, []
        for epoch in range(self.settings.train_epochs):
            order = np.random.default_rng([self.config.trainer.seed, step, epoch]).permutation(len(examples))
            for start in range(0, len(order), size):
                chosen = [examples[i] for i in order[start : start + size]]
                parts = rank_shares(chosen, len(self.reward_model.workers), "labels")
                metrics.append(await self.reward_model.train(parts, LabelSettings(), step))
        counted = {f"reward_model/{name}": float(number) for name, number in counts.items()}
        return (metric_values(averaged(metrics)) if metrics else {}) | counted

    def _examples(self, step: int) -> tuple[list[TrainingExample], dict[str, int]]:
        """The responses to train on, and the number of rows, also of those that are left out, by their metrics' names.

        What the policy wrote never ends the run: a response that is too long or cannot be labelled is left out. What is
        wrong with tokenizer and chat template themselves has been found before.
        """
        share, seed = self.config.reward_model.replay_share, self.config.trainer.seed
        selection = self.store.select(step - self.settings.freq + 1, step, share, seed=seed)
        label, most = self._reader
        examples: dict[str, list[TrainingExample]] = {"fresh": [], "replayed": []}
        counts = {"fresh_rows": len(selection.fresh), "replayed_rows": len(selection.replayed)}
        counts |= {"repeated_rows": selection.repeated, "long_rows": 0, "unusable_rows": 0}
        reason = ""
        for name, rows in (("fresh", selection.fresh), ("replayed", selection.replayed)):
            for row in rows:
                try:
                    example = label(row)
                except DataError as error:
                    counts["unusable_rows"] += 1
                    reason = reason or f"; of the unusable ones: {error}"
                    continue
                if example.num_tokens > most:
                    counts["long_rows"] += 1
                else:
                    examples[name].append(example)
        if not examples["fresh"]:
            kinds = ", ".join(f"{name} {number}" for name, number in counts.items())
            self.tell(
                f"reward_model.retrain: no response of the {self.settings.freq} steps up to {step} is left to train on "
                f"({kinds}{reason}). A policy that repeats what it wrote before has collapsed: stop the run and look "
                f"at its responses. Where they are too long, raise reward_model.max_length={most}"
            )
        return examples["fresh"] + examples["replayed"], counts

    @functools.cached_property
    def _reader(self) -> tuple[Callable[[LabelledSteps], TrainingExample], int]:
        """Return what makes an example of a response as the reward model scores it, and the most tokens of one."""
        section = self.config.reward_model
        folder = resolve_model_path(str(section.model.path), weights=False, key=REWARD_MODEL_KEY)
        read = read_model_config(folder, f"{REWARD_MODEL_KEY}={section.model.path}")
        tokenizer = load_tokenizer(folder, trust_remote_code=section.model.trust_remote_code, key=REWARD_MODEL_KEY)
        positions = max_positions(read.to_dict())
        form = step_form(section.process, self.config.reward.step_separator)
        label = functools.partial(label_answer, tokenizer=tokenizer, padding_id=padding_id(read), form=form)
        return label, section.max_length or (positions[1] if positions else sys.maxsize)
