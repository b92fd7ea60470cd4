"""The typed config of the roles: `actor_rollout_ref`, `reward_model` and `critic`. See schema.py."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from grpo_dist.config import field_types
from grpo_dist.config.field_types import Count, Float, NonNegativeFloat, PositiveFloat, Resume, Section, Share, Text
from grpo_dist.plugins import names
from grpo_dist.plugins.names import KL_LOSS_TYPES, LOSS_MODES, LossAggMode, WeightTransport

Device = Literal["cpu", "cuda"]
Colocation = Literal["separate", "actor_ref", "all"]  # which roles share GPUs
ALL_LINEAR = "all-linear"  # of `target_modules`
ADAPTER_KEY, LORA_RANK, ULYSSES = "lora_adapter_path", "lora_rank", "ulysses_sequence_parallel_size"


class LoraSyncConfig(Section):
    """`actor_rollout_ref.model.lora`: how LoRA's factors come to the engines."""

    merge: Annotated[bool, Resume.SHOWN]


class LoraSection(Section):
    """LoRA's keys in the section of a model that trains, and the path of their base model."""

    path: Annotated[Text, Resume.OTHER_MODEL]
    lora_rank: Annotated[field_types.NonNegativeInt, Resume.OTHER_FACTORS]
    lora_alpha: Annotated[NonNegativeFloat, Resume.OTHER_FACTORS]
    target_modules: Annotated[tuple[Text, ...], field_types.Names, Resume.OTHER_LAYERS]
    exclude_modules: Annotated[Annotated[tuple[Text, ...], field_types.Names] | None, Resume.OTHER_LAYERS]
    lora_adapter_path: Annotated[Text | None, Resume.FREE]

    @field_validator("lora_alpha")
    def _adds_something(cls, alpha: float, others: ValidationInfo) -> float:
        if alpha == 0 and others.data.get("lora_rank"):
            raise ValueError(f"must be greater than 0 with lora_rank={others.data['lora_rank']}")
        return alpha

    @property
    def trains_factors(self) -> bool:
        """Tell if LoRA's factors are trained, beside weights that stay as they are."""
        return self.lora_rank > 0

    @property
    def targets(self) -> str | tuple[str, ...]:
        """The modules that get factors: "all-linear" (all but the output layer), or the ends of their names."""
        return ALL_LINEAR if self.target_modules == (ALL_LINEAR,) else self.target_modules

    @property
    def targets_output_layer(self) -> bool:
        """Tell if LoRA's factors are to stand beside the output layer, by its usual name."""
        lists = (self.target_modules, self.exclude_modules or ())
        targets, excluded = ({name.rpartition(".")[2] for name in listed} for listed in lists)
        return "lm_head" in targets - excluded

    @property
    def factors(self) -> dict[str, Any]:
        """Rank and scale of the factors, by the names of peft's config."""
        alpha = self.lora_alpha
        return {"r": self.lora_rank, "lora_alpha": int(alpha) if alpha.is_integer() else alpha}

    def without_factors(self) -> Self:
        """Return the section of the base model alone."""
        return self.replaced(lora_rank=0)


class RecomputedConfig(Section):
    """The key that says what layers keep for their backward pass, with a constant in place of one that it lacks."""

    enable_activation_offload: ClassVar[bool] = False

    enable_gradient_checkpointing: Annotated[bool, Resume.FREE]


class ModelConfig(LoraSection):
    """`actor_rollout_ref.model`: the policy that all three roles load."""

    trust_remote_code: Annotated[bool, Resume.FREE]
    use_remove_padding: Annotated[bool, Resume.FREE]
    enable_gradient_checkpointing: Annotated[bool, Resume.FREE]
    enable_activation_offload: Annotated[bool, Resume.FREE]
    lora: LoraSyncConfig
    head_dtype: Annotated[field_types.HeadDtypeName | None, Resume.SHOWN]
    override_config: Annotated[dict[str, Any], Resume.OTHER_MODEL]

    @property
    def sends_factors(self) -> bool:
        """Tell if engines get LoRA's factors alone, not the whole weights with factors merged."""
        return self.trains_factors and not self.lora.merge


class AdamWConfig(Section):
    """`reward_model.retrain.optim`: AdamW at a constant rate, since how many steps there will be is not known."""

    lr: PositiveFloat
    weight_decay: NonNegativeFloat
    betas: Annotated[tuple[field_types.DecayRate, field_types.DecayRate], field_types.Pair]
    override_optimizer_config: field_types.Entries | None

    @field_validator("override_optimizer_config")
    def _names_no_key(cls, entries: field_types.Entries | None) -> field_types.Entries | None:
        if keys := [name for name in entries or () if name in cls.model_fields]:
            raise ValueError(f"{', '.join(keys)} has a key of its own beside this one; set that")
        return entries


class OptimConfig(AdamWConfig):
    """`actor_rollout_ref.actor.optim`: AdamW and its schedule, which is counted in optimizer steps."""

    optimizer: Annotated[field_types.OptimizerName, Resume.SHOWN]
    lr_warmup_steps: field_types.NonNegativeOrMinusOne
    lr_warmup_steps_ratio: Share
    lr_scheduler_type: Literal["constant", "linear", "cosine"]
    min_lr_ratio: Share

    def warmup_steps(self, total_steps: int) -> int:
        """Return the optimizer steps in which the rate rises; -1 means `lr_warmup_steps_ratio` of all steps."""
        steps = self.lr_warmup_steps
        return steps if steps >= 0 else math.floor(self.lr_warmup_steps_ratio * total_steps)


class ShardsConfig(Section):
    """The keys of every section that says how a role's weights are held."""

    dtype: Annotated[field_types.PassDtypeName | None, Resume.SHOWN]
    use_torch_compile: Annotated[bool | None, Resume.SHOWN]
    param_offload: Annotated[bool, Resume.FREE]


class ForwardConfig(ShardsConfig):
    """`fsdp_config` of a role that only runs forward; constants stand in place of keys that it lacks."""

    fsdp_size: ClassVar[int] = -1
    defer_grad_sync: ClassVar[bool] = False

    def num_shards(self, ranks: int) -> int:
        """Return how many of so many ranks hold one copy of the weights together: all of them."""
        return ranks


class FSDPConfig(ShardsConfig):
    """`actor_rollout_ref.actor.fsdp_config`."""

    model_dtype: Annotated[field_types.TrainDtypeName, Resume.OTHER_DTYPE]
    reshard_after_forward: Annotated[bool, Resume.FREE]
    fsdp_size: Annotated[field_types.CountOrMinusOne, Resume.FREE]
    defer_grad_sync: Annotated[bool, Resume.FREE]
    optimizer_offload: Annotated[bool, Resume.FREE]

    def num_shards(self, ranks: int) -> int:
        """Return how many of so many ranks hold one copy of the weights together."""
        return ranks if self.fsdp_size < 0 else min(self.fsdp_size, ranks)


class CheckpointConfig(Section):
    """`actor_rollout_ref.actor.checkpoint`: how checkpoints are written."""

    async_save: Annotated[bool, Resume.FREE]


class UpdateSection(Section):
    """Keys of a role that trains: its optimizer, and how a batch becomes its steps and their passes."""

    ppo_mini_batch_size: Count
    ppo_micro_batch_size_per_gpu: Annotated[Count, Resume.FREE]
    use_dynamic_bsz: Annotated[bool, Resume.FREE]
    ppo_max_token_len_per_gpu: Annotated[Count, Resume.FREE]
    ulysses_sequence_parallel_size: Annotated[field_types.Processes, Resume.FREE]
    ppo_epochs: Count
    shuffle: bool
    grad_clip: PositiveFloat
    loss_agg_mode: LossAggMode
    optim: OptimConfig


class PolicyLossConfig(Section):
    """`actor_rollout_ref.actor.policy_loss`: which loss, and options that only some of them read."""

    loss_mode: Annotated[str, field_types.builtin_or_custom(LOSS_MODES)]
    clip_cov_ratio: Share
    clip_cov_lb: Float
    clip_cov_ub: Float
    kl_cov_ratio: Share
    ppo_kl_coef: NonNegativeFloat
    dro_beta: NonNegativeFloat
    vespo_k_pos: PositiveFloat
    vespo_lambda_pos: PositiveFloat
    vespo_k_neg: PositiveFloat
    vespo_lambda_neg: PositiveFloat


class RouterReplayConfig(Section):
    """`actor_rollout_ref.actor.router_replay`: which experts of a mixture the trainer's passes send tokens to."""

    mode: Literal["disabled", "R3"]


class ActorConfig(UpdateSection):
    """`actor_rollout_ref.actor`: the objective and its optimizer."""

    use_prefix_grouper: Annotated[bool, Resume.FREE]
    freeze_vision_tower: bool
    clip_ratio: PositiveFloat
    clip_ratio_low: PositiveFloat | None
    clip_ratio_high: PositiveFloat | None
    clip_ratio_c: Annotated[PositiveFloat, Field(gt=1)]
    tau_pos: PositiveFloat
    tau_neg: PositiveFloat
    loss_scale_factor: PositiveFloat | None
    entropy_coeff: NonNegativeFloat
    entropy_target: PositiveFloat | None
    entropy_delta: NonNegativeFloat
    observation_coeff: NonNegativeFloat
    top_entropy_quantile: field_types.PositiveShare
    use_kl_loss: bool
    kl_loss_coef: NonNegativeFloat
    kl_loss_type: Annotated[str, field_types.builtin_or_custom(KL_LOSS_TYPES)]
    policy_loss: PolicyLossConfig
    fsdp_config: FSDPConfig
    checkpoint: CheckpointConfig
    router_replay: RouterReplayConfig

    @property
    def computes_entropy(self) -> bool:
        """Tell if the entropy is a term of the loss, or may become one."""
        return self.entropy_coeff != 0 or self.entropy_target is not None


class ValKwargsConfig(Section):
    """`actor_rollout_ref.rollout.val_kwargs`: sampling during validation."""

    do_sample: bool
    temperature: Annotated[Float, Field(ge=0, le=2)]  # engines accept no more than 2
    top_p: field_types.PositiveShare
    top_k: field_types.CountOrMinusOne
    n: Count


class AgentConfig(Section):
    """`actor_rollout_ref.rollout.agent`: what runs an episode."""

    default_agent_loop: Annotated[str, field_types.builtin_or_custom(names.AGENT_LOOPS)]
    agent_kwargs: dict[str, Any]
    timeout_s: Annotated[PositiveFloat, Resume.FREE]
    episode_timeout_s: PositiveFloat | None
    max_assistant_turns: Count | None
    max_concurrent_episodes: Count | None
    endpoint_host: Annotated[field_types.BoundAddress, Resume.FREE]
    endpoint_advertised_host: Annotated[field_types.ReachableHost | None, Resume.FREE]
    endpoint_kwargs: dict[str, Any]
    max_attempts: Annotated[Count, Resume.SHOWN]
    max_failure_rate: Share
    reward_function_weight: NonNegativeFloat

    @property
    def is_single_turn(self) -> bool:
        """Tell if an episode is one response, which a whole group can share a request for."""
        return self.default_agent_loop == names.AGENT_LOOPS[0]


def _verls_backend(value: Any) -> Any:
    return {"nccl": "broadcast", "naive": None}.get(value, value) if isinstance(value, str) else value


class CheckpointEngineConfig(Section):
    """`actor_rollout_ref.rollout.checkpoint_engine`: how new weights reach the engines."""

    backend: Annotated[WeightTransport | None, BeforeValidator(_verls_backend)]
    update_weights_bucket_megabytes: Count
    changes_only: bool

    @property
    def bucket_bytes(self) -> int:
        """The size of a bucket of weights."""
        return self.update_weights_bucket_megabytes << 20


class RolloutConfig(Section):
    """`actor_rollout_ref.rollout`: the engine and how it samples."""

    name: Annotated[str, field_types.builtin_or_custom(names.ROLLOUT_ENGINES)]
    n: Count
    temperature: Annotated[Float, Field(gt=0, le=2)]
    top_p: field_types.PositiveShare
    top_k: field_types.CountOrMinusOne
    min_p: Share
    min_tokens: field_types.NonNegativeInt
    stop: Annotated[tuple[Text, ...], field_types.OptionalNames]
    bad_words: Annotated[tuple[Text, ...], field_types.OptionalNames]
    dtype: Annotated[field_types.RolloutDtypeName | None, Resume.SHOWN]
    gpu_memory_utilization: Annotated[field_types.PositiveShare, Resume.FREE]
    kv_cache_memory_gib: Annotated[PositiveFloat | None, Resume.FREE]
    free_cache_engine: Annotated[bool, Resume.FREE]
    tensor_model_parallel_size: Annotated[field_types.Processes, Resume.FREE]
    max_model_len: Annotated[Count | None, Resume.SHOWN]
    max_num_seqs: Annotated[Count, Resume.FREE]
    max_num_batched_tokens: Annotated[Count, Resume.FREE]
    enforce_eager: Annotated[bool, Resume.FREE]
    enable_chunked_prefill: Annotated[bool, Resume.FREE]
    deterministic: Annotated[bool | None, Resume.SHOWN]
    log_prob_micro_batch_size_per_gpu: Annotated[Count, Resume.FREE]
    over_sample_rate: Share
    partial_rollout: bool
    clear_kv_cache_on_update: bool
    ignore_eos: bool
    engine_kwargs: Annotated[dict[str, dict[str, Any]], Resume.SHOWN]
    log_prob_use_dynamic_bsz: Annotated[bool | None, Resume.FREE]
    log_prob_max_token_len_per_gpu: Annotated[Count | None, Resume.FREE]
    startup_timeout_s: Annotated[PositiveFloat, Resume.FREE]
    checkpoint_engine: Annotated[CheckpointEngineConfig, Resume.FREE]
    val_kwargs: Annotated[ValKwargsConfig, Resume.FREE]
    agent: AgentConfig


class TeacherEndpointConfig(Section):
    """`actor_rollout_ref.ref.model.endpoint`: a teacher that a server of its own runs."""

    base_url: Annotated[Text | None, Resume.FREE]
    model: Text | None
    top_k: Count
    timeout_s: Annotated[PositiveFloat, Resume.FREE]
    headers_env: Annotated[Text | None, Resume.FREE]


class RefModelConfig(Section):
    """`actor_rollout_ref.ref.model`: a teacher, in the place of the policy's own start."""

    path: Text | dict[Text, Text] | None
    endpoint: TeacherEndpointConfig
    trust_remote_code: Annotated[bool, Resume.FREE]
    override_config: dict[str, Any]


class RefConfig(Section):
    """`actor_rollout_ref.ref`: the frozen reference."""

    model: RefModelConfig
    log_prob_micro_batch_size_per_gpu: Annotated[Count, Resume.FREE]
    log_prob_use_dynamic_bsz: Annotated[bool | None, Resume.FREE]
    log_prob_max_token_len_per_gpu: Annotated[Count | None, Resume.FREE]
    ulysses_sequence_parallel_size: Annotated[field_types.Processes, Resume.FREE]
    ref_model_sync_steps: field_types.CountOrMinusOne
    ref_model_mixup_alpha: field_types.PositiveShare
    fsdp_config: ForwardConfig

    def moves_after(self, step: int) -> bool:
        """Tell if the reference moves towards the policy after a training step."""
        return self.ref_model_sync_steps > 0 and step % self.ref_model_sync_steps == 0


class ActorRolloutRefConfig(Section):
    """`actor_rollout_ref`: the three roles and the model they share."""

    nccl_timeout: Annotated[Count, Resume.FREE]
    model: ModelConfig
    actor: ActorConfig
    rollout: RolloutConfig
    ref: RefConfig


# --- models beside the policy ----------------------------------------------------------------------------------------
_OTHER_WHERE_IT_TRAINS = field_types.Mark("refused", Resume.OTHER_MODEL.why, switch="reward_model.retrain.freq")
_ITERATIONS = field_types.Mark("refused", "the judged responses of earlier steps are those of the saved iterations")


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

    freq: Annotated[field_types.CountOrMinusOne, _ITERATIONS]
    label: Text
    train_epochs: Count
    train_batch_size: Count
    micro_batch_size_per_gpu: Annotated[Count, Resume.FREE]
    max_token_len_per_gpu: Annotated[Count | None, Resume.FREE]
    model_dtype: Annotated[field_types.TrainDtypeName, Resume.OTHER_DTYPE]
    optimizer_offload: Annotated[bool, Resume.FREE]
    optim: AdamWConfig
    grad_clip: PositiveFloat


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
        return self.enable and self.retrain.freq > 0


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

    enable: Annotated[bool | None, field_types.Mark("refused", "a checkpoint has such a model if its run had one")]
    model: CriticModelConfig
    forward_micro_batch_size_per_gpu: Annotated[Count, Resume.FREE]
    forward_max_token_len_per_gpu: Annotated[Count, Resume.FREE]
    cliprange_value: PositiveFloat
