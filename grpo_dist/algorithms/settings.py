"""What a model is trained for: the settings of each loss, as plain numbers and names, under verl's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class ObjectiveSettings:
    """The loss of a policy, `algorithms.objective.policy_objective`.

    Attributes:
        loss_mode: the policy loss: a registered name, or `path/to/file.py:function`.
        loss_agg_mode: aggregation mode of all terms; see `algorithms.aggregate`.
        options: of the policy loss (clip_ratio, tau_pos, ...); `policy_loss.DEFAULTS` has those that are not given.
        use_kl_loss: whether the loss has a KL term.
        kl_loss_type: its estimator.
        kl_loss_coef: weight of the KL term.
        entropy_coeff: weight of the entropy bonus; 0: there is none.
        loss_scale_factor: constant length for seq-mean-token-sum-norm.
        weighted: whether the batch has importance weights for the sampler's policy.
        selects_tokens: whether the policy loss treats some tokens in another way.
        correction: options of `algorithms.correction.current_weights`, or None: no such weights.
        on_policy: the old log-probs are those of the forward pass that trains, without gradient.
    """

    loss_mode: str = "vanilla"
    loss_agg_mode: str = "token-mean"
    options: Mapping[str, Any] = field(default_factory=dict)
    use_kl_loss: bool = False
    kl_loss_type: str = "low_var_kl"
    kl_loss_coef: float = 0.0
    entropy_coeff: float = 0.0
    loss_scale_factor: float | None = None
    weighted: bool = False
    selects_tokens: bool = False
    correction: Mapping[str, Any] | None = None
    on_policy: bool = False

    @property
    def exact_kl(self) -> bool:
        """Tell if the KL is taken over the vocabulary, from the reference's hidden states."""
        return self.use_kl_loss and self.kl_loss_type == "full"

    @property
    def columns(self) -> tuple[str, ...]:
        """Per-token columns the objective reads."""
        optional = {
            "old_log_probs": not self.on_policy,
            "advantages": True,
            "ref_log_probs": self.use_kl_loss and not self.exact_kl,
            "ref_hidden_states": self.exact_kl,
            "rollout_is_weights": self.weighted,
            "rollout_log_probs": self.on_policy and self.correction is not None,
            "selected_tokens": self.selects_tokens,
        }
        return tuple(name for name, wanted in optional.items() if wanted)


@dataclass(frozen=True)
class PreferenceSettings:
    """The loss of pairs, `algorithms.preference.pair_loss`. The two rows of a pair have the same uid."""

    columns: ClassVar[tuple[str, ...]] = ("labels",)


@dataclass(frozen=True)
class LabelSettings:
    """The loss of labelled tokens, `algorithms.preference.label_loss`."""

    columns: ClassVar[tuple[str, ...]] = ("labels",)


@dataclass(frozen=True)
class SFTSettings:
    """The loss of supervised fine-tuning, `algorithms.supervised.supervised_loss`, of tokens whose mask is 1."""

    columns: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class ValueSettings:
    """The loss of a critic, `algorithms.value_loss.compute_value_loss`, under verl's names.

    Attributes:
        cliprange_value: how far a value may move from what it was before the update.
        loss_scale_factor: constant length for seq-mean-token-sum-norm.
    """

    cliprange_value: float
    loss_agg_mode: str
    loss_scale_factor: float | None = None
    columns: ClassVar[tuple[str, ...]] = ("values", "returns")


# What a model is trained for; engines/train/objectives.py has the objective of each.
TrainingSettings = ObjectiveSettings | PreferenceSettings | LabelSettings | SFTSettings | ValueSettings
