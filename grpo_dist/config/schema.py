"""The typed config: one frozen class per section of grpo.yaml.

Holds names, types and ranges of single keys. Defaults and the meaning of each key are in grpo.yaml (a key
missing on either side is an error), rules between keys in rules.py. What a
null value stands for, where several readers need it, is a method here. The roles are in schema_roles.py, models beside
the policy in schema_models.py, `trainer.health` in schema_health.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from grpo_dist.config.field_types import (
    Count,
    CountOrMinusOne,
    Distinct,
    DryRun,
    Files,
    Float,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    OptionalFiles,
    Pair,
    PositiveFloat,
    Section,
    Share,
    Text,
    TrainDtype,
    TrainDtypeName,
    builtin_or_custom,
)
from grpo_dist.config.processor import has_bf16
from grpo_dist.config.schema_health import HealthConfig
from grpo_dist.config.schema_models import RewardModelConfig
from grpo_dist.config.schema_roles import ActorRolloutRefConfig, Colocation, Device
from grpo_dist.names import (
    ADV_ESTIMATORS,
    REWARD_MODEL_FUNCTION,
    SAMPLED_KL_TYPES,
    TOKEN_SELECTING_LOSSES,
    WEIGHTED_FUNCTION,
)


class KLCtrlConfig(Section):
    """`algorithm.kl_ctrl`: the coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"]
    kl_coef: NonNegativeFloat
    target_kl: PositiveFloat
    horizon: PositiveFloat


class RolloutCorrectionConfig(Section):
    """`algorithm.rollout_correction`: the sampler is not quite the policy that trains."""

    rollout_is: Literal["auto", "token", "sequence"] | None
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
    gdpo_reward_keys: Annotated[Annotated[tuple[Text, ...], Names] | None, Distinct]
    gdpo_reward_weights: Annotated[tuple[Float, ...], Pair] | None
    use_kl_in_reward: bool
    kl_penalty: Annotated[str, builtin_or_custom(SAMPLED_KL_TYPES)]
    kl_ctrl: KLCtrlConfig
    rollout_correction: RolloutCorrectionConfig
    filter_groups: FilterGroupsConfig
    mask_truncated_responses: bool


class SamplerConfig(Section):
    """`data.sampler`: an order of the training prompts of your own."""

    class_path: Text | None
    class_name: Text | None


class DataConfig(Section):
    """`data`: the prompts."""

    train_files: Files
    val_files: OptionalFiles
    prompt_key: Text
    reward_fn_key: Text
    system_prompt: Text | None
    train_batch_size: Count
    gen_batch_size: Count | None
    train_max_samples: CountOrMinusOne
    val_max_samples: CountOrMinusOne
    max_prompt_length: Count
    max_response_length: Count
    filter_overlong_prompts: bool
    truncation: Literal["error", "left", "right", "middle"]
    shuffle: bool
    seed: NonNegativeInt | None
    sampler: SamplerConfig
    apply_chat_template_kwargs: dict[str, Any]


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


class RewardConfig(Section):
    """`reward`: the processes that score."""

    num_workers: Count
    timeout_s: PositiveFloat
    failure_score: Float
    max_failure_rate: Share
    overlong_buffer: OverlongBufferConfig
    step_separator: Text


TimedStage = Literal[
    "generate",
    "ref_log_prob",
    "old_log_prob",
    "reward_model",
    "update",
    "sync_weights",
    "save_checkpoint",
    "load_checkpoint",
    "export_hf_model",
]


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
    val_only: bool
    save_freq: CountOrMinusOne
    save_interval_minutes: PositiveFloat | None
    max_actor_ckpt_to_keep: Count | None
    keep_best_metric: Text | None
    resume_mode: Literal["auto", "disable", "resume_path"]
    resume_from_path: Text | None
    max_staleness: NonNegativeInt
    max_worker_restarts: NonNegativeInt
    max_actor_restarts: NonNegativeInt
    halve_on_out_of_memory: bool
    export_hf_model: bool
    export_dtype: TrainDtypeName | None
    log_rollouts: bool
    log_val_generations: NonNegativeInt
    nnodes: Count
    n_gpus_per_node: NonNegativeInt
    worker_timeout_s: PositiveFloat
    stage_timeout_s: dict[TimedStage, PositiveFloat | None]
    dry_run: DryRun
    health: HealthConfig

    @property
    def record_dir(self) -> Path:
        """Where config, metrics and samples are written. Validation alone leaves the training's record as it is."""
        return Path(self.default_local_dir, "val_only") if self.val_only else Path(self.default_local_dir)


class ClusterConfig(Section):
    """`cluster`: processes per role. null: placement.py decides."""

    actor_world_size: Count | None
    rollout_world_size: Count | None
    ref_world_size: Count | None
    reward_model_world_size: Count | None
    colocate: Colocation | None
    num_cpus_per_worker: PositiveFloat | None
    num_threads_per_worker: Count | None
    gpu_memory_gib: PositiveFloat | None


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
    reward_model: RewardModelConfig
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
    def default_dtype(self) -> TrainDtype:
        """bf16 on GPU, and on a CPU that has it; fp32 otherwise, and for the built-in model, whose runs are exact."""
        on_cpu = not self.actor_rollout_ref.model.is_builtin and has_bf16()
        return "bf16" if self.device == "cuda" or on_cpu else "fp32"

    @property
    def export_dtype(self) -> TrainDtype:
        """Type of the weights in the exported folder."""
        return self.trainer.export_dtype or self.actor_rollout_ref.actor.fsdp_config.model_dtype

    @property
    def num_gpus(self) -> int:
        """GPUs of all machines."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def needs_reference_workers(self) -> bool:
        """Whether reference workers are started: not with LoRA."""
        return self.needs_reference and self.actor_rollout_ref.model.lora_rank == 0

    @property
    def actor_is_reference(self) -> bool:
        """Whether the actor, its LoRA factors switched off, computes the reference's log-probs."""
        return self.needs_reference and not self.needs_reference_workers

    @property
    def needs_reference(self) -> bool:
        """Whether the KL to a reference is part of the loss or of the reward."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def reward_function(self) -> str | None:
        """Path of the reward function: null means the reward model's score, or without one the built-in scorers."""
        return self.custom_reward_function.path or (REWARD_MODEL_FUNCTION if self.reward_model.enable else None)

    @property
    def reward_paths(self) -> tuple[str | None, ...]:
        """Paths of the functions that make the reward, of a weighted sum those of its parts; None: built-in scorers."""
        custom = self.custom_reward_function
        functions = custom.reward_kwargs.get("functions") if custom.path == WEIGHTED_FUNCTION else None
        parts = functions if isinstance(functions, list) else []
        return tuple(part.get("path") for part in parts if isinstance(part, dict)) or (self.reward_function,)

    @property
    def needs_ground_truth(self) -> bool:
        """Whether every row must have a ground truth: not where a model scores, unless a built-in scorer does too."""
        return not self.reward_model.enable or None in self.reward_paths

    @property
    def rollout_is(self) -> Literal["token", "sequence"] | None:
        """Importance weights against the sampler; auto means where responses may be older than the policy."""
        correction = self.algorithm.rollout_correction
        if correction.rollout_is != "auto":
            return correction.rollout_is
        ratio_corrects = correction.bypass_mode and correction.loss_type == "ppo_clip"
        return "token" if self.trainer.max_staleness and not ratio_corrects else None

    @property
    def old_log_probs_from(self) -> Literal["actor", "rollout", "update"]:
        """Whose log-probs are the old ones: the actor's, computed before the update; the sampler's, with bypass_mode;
        or the update's own, where a batch is one optimizer step and nothing asks for them earlier.
        """
        algorithm, actor = self.algorithm, self.actor_rollout_ref.actor
        correction = algorithm.rollout_correction
        if correction.bypass_mode:
            return "rollout"
        one_step = actor.ppo_epochs == 1 and self.data.train_batch_size == actor.ppo_mini_batch_size
        asked_earlier = (
            algorithm.use_kl_in_reward
            or (self.rollout_is is not None and correction.rollout_is_batch_normalize)
            or correction.rollout_rs is not None
            or actor.top_entropy_quantile < 1
            or actor.policy_loss.loss_mode in TOKEN_SELECTING_LOSSES
        )
        return "update" if one_step and not asked_earlier else "actor"

    @property
    def on_policy(self) -> bool:
        """Whether the old log-probs are the update's own."""
        return self.old_log_probs_from == "update"

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the actor computes them before the update."""
        return self.old_log_probs_from == "actor"

    @property
    def max_model_len(self) -> int:
        """Longest prompt + response in tokens; null means the sum of the two limits in `data`."""
        longest = self.data.max_prompt_length + self.data.max_response_length
        return self.actor_rollout_ref.rollout.max_model_len or longest

    @property
    def overlong_buffer_len(self) -> int:
        """Tokens of the overlong buffer; null means a fifth of the longest response."""
        return self.reward.overlong_buffer.len or max(1, self.data.max_response_length // 5)

    @property
    def data_seed(self) -> int:
        """Seed of the shuffle: data.seed, or trainer.seed where that is null."""
        return self.trainer.seed if self.data.seed is None else self.data.seed
