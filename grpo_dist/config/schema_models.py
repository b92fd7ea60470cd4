"""The typed config of models beside the policy: `reward_model` and `critic`. See schema.py."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from grpo_dist.config.field_types import (
    Count,
    CountOrMinusOne,
    PositiveFloat,
    Resume,
    Section,
    Share,
    Text,
    TrainDtypeName,
)
from grpo_dist.config.schema_roles import (
    AdamWConfig,
    ForwardConfig,
    FSDPConfig,
    RecomputedConfig,
    UpdateSection,
)

_OTHER_WHERE_IT_TRAINS = Resume.REFUSED(Resume.OTHER_MODEL.why, switch="reward_model.retrain.freq")


class RewardModelFolderConfig(Section):
    """`reward_model.model`: what is loaded, and how conversations reach it."""

    override_config: ClassVar[dict[str, Any]] = {}

    path: Annotated[Text | None, _OTHER_WHERE_IT_TRAINS]
    input_tokenizer: Text | None
    trust_remote_code: Annotated[bool, Resume.FREE]
    fsdp_config: ForwardConfig


class ProcessRewardConfig(Section):
    """`reward_model.process`: a reward model that judges every step."""

    enable: bool
    step_tag: Text | None
    good: Text | None
    bad: Text | None

    @property
    def judging_tokens(self) -> tuple[str, str] | None:
        """The tokens for bad and good of a causal LM that judges steps; None: the model has a head."""
        return None if self.bad is None or self.good is None else (self.bad, self.good)


class RetrainConfig(RecomputedConfig):
    """`reward_model.retrain`: the reward model learns from what the policy samples (DeepSeekMath, algorithm 1)."""

    freq: Annotated[
        CountOrMinusOne, Resume.REFUSED("the judged responses of earlier steps are those of the saved iterations")
    ]
    label: Text
    train_epochs: Count
    train_batch_size: Count
    micro_batch_size_per_gpu: Annotated[Count, Resume.FREE]
    max_token_len_per_gpu: Annotated[Count | None, Resume.FREE]
    model_dtype: Annotated[TrainDtypeName, Resume.OTHER_DTYPE]
    optimizer_offload: Annotated[bool, Resume.FREE]
    optim: AdamWConfig
    grad_clip: PositiveFloat

    @property
    def enable(self) -> bool:
        """Tell if the reward model is retrained."""
        return self.freq > 0


class RewardModelConfig(Section):
    """`reward_model`: a model that scores the responses."""

    enable: bool
    model: RewardModelFolderConfig
    process: ProcessRewardConfig
    micro_batch_size_per_gpu: Annotated[Count, Resume.FREE]
    use_dynamic_bsz: Annotated[bool | None, Resume.FREE]
    forward_max_token_len_per_gpu: Annotated[Count | None, Resume.FREE]
    max_length: Count | None
    replay_share: Share
    retrain: RetrainConfig

    @property
    def is_retrained(self) -> bool:
        """Tell if there is a reward model, and it trains."""
        return self.enable and self.retrain.enable


class CriticModelConfig(Section):
    """`critic.model`: what is loaded, and how it is held."""

    trust_remote_code: ClassVar[bool] = False

    path: Annotated[Text, Resume.OTHER_MODEL]
    enable_gradient_checkpointing: Annotated[bool, Resume.FREE]
    enable_activation_offload: Annotated[bool, Resume.FREE]
    override_config: Annotated[dict[str, Any], Resume.OTHER_MODEL]
    fsdp_config: FSDPConfig


class CriticConfig(UpdateSection):
    """`critic`: the model that foresees returns, its loss and its optimizer."""

    enable: Annotated[bool | None, Resume.REFUSED("a checkpoint has such a model if its run had one")]
    model: CriticModelConfig
    forward_micro_batch_size_per_gpu: Annotated[Count, Resume.FREE]
    forward_max_token_len_per_gpu: Annotated[Count, Resume.FREE]
    cliprange_value: PositiveFloat
