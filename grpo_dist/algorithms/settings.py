"""What a batch is prepared with and a model is trained for: targets and losses, under verl's names. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

# Columns of what a teacher tells of its likeliest tokens.
TOP_IDS, TOP_LOG_PROBS = "ref_top_ids", "ref_top_log_probs"
GRADIENT_NORMS = "old_gradient_norms"


ENTROPY_WEIGHT = "actor/entropy_coeff"  # the metric of a weight that a target moves


@dataclass(frozen=True)
class TargetSettings:
    """The settings by which a batch is prepared for the update, under verl's names.

    Attributes:
        old_log_probs_from: whose log-probs are the old ones. "actor": the actor's, computed before the update.
            "rollout": the sampler's; corrections, if any, are the objective's. "update": those of the update to come,
            so that nothing here may need them.
        observations: whether the loss has a term of the tokens that answer the policy's turns.
        has_values: whether values are a column; else those of an estimator that needs them are 0.
        by_agent: whether the tokens of each agent are compared as a sequence of their own.
    """

    adv_estimator: str
    options: Mapping[str, Any] = field(default_factory=dict)
    kl_penalty: str | None = None
    rollout_correction: Mapping[str, Any] = field(default_factory=dict)
    m2_threshold: float | None = None
    old_log_probs_from: Literal["actor", "rollout", "update"] = "actor"
    mask_truncated: bool = False
    mask_equal_groups: bool = False
    top_entropy_quantile: float = 1.0
    loss_mode: str = "vanilla"
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    by_prompt: bool = False
    observations: bool = False
    has_values: bool = False
    by_agent: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """Return what the advantage estimator needs besides the rewards."""
        from grpo_dist.algorithms.advantage import ADVANTAGE  # torch, which plans do without

        return ADVANTAGE.needs(self.adv_estimator)

    def with_agent_baselines(self, values: Mapping[int, float]) -> TargetSettings:
        """The same with the baselines of agents (`AgentBaselines`), if the estimator reads them."""
        if "agent_baselines" not in self.needs:
            return self
        return replace(self, options={**self.options, "agent_baselines": dict(values)})

    @property
    def columns(self) -> tuple[str, ...]:
        """Per-token columns that `compute_targets` reads."""
        optional = {
            "old_log_probs": self.old_log_probs_from == "actor",
            "ref_log_probs": self.kl_penalty is not None,
            "old_entropies": self.top_entropy_quantile < 1 or "entropies" in self.needs,
            GRADIENT_NORMS: "gradient_norms" in self.needs,
            "responses": "turn_states" in self.needs,
            "predecessors": "turn_states" in self.needs or self.observations,
            "step_mask": "step_mask" in self.needs,
            "values": self.has_values,
            "agent_ids": self.by_agent,
        }
        always = ("token_level_scores", "response_mask", "rollout_log_probs")
        return (*always, *(name for name, wanted in optional.items() if wanted))


@dataclass(frozen=True)
class ObjectiveSettings:
    """The loss of a policy, `algorithms.objective.policy_objective`: the actor's section, and what the run adds to it.

    Attributes:
        actor: the section `actor_rollout_ref.actor`, or any object with its names. Names of code are valid in every
            folder, and `loss_scale_factor` is the constant length of seq-mean-token-sum-norm.
        by_top_tokens: the exact KL is over the tokens alone of which the teacher tells.
        teaches_itself: the KL is that of responses whose teacher was shown something, alone (`teacher_mask`).
        on_policy: the old log-probs are those of the forward pass that trains, without gradient.
    """

    actor: Any
    weighted: bool = False
    selects_tokens: bool = False
    correction: Mapping[str, Any] | None = None
    off_policy_threshold: float | None = None
    by_top_tokens: bool = False
    teaches_itself: bool = False
    on_policy: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The options of the policy loss by verl's names: the section's keys, those of its `policy_loss` among them."""
        return vars(self.actor) | vars(self.actor.policy_loss)

    def with_entropy_coeff(self, value: float) -> ObjectiveSettings:
        """The same with another weight of the entropy bonus."""
        return replace(self, actor=self.actor.replaced(entropy_coeff=value))

    @property
    def exact_kl(self) -> bool:
        """Tell if the KL is taken over the vocabulary, from the reference's hidden states."""
        return self.actor.use_kl_loss and self.actor.kl_loss_type == "full"

    @property
    def needs_head(self) -> bool:
        """Tell if the exact KL is computed with the output layer of the reference."""
        return self.exact_kl and not self.by_top_tokens

    @property
    def columns(self) -> tuple[str, ...]:
        """Per-token columns the objective reads."""
        optional = {
            "old_log_probs": not self.on_policy,
            "advantages": True,
            "ref_log_probs": self.actor.use_kl_loss and not self.exact_kl,
            "ref_hidden_states": self.needs_head,
            TOP_IDS: self.by_top_tokens,
            TOP_LOG_PROBS: self.by_top_tokens,
            "teacher_mask": self.teaches_itself,
            "rollout_is_weights": self.weighted,
            "rollout_log_probs": (self.on_policy and self.correction is not None)
            or self.off_policy_threshold is not None,
            "selected_tokens": self.selects_tokens,
            "observation_mask": self.actor.observation_coeff != 0,
            "prompt_weights": self.actor.loss_agg_mode == "prompt-mean",
        }
        return tuple(name for name, wanted in optional.items() if wanted)


@dataclass(frozen=True)
class PreferenceSettings:
    """The loss of pairs, `algorithms.supervised.pair_loss`. The two rows of a pair have the same uid."""

    columns: ClassVar[tuple[str, ...]] = ("labels",)


@dataclass(frozen=True)
class LabelSettings:
    """The loss of labelled tokens, `algorithms.supervised.label_loss`."""

    columns: ClassVar[tuple[str, ...]] = ("labels",)


@dataclass(frozen=True)
class SFTSettings:
    """The loss of supervised fine-tuning, `algorithms.supervised.supervised_loss`, of tokens whose mask is 1."""

    columns: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class ValueSettings:
    """The loss of a critic, `algorithms.value_loss.compute_value_loss`; `section` is any object with its names."""

    section: Any
    loss_scale_factor: float | None = None
    columns: ClassVar[tuple[str, ...]] = ("values", "returns")


# What a model is trained for; engines/train/objectives.py has the objective of each.
TrainingSettings = ObjectiveSettings | PreferenceSettings | LabelSettings | SFTSettings | ValueSettings
