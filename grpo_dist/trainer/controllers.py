"""Numbers of the objective that a run moves from step to step: they are part of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_dist.algorithms.controllers import AgentBaselines, EntropyController, KLController
from grpo_dist.algorithms.settings import ObjectiveSettings, TargetSettings
from grpo_dist.config.schema import RunConfig
from grpo_dist.trainer.checkpoint.folder import RunState


@dataclass
class Controllers:
    """Coefficient of the KL penalty in the reward, weight of the entropy bonus, and the baselines of agents."""

    kl: KLController
    entropy: EntropyController
    baselines: AgentBaselines

    @classmethod
    def of(cls, config: RunConfig) -> Controllers:
        """Return those of a run that begins."""
        kl, actor = config.algorithm.kl_ctrl, config.actor_rollout_ref.actor
        return cls(
            KLController(kl.kl_coef, kl.target_kl if kl.type == "adaptive" else None, kl.horizon),
            EntropyController(actor.entropy_coeff, actor.entropy_target, actor.entropy_delta),
            AgentBaselines(config.algorithm.rae_decay),
        )

    def targets(self, settings: TargetSettings) -> TargetSettings:
        """Return the settings of the coming step's targets."""
        return settings.with_agent_baselines(self.baselines.values)

    def objective(self, settings: ObjectiveSettings) -> tuple[ObjectiveSettings, dict[str, float]]:
        """Return the settings of the coming step's loss, and metrics."""
        if self.entropy.target is None:
            return settings, {}
        weight = self.entropy.weight
        return settings.with_entropy_coeff(weight), {"actor/entropy_coeff": weight}

    def after_targets(self, metrics: Mapping[str, float], num_sequences: int) -> dict[str, float]:
        """Take in the metrics of a step's targets; returns what the targets were made with, as metrics."""
        used = self.baselines.metrics()
        if "actor/reward_kl_penalty" in metrics:
            self.kl.update(metrics["actor/reward_kl_penalty"], num_sequences)
        self.baselines.update(metrics)
        return used

    def state(self) -> dict[str, Any]:
        """Return these fields of `RunState`."""
        baselines = {str(role): value for role, value in self.baselines.values.items()}
        return {"kl_coef": self.kl.coef, "entropy": self.entropy.state_dict(), "baselines": baselines}

    def load(self, state: RunState) -> None:
        """Go on where `state` was taken; what does not move stays the config's."""
        if self.kl.target_kl is not None:
            self.kl.coef = state.kl_coef
        self.entropy.load_state_dict(state.entropy)
        self.baselines.values = {int(role): value for role, value in state.baselines.items()}
