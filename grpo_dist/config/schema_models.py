"""The typed config of models beside the policy: `reward_model`. See schema.py."""

from __future__ import annotations

from grpo_dist.config.field_types import Count, Section, Text
from grpo_dist.config.schema_roles import ActorConfig, ForwardConfig


class RewardModelFolderConfig(Section):
    """`reward_model.model`: what is loaded, and how conversations reach it."""

    path: Text | None
    input_tokenizer: Text | None
    trust_remote_code: bool
    fsdp_config: ForwardConfig


class RewardModelConfig(Section):
    """`reward_model`: a model that scores the responses."""

    enable: bool
    model: RewardModelFolderConfig
    micro_batch_size_per_gpu: Count
    use_dynamic_bsz: bool | None
    forward_max_token_len_per_gpu: Count | None
    max_length: Count | None

    def max_token_len(self, actor: ActorConfig) -> int | None:
        """Most tokens of a forward pass; None: it is filled by sequences."""
        dynamic = actor.use_dynamic_bsz if self.use_dynamic_bsz is None else self.use_dynamic_bsz
        return (self.forward_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu) if dynamic else None
