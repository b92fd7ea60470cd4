"""The typed config: one frozen class per section of grpo.yaml.

Holds names, types and ranges of single keys. Defaults and the meaning of each key are in grpo.yaml (a key missing on
either side is an error), rules between keys in grpo_dist/plan. What a null value stands for, where several readers need
it, is a method here. What all commands share is in schema_job.py, the roles with their models are in schema_roles.py,
`trainer.health` in schema_health.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, model_validator

from grpo_dist.assets import POLICY_KEY
from grpo_dist.config import field_types
from grpo_dist.config.field_types import Count, NonNegativeInt, PositiveFloat, Processes, Resume, Section, Share, Text
from grpo_dist.config.schema_health import HealthConfig
from grpo_dist.config.schema_job import JobClusterConfig, JobConfig, JobDataConfig, JobTrainerConfig
from grpo_dist.config.schema_roles import ULYSSES, ActorRolloutRefConfig, Colocation, CriticConfig, RewardModelConfig
from grpo_dist.plugins import names
from grpo_dist.plugins.names import REWARD_MODEL_FUNCTION, WEIGHTED_FUNCTION, CodeName, absolute, parse_code


class SamplerConfig(Section):
    """`data.sampler`: an order of the training prompts of your own."""

    class_path: Text | None
    class_name: Text | None

    @property
    def code(self) -> CodeName | None:
        """Where the class is; None: there is none."""
        return None if self.class_path is None else parse_code(self.class_path, self.class_name or "")


class CurriculumConfig(Section):
    """`data.curriculum`: draw the prompts whose groups are expected to have different scores."""

    enable: Annotated[bool, Resume.OTHER_ORDER]
    exploration: Share
    decay: field_types.PositiveShare
    max_pass_rate: field_types.PositiveShare | None


class DataConfig(JobDataConfig):
    """`data`: the prompts."""

    prompt_key: Text
    reward_fn_key: Text
    answer_key: Text | None
    data_source: Text | None
    prompt_template: Text | None
    image_key: Text | None
    exclude_rows: Annotated[field_types.Folder | None, Resume.FREE]
    system_prompt: Text | None
    gen_batch_size: Count | None
    max_prompt_length: Count
    max_response_length: Count
    filter_overlong_prompts: bool
    truncation: Literal["error", "left", "right", "middle"]
    curriculum: CurriculumConfig
    sampler: Annotated[SamplerConfig, Resume.OTHER_ORDER]
    apply_chat_template: bool
    apply_chat_template_kwargs: dict[str, Any]


class CustomRewardFunctionConfig(Section):
    """`custom_reward_function`: your own scorer."""

    path: Annotated[Text | field_types.Functions | None, BeforeValidator(field_types.as_tuple)]
    name: Text
    weights: Annotated[tuple[field_types.Float, ...] | None, BeforeValidator(field_types.as_tuple)]
    reward_kwargs: dict[str, Any]

    @property
    def listed(self) -> list[dict[str, Any]] | None:
        """A list of functions as grpo_dist.rewards.weighted has them; None: `path` is no list."""
        if not isinstance(self.path, tuple):
            return None
        entries = [dict(item) if isinstance(item, Mapping) else _entry(item) for item in self.path]
        for entry, weight in zip(entries, self.weights or (), strict=False):
            entry["weight"] = weight
        return entries


def _entry(path: str | None) -> dict[str, Any]:
    return {"path": None, "label": "built_in"} if path is None else {"path": path}


class RewardCode(NamedTuple):
    """The reward function: path (None: the built-in scorers), name and arguments."""

    path: str | None
    name: str
    reward_kwargs: dict[str, Any]


class OverlongBufferConfig(Section):
    """`reward.overlong_buffer`: DAPO's soft overlong punishment."""

    enable: bool
    len: Count | None
    penalty_factor: field_types.NonNegativeFloat


class RewardConfig(Section):
    """`reward`: the processes that score."""

    num_workers: Annotated[Processes, Resume.FREE]
    timeout_s: Annotated[PositiveFloat, Resume.FREE]
    failure_score: field_types.Float | None
    max_failure_rate: Annotated[Share, Resume.FREE]
    overlong_buffer: OverlongBufferConfig
    step_separator: Text


class SandboxConfig(Section):
    """`sandbox`: what programs of the policy run in."""

    backend: Literal["bubblewrap", "docker", "podman"]
    image: Text | None
    memory_mib: Count
    processes: Count
    cpu_s: PositiveFloat
    output_mib: Count
    disk_mib: Count


class KLCtrlConfig(Section):
    """`algorithm.kl_ctrl`: the coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"]
    kl_coef: field_types.NonNegativeFloat
    target_kl: PositiveFloat
    horizon: PositiveFloat


class RolloutCorrectionConfig(Section):
    """`algorithm.rollout_correction`: the sampler is not quite the policy that trains."""

    rollout_is: Literal["auto", "token", "sequence"] | None
    rollout_is_threshold: PositiveFloat | Text
    rollout_is_batch_normalize: bool
    rollout_rs: Text | None
    rollout_rs_threshold: PositiveFloat | Text | None
    m2_threshold: PositiveFloat | None
    off_policy_mask_threshold: PositiveFloat | None
    bypass_mode: bool
    loss_type: Literal["ppo_clip", "reinforce"]


class FilterGroupsConfig(Section):
    """`algorithm.filter_groups`: DAPO's dynamic sampling."""

    enable: bool
    metric: Text
    max_num_gen_batches: Annotated[NonNegativeInt, Resume.FREE]


TEXT = "{text}"  # in a template of `SelfDistillationConfig`: where the text is put


class SelfDistillationConfig(Section):
    """`algorithm.self_distillation`: what the reference is shown before the responses it teaches on."""

    enable: bool
    success_threshold: field_types.Float | None
    success_template: Text
    feedback_name: Text | None
    feedback_template: Text
    longest_prompt: Count | None


class AlgorithmConfig(Section):
    """`algorithm`: how rewards become advantages."""

    adv_estimator: Annotated[str, field_types.builtin_or_custom(names.ADV_ESTIMATORS)]
    norm_adv_by_std_in_grpo: bool
    gamma: Share
    lam: Share
    f_norm: PositiveFloat
    zvp_alpha: field_types.NonNegativeFloat
    step_advantage_w: field_types.NonNegativeFloat
    rae_decay: Share
    a2po_beta: PositiveFloat
    gdpo_reward_keys: Annotated[Annotated[tuple[Text, ...], field_types.Names] | None, field_types.Distinct]
    gdpo_reward_weights: Annotated[tuple[field_types.Float, ...], field_types.Pair] | None
    use_kl_in_reward: bool
    kl_penalty: Annotated[str, field_types.builtin_or_custom(names.SAMPLED_KL_TYPES)]
    kl_ctrl: KLCtrlConfig
    rollout_correction: RolloutCorrectionConfig
    filter_groups: FilterGroupsConfig
    self_distillation: SelfDistillationConfig
    mask_truncated_responses: bool
    mask_equal_groups: bool
    min_group_size: Count | None
    credit: Literal["episode", "agent"]


class TrainerConfig(JobTrainerConfig):
    """`trainer`: the run, its records and its machines."""

    critic_warmup: NonNegativeInt
    val_in_background: Annotated[bool, Resume.FREE]
    max_staleness: NonNegativeInt
    max_worker_restarts: Annotated[NonNegativeInt, Resume.FREE]
    log_rollouts: Annotated[bool, Resume.FREE]
    log_rollouts_max_gib: Annotated[PositiveFloat | None, Resume.FREE]
    log_val_generations: Annotated[NonNegativeInt, Resume.FREE]
    profile_steps: Annotated[Annotated[tuple[Count, ...], field_types.Pair] | None, field_types.Distinct, Resume.FREE]
    stage_timeout_s: Annotated[dict[field_types.TimedStage, PositiveFloat | None], Resume.FREE]
    health: Annotated[HealthConfig, Resume.FREE]
    rehearse: Annotated[bool, Resume.FREE]

    @property
    def samples_during_updates(self) -> bool:
        """Tell if groups of later steps are sampled while the policy changes."""
        return self.max_staleness > 0

    @property
    def profile_dir(self) -> Path:
        """Where the profiles of `profile_steps` are written."""
        return self.record_dir / "profiles"


class ClusterConfig(JobClusterConfig):
    """`cluster`: processes per role. null: placement.py decides."""

    actor_world_size: Processes | None
    rollout_world_size: Processes | None
    max_rollout_world_size: Processes | None
    ref_world_size: Processes | None
    reward_model_world_size: Processes | None
    critic_world_size: Processes | None
    colocate: Colocation | None


class RunConfig(JobConfig):
    """A whole run of GRPO. Each part of the program gets its own section of it."""

    model_key, fsdp_key = POLICY_KEY, "actor_rollout_ref.actor.fsdp_config"

    algorithm: AlgorithmConfig
    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    reward_model: RewardModelConfig
    critic: CriticConfig
    custom_reward_function: CustomRewardFunctionConfig
    reward: RewardConfig
    sandbox: Annotated[SandboxConfig, Resume.FREE]
    trainer: TrainerConfig
    cluster: Annotated[ClusterConfig, Resume.FREE]

    @model_validator(mode="before")
    @classmethod
    def mini_batches_are_batches(cls, raw: Any) -> Any:
        """Fill in ppo_mini_batch_size where it is null. A batch size that is wrong is reported once, as itself."""
        size = raw["data"].get("train_batch_size")
        for section in (raw["actor_rollout_ref"]["actor"], raw["critic"]):
            if section.get("ppo_mini_batch_size", 0) is None:
                section["ppo_mini_batch_size"] = size if isinstance(size, int) and size > 0 else 1
        return raw

    @property
    def needs_reference_workers(self) -> bool:
        """Tell if reference workers are started: with LoRA only for a teacher."""
        own = self.has_teacher or not self.actor_rollout_ref.model.trains_factors
        return self.needs_reference and not self.teacher_is_elsewhere and own

    def sequence_parallel_size(self, role: str) -> int:
        """See `JobConfig.sequence_parallel_size`."""
        section = getattr(self.actor_rollout_ref, role, None) or getattr(self, role, None)
        size: int = getattr(section, ULYSSES, 1)
        return size

    @property
    def has_teacher(self) -> bool:
        """Tell if the reference is another model than the one that the policy starts from."""
        return self.actor_rollout_ref.ref.model.path is not None

    @property
    def teacher_is_elsewhere(self) -> bool:
        """Tell if the reference is a teacher behind an endpoint."""
        return self.actor_rollout_ref.ref.model.endpoint.base_url is not None

    @property
    def teachers(self) -> dict[str, str]:
        """The teacher of each data source, if there are several; else {}."""
        path = self.actor_rollout_ref.ref.model.path
        return path if isinstance(path, dict) else {}

    @property
    def trains_vision(self) -> bool:
        """Tell if the policy's vision part trains."""
        return self.data.image_key is not None and not self.actor_rollout_ref.actor.freeze_vision_tower

    @property
    def replays_routes(self) -> bool:
        """Tell if the policy's passes, and those of its own start, take the experts that the engines have recorded."""
        return self.actor_rollout_ref.actor.router_replay.mode != "disabled"

    @property
    def actor_is_reference(self) -> bool:
        """Tell if the actor, its LoRA factors switched off, computes the reference's log-probs."""
        return self.needs_reference and not (self.needs_reference_workers or self.teacher_is_elsewhere)

    @property
    def needs_reference(self) -> bool:
        """Tell if the KL to a reference is part of the loss or of the reward."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def needs_critic(self) -> bool:
        """Tell if a critic is trained; null means for gae, as in verl."""
        return self.algorithm.adv_estimator == "gae" if self.critic.enable is None else self.critic.enable

    @property
    def still_steps(self) -> int:
        """How many first steps leave the policy as it is, since the critic alone learns."""
        return self.trainer.critic_warmup if self.needs_critic else 0

    @property
    def trains_on_scores(self) -> bool:
        """Tell if scores are a part of what trains the policy; else they are only recorded."""
        return self.algorithm.adv_estimator not in names.SCORELESS_ADV_ESTIMATORS

    @property
    def reward_function(self) -> str | None:
        """Path of the reward function; null: the reward model, or the built-in scorers, optional if no score trains."""
        teaching = self.algorithm.self_distillation
        shows_successes = teaching.enable and teaching.success_threshold is not None
        built_in = None if self.trains_on_scores or shows_successes else names.OPTIONAL_FUNCTION
        path = self.custom_reward_function.path
        if isinstance(path, tuple):
            return WEIGHTED_FUNCTION
        return path or (REWARD_MODEL_FUNCTION if self.reward_model.enable else built_in)

    @property
    def reward_code(self) -> RewardCode:
        """The reward function with absolute paths, because workers run in other folders. A list becomes a sum."""
        custom, path = self.custom_reward_function, self.reward_function
        listed = custom.listed
        if listed is None:
            if path is None:
                return RewardCode(None, custom.name, custom.reward_kwargs)
            return RewardCode(absolute(path), parse_code(path, custom.name).attribute, custom.reward_kwargs)
        functions = [part | {"path": absolute(str(part["path"]))} if part.get("path") else part for part in listed]
        return RewardCode(path, custom.name, {"functions": functions, "key": "custom_reward_function.path"})

    @property
    def reward_paths(self) -> tuple[str | None, ...]:
        """Paths of the functions that make the reward, of a weighted sum those of its parts; None: built-in scorers."""
        custom = self.custom_reward_function
        functions = custom.reward_kwargs.get("functions") if custom.path == WEIGHTED_FUNCTION else custom.listed
        parts = functions if isinstance(functions, list) else []
        paths = [part.get("path") for part in parts if isinstance(part, dict)] or [self.reward_function]
        return tuple(parse_code(path).source if isinstance(path, str) else path for path in paths)

    @property
    def needs_ground_truth(self) -> bool:
        """Tell if every row must have one: scores train and no model gives them, or a built-in scorer is asked for."""
        return (self.trains_on_scores and not self.reward_model.enable) or None in self.reward_paths

    @property
    def rollout_is(self) -> Literal["token", "sequence"] | None:
        """Importance weights, where the loss has no ratio to the sampler; auto: where responses may be old."""
        correction = self.algorithm.rollout_correction
        if correction.bypass_mode and correction.loss_type == "ppo_clip":
            return None
        if correction.rollout_is != "auto":
            return correction.rollout_is
        return "token" if self.trainer.samples_during_updates else None

    @property
    def old_log_probs_from(self) -> Literal["actor", "rollout", "update"]:
        """Whose are the old ones: computed before the update, the sampler's (bypass_mode), or the update's own."""
        algorithm, actor = self.algorithm, self.actor_rollout_ref.actor
        correction = algorithm.rollout_correction
        if correction.bypass_mode:
            return "rollout"
        one_step = actor.ppo_epochs == 1 and self.data.train_batch_size == actor.ppo_mini_batch_size
        asked_earlier = (
            algorithm.use_kl_in_reward
            or (self.rollout_is is not None and correction.rollout_is_batch_normalize)
            or correction.rollout_rs is not None
            or correction.m2_threshold is not None
            or len(self.old_policy_columns) > 1
            or actor.policy_loss.loss_mode in names.TOKEN_SELECTING_LOSSES
        )
        return "update" if one_step and not asked_earlier else "actor"

    @property
    def old_policy_columns(self) -> tuple[str, ...]:
        """Return what is computed of the policy before the update, where that is: log-probs, and what is asked for."""
        asked = {names.OLD_POLICY_ADV_ESTIMATORS.get(self.algorithm.adv_estimator)}
        asked |= {"old_entropies"} if self.actor_rollout_ref.actor.top_entropy_quantile < 1 else set()
        return ("old_log_probs", *sorted(filter(None, asked)))

    @property
    def on_policy(self) -> bool:
        """Tell if the old log-probs are the update's own."""
        return self.old_log_probs_from == "update"

    @property
    def filters(self) -> list[str]:
        """The keys of `rollout` by which the engines sample from less than the trainer's distribution."""
        rollout = self.actor_rollout_ref.rollout
        cuts = {
            "top_p": rollout.top_p < 1,
            "top_k": rollout.top_k > 0,
            "min_p": rollout.min_p > 0,
            "min_tokens": rollout.min_tokens > 0,
            "bad_words": bool(rollout.bad_words),
        }
        return [name for name, cuts_off in cuts.items() if cuts_off]

    @property
    def max_model_len(self) -> int:
        """Longest prompt + response in tokens; null means the sum of the two limits in `data`."""
        longest = self.data.max_prompt_length + self.data.max_response_length
        return self.actor_rollout_ref.rollout.max_model_len or longest

    @property
    def overlong_buffer_len(self) -> int:
        """Tokens of the overlong buffer; null means a fifth of the longest response."""
        return self.reward.overlong_buffer.len or max(1, self.data.max_response_length // 5)
