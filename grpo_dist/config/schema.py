"""The typed config: one frozen class per section of grpo.yaml.

Holds names, types and ranges of single keys. Defaults and the meaning of each key are in grpo.yaml (a key
missing on either side is an error), rules between keys in rules.py. What a
null value stands for, where several readers need it, is a method here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_dist.config.field_types import (
    Count,
    CountOrMinusOne,
    DecayRate,
    Files,
    Float,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    NonNegativeOrMinusOne,
    OptionalFiles,
    Pair,
    PositiveFloat,
    PositiveShare,
    PositiveTemperature,
    Section,
    Share,
    Temperature,
    Text,
    builtin_or_custom,
    one_of,
)
from grpo_dist.config.names import ADV_ESTIMATORS, KL_LOSS_TYPES, LOSS_AGG_MODES, LOSS_MODES, SAMPLED_KL_TYPES

Device = Literal["cpu", "cuda"]
TrainDtype = Literal["fp32", "bf16"]
RolloutDtype = Literal["float32", "bfloat16", "float16"]


class KLCtrlConfig(Section):
    """`algorithm.kl_ctrl`: the coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"]
    kl_coef: NonNegativeFloat
    target_kl: PositiveFloat
    horizon: PositiveFloat


class RolloutCorrectionConfig(Section):
    """`algorithm.rollout_correction`: the sampler is not quite the policy that trains."""

    rollout_is: Literal["token", "sequence"] | None
    rollout_is_threshold: PositiveFloat | Text
    rollout_is_batch_normalize: bool
    rollout_rs: Text | None
    rollout_rs_threshold: PositiveFloat | Text | None
    bypass_mode: bool
    loss_type: Literal["ppo_clip", "reinforce"]


class FilterGroupsConfig(Section):
    """`algorithm.filter_groups`: DAPO's dynamic sampling."""

    enable: bool
    metric: Text
    max_num_gen_batches: NonNegativeInt


class AlgorithmConfig(Section):
    """`algorithm`: how rewards become advantages."""

    adv_estimator: Annotated[str, builtin_or_custom(ADV_ESTIMATORS)]
    norm_adv_by_std_in_grpo: bool
    gamma: Share
    lam: Share
    f_norm: PositiveFloat
    gdpo_reward_keys: Annotated[tuple[Text, ...], Names] | None
    gdpo_reward_weights: Annotated[tuple[Float, ...], Pair] | None
    use_kl_in_reward: bool
    kl_penalty: Annotated[str, builtin_or_custom(SAMPLED_KL_TYPES)]
    kl_ctrl: KLCtrlConfig
    rollout_correction: RolloutCorrectionConfig
    filter_groups: FilterGroupsConfig
    mask_truncated_responses: bool


class DataConfig(Section):
    """`data`: the prompts."""

    train_files: Files
    val_files: OptionalFiles
    prompt_key: Text
    reward_fn_key: Text
    train_batch_size: Count
    train_max_samples: CountOrMinusOne
    val_max_samples: CountOrMinusOne
    max_prompt_length: Count
    max_response_length: Count
    filter_overlong_prompts: bool
    truncation: Literal["error", "left", "right", "middle"]
    shuffle: bool
    seed: NonNegativeInt | None
    apply_chat_template_kwargs: dict[str, Any]


class ModelConfig(Section):
    """`actor_rollout_ref.model`: the policy that all three roles load."""

    path: Text
    trust_remote_code: bool
    use_remove_padding: bool
    enable_gradient_checkpointing: bool


class PolicyLossConfig(Section):
    """`actor_rollout_ref.actor.policy_loss`: which loss, and options that only some of them read."""

    loss_mode: Annotated[str, builtin_or_custom(LOSS_MODES)]
    clip_cov_ratio: Share
    clip_cov_lb: Float
    clip_cov_ub: Float
    kl_cov_ratio: Share
    ppo_kl_coef: NonNegativeFloat
    dro_beta: NonNegativeFloat


class OptimConfig(Section):
    """`actor_rollout_ref.actor.optim`: AdamW and its schedule."""

    lr: PositiveFloat
    weight_decay: NonNegativeFloat
    betas: Annotated[tuple[DecayRate, DecayRate], Pair]
    lr_warmup_steps: NonNegativeOrMinusOne
    lr_warmup_steps_ratio: Share
    lr_scheduler_type: Literal["constant", "linear", "cosine"]
    min_lr_ratio: Share


class ForwardConfig(Section):
    """`fsdp_config` of a role that only runs forward."""

    dtype: TrainDtype | None

    def resolved_dtype(self, device: Device) -> TrainDtype:
        """Compute type; null means bf16 on GPU and fp32 on CPU."""
        return self.dtype or ("bf16" if device == "cuda" else "fp32")


class FSDPConfig(ForwardConfig):
    """`actor_rollout_ref.actor.fsdp_config`."""

    model_dtype: TrainDtype
    reshard_after_forward: bool
    fsdp_size: CountOrMinusOne


class ActorConfig(Section):
    """`actor_rollout_ref.actor`: the objective and its optimizer."""

    ppo_mini_batch_size: Count
    ppo_micro_batch_size_per_gpu: Count
    use_dynamic_bsz: bool
    ppo_max_token_len_per_gpu: Count
    use_prefix_grouper: bool
    ppo_epochs: Count
    shuffle: bool
    grad_clip: PositiveFloat
    clip_ratio: PositiveFloat
    clip_ratio_low: PositiveFloat | None
    clip_ratio_high: PositiveFloat | None
    clip_ratio_c: Annotated[PositiveFloat, Field(gt=1)]
    tau_pos: PositiveFloat
    tau_neg: PositiveFloat
    loss_agg_mode: Annotated[str, one_of(LOSS_AGG_MODES)]
    loss_scale_factor: PositiveFloat | None
    entropy_coeff: NonNegativeFloat
    top_entropy_quantile: PositiveShare
    use_kl_loss: bool
    kl_loss_coef: NonNegativeFloat
    kl_loss_type: Annotated[str, builtin_or_custom(KL_LOSS_TYPES)]
    policy_loss: PolicyLossConfig
    optim: OptimConfig
    fsdp_config: FSDPConfig

    @property
    def max_token_len(self) -> int | None:
        """Most tokens of a forward/backward pass; None: it is filled by sequences."""
        return self.ppo_max_token_len_per_gpu if self.use_dynamic_bsz else None

    def log_prob_max_token_len(self, role: RolloutConfig | RefConfig) -> int | None:
        """Most tokens of a log-prob pass of a role; None: it is filled by sequences."""
        dynamic = self.use_dynamic_bsz if role.log_prob_use_dynamic_bsz is None else role.log_prob_use_dynamic_bsz
        return (role.log_prob_max_token_len_per_gpu or self.ppo_max_token_len_per_gpu) if dynamic else None

    @property
    def clip_low(self) -> float:
        """Lower clip range: clip_ratio_low, or clip_ratio where that is null."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Upper clip range: clip_ratio_high, or clip_ratio where that is null."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


class ValKwargsConfig(Section):
    """`actor_rollout_ref.rollout.val_kwargs`: sampling during validation."""

    do_sample: bool
    temperature: Temperature
    top_p: PositiveShare
    top_k: CountOrMinusOne
    n: Count


class RolloutConfig(Section):
    """`actor_rollout_ref.rollout`: the engine and how it samples."""

    name: Literal["vllm"]
    n: Count
    temperature: PositiveTemperature
    top_p: PositiveShare
    top_k: CountOrMinusOne
    dtype: RolloutDtype | None
    gpu_memory_utilization: PositiveShare
    kv_cache_memory_gib: PositiveFloat | None
    tensor_model_parallel_size: Count
    max_model_len: Count | None
    max_num_seqs: Count
    max_num_batched_tokens: Count
    enforce_eager: bool
    enable_chunked_prefill: bool
    deterministic: bool | None
    log_prob_micro_batch_size_per_gpu: Count
    log_prob_use_dynamic_bsz: bool | None
    log_prob_max_token_len_per_gpu: Count | None
    startup_timeout_s: PositiveFloat
    val_kwargs: ValKwargsConfig

    def resolved_dtype(self, device: Device) -> RolloutDtype:
        """Type of the engine's weights; null means bfloat16 on GPU and float32 on CPU."""
        return self.dtype or ("bfloat16" if device == "cuda" else "float32")

    def resolved_deterministic(self, device: Device) -> bool:
        """Whether samples are seeded one by one; null means on CPU only."""
        return device == "cpu" if self.deterministic is None else self.deterministic

    def resolved_max_model_len(self, data: DataConfig) -> int:
        """Longest prompt + response in tokens; null means the sum of the two limits in `data`."""
        longest = data.max_prompt_length + data.max_response_length
        return longest if self.max_model_len is None else self.max_model_len


class RefConfig(Section):
    """`actor_rollout_ref.ref`: the frozen reference."""

    log_prob_micro_batch_size_per_gpu: Count
    log_prob_use_dynamic_bsz: bool | None
    log_prob_max_token_len_per_gpu: Count | None
    ref_model_sync_steps: CountOrMinusOne
    ref_model_mixup_alpha: PositiveShare
    fsdp_config: ForwardConfig


class ActorRolloutRefConfig(Section):
    """`actor_rollout_ref`: the three roles and the model they share."""

    model: ModelConfig
    actor: ActorConfig
    rollout: RolloutConfig
    ref: RefConfig


class CustomRewardFunctionConfig(Section):
    """`custom_reward_function`: your own scorer."""

    path: Text | None
    name: Text
    reward_kwargs: dict[str, Any]


class OverlongBufferConfig(Section):
    """`reward.overlong_buffer`: DAPO's soft overlong punishment."""

    enable: bool
    len: Count | None
    penalty_factor: NonNegativeFloat

    def resolved_len(self, data: DataConfig) -> int:
        """Tokens of the buffer; null means a fifth of the longest response."""
        return max(1, data.max_response_length // 5) if self.len is None else self.len


class RewardConfig(Section):
    """`reward`: the processes that score."""

    num_workers: Count
    timeout_s: PositiveFloat
    overlong_buffer: OverlongBufferConfig
    step_separator: Text


class TrainerConfig(Section):
    """`trainer`: the run, its records and its machines."""

    total_epochs: Count
    total_training_steps: Count | None
    seed: NonNegativeInt
    project_name: Text
    experiment_name: Text
    logger: Annotated[tuple[Literal["console", "jsonl", "tensorboard", "wandb"], ...], Names]
    default_local_dir: Text
    test_freq: CountOrMinusOne
    val_before_train: bool
    save_freq: CountOrMinusOne
    max_actor_ckpt_to_keep: Count | None
    resume_mode: Literal["auto", "disable", "resume_path"]
    resume_from_path: Text | None
    export_hf_model: bool
    log_rollouts: bool
    nnodes: Count
    n_gpus_per_node: NonNegativeInt
    worker_timeout_s: PositiveFloat
    dry_run: bool


class ClusterConfig(Section):
    """`cluster`: processes per role. null: placement.py decides."""

    actor_world_size: Count | None
    rollout_world_size: Count | None
    ref_world_size: Count | None
    num_cpus_per_worker: PositiveFloat | None
    num_threads_per_worker: Count | None


class RayInitConfig(Section):
    """`ray_kwargs.ray_init`: the Ray cluster."""

    address: Text | None
    num_cpus: Count | None


class RayKwargsConfig(Section):
    """`ray_kwargs`."""

    ray_init: RayInitConfig


class RunConfig(Section):
    """A whole run. Each part of the program gets its own section of it."""

    algorithm: AlgorithmConfig
    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    custom_reward_function: CustomRewardFunctionConfig
    reward: RewardConfig
    trainer: TrainerConfig
    cluster: ClusterConfig
    ray_kwargs: RayKwargsConfig

    @property
    def device(self) -> Device:
        """Where the roles run: "cpu" where the machines have no GPUs."""
        return "cpu" if self.trainer.n_gpus_per_node == 0 else "cuda"

    @property
    def num_gpus(self) -> int:
        """GPUs of all machines."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def needs_reference(self) -> bool:
        """Whether reference workers are started."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def data_seed(self) -> int:
        """Seed of the shuffle: data.seed, or trainer.seed where that is null."""
        return self.trainer.seed if self.data.seed is None else self.data.seed
