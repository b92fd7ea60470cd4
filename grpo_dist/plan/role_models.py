"""The models of roles and their passes, as a config sets them: what the rows of the table of roles say of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_dist.assets import CRITIC_KEY, POLICY_KEY, REWARD_MODEL_KEY, TEACHER_KEY, TRAINED_MODEL_KEY
from grpo_dist.config.problems import value_of
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SFTConfig, SupervisedConfig
from grpo_dist.config.schema_roles import LoraSection
from grpo_dist.engines.base import rollout_backend

POLICY = "model"  # the title of the model that is trained, and has the tokenizer
_MODEL, _TOKENS = "actor_rollout_ref.model", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


@dataclass(frozen=True)
class Model:
    """A model that a config names, and what is asked of it.

    Attributes:
        title: what the model is, for messages.
        key: of its path.
        held, compute: the types that weights are held in, and that passes compute in.
        head: the type of the output layer; None: that of the rest.
        longest: tokens of the longest sequence that it reads; 0: it is not held against that.
        lengths: the keys that decide it.
        override_config: entries of its config.json that the run changes; None: it has no such key.
        outputs: how many its linear head may have; (): it is a causal LM, and has none.
        new_head: what becomes a head where the files have none: "scores" or "values", which are drawn, or "steps", rows
            of the output layer of a causal LM that judges steps; "": nothing does.
        instead: what to do about a head of its own, where it must have none.
        reads_tokens: whether it reads the policy's tokens as they are.
        exact_kl: whether the KL over the whole vocabulary is computed with it.
        built: whether a dry run builds it; others are checked by their folders.
        remark: what the plan says of it.
    """

    title: str
    key: str
    path: str
    held: str
    compute: str
    head: str | None = None
    longest: int = 0
    lengths: tuple[str, ...] = ()
    override_config: Mapping[str, Any] | None = None
    outputs: tuple[int, ...] = ()
    new_head: str = ""
    instead: str = "use a causal LM"
    reads_tokens: bool = False
    exact_kl: bool = False
    built: bool = True
    remark: str = ""

    @property
    def setting(self) -> str:
        """The key and value that name it."""
        return f"{self.key}={self.path}"


@dataclass(frozen=True)
class Pass:
    """The passes of a role over a batch, or over a mini-batch.

    Attributes:
        what: what they compute.
        size: sequences per pass.
        max_token_len: tokens per pass of the ranks that split it; None: the number of sequences is the limit.
        key: the config key of that budget.
        updates: the key of the section that says what layers keep for their backward pass; "": they train nothing.
        none: why there are none; "": there are.
    """

    what: str
    size: int
    max_token_len: int | None
    key: str
    updates: str = ""
    none: str = ""


def lora_of(config: JobConfig, model: Model) -> LoraSection | None:
    """Return LoRA's keys of a model beside which factors train; None: its weights do, or nothing."""
    section = value_of(config, model.key.removesuffix(".path"))
    return section if isinstance(section, LoraSection) and section.trains_factors else None


# --- the policy --------------------------------------------------------------------------------------------------
def policy(config: RunConfig) -> Model:
    """Return the row of the model that is trained."""
    roles, fsdp = config.actor_rollout_ref, config.actor_rollout_ref.actor.fsdp_config
    unchecked = rollout_backend(roles.rollout.name).exceeds_positions()
    return Model(
        POLICY,
        POLICY_KEY,
        roles.model.path,
        fsdp.model_dtype,
        fsdp.resolved_dtype(config.default_dtype),
        head=roles.model.head_dtype,
        longest=0 if unchecked else config.max_model_len,
        lengths=_lengths(config),
        override_config=roles.model.override_config,
    )


def _lengths(config: RunConfig) -> tuple[str, ...]:
    if config.actor_rollout_ref.rollout.max_model_len is not None:
        return ("actor_rollout_ref.rollout.max_model_len",)
    return ("data.max_prompt_length", "data.max_response_length")


def _budget(config: RunConfig, key: str) -> str:
    return _TOKENS if value_of(config, key) is None else key


def policy_passes(config: RunConfig) -> tuple[Pass, ...]:
    """Return the passes of the ranks that train the policy."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    key = _budget(config, "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu")
    none = ""
    if config.on_policy:
        none = "none: on-policy, so the update computes them"
    elif not config.needs_old_log_probs:
        none = "none: the rollout log-probs are used (bypass_mode)"
    limit = actor.log_prob_max_token_len(rollout)
    return (
        Pass("update", actor.ppo_micro_batch_size_per_gpu, actor.max_token_len, _TOKENS, updates=_MODEL),
        Pass("old log-prob", rollout.log_prob_micro_batch_size_per_gpu, limit, key, none=none),
    )


# --- the reference -----------------------------------------------------------------------------------------------
def reference(config: RunConfig) -> Model:
    """Return the row of a teacher, or of the policy's own start, which is checked as the policy."""
    ref, policy, actor = config.actor_rollout_ref.ref, config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    mixes = ref.ref_model_sync_steps > 0 and ref.ref_model_mixup_alpha < 1  # shares, which bf16 would round away
    compute = ref.fsdp_config.resolved_dtype(config.default_dtype)
    held = "fp32" if mixes else compute
    if ref.model.path is None:
        return Model("reference", POLICY_KEY, policy.path, held, compute, policy.head_dtype, built=False)
    return Model(
        "teacher",
        TEACHER_KEY,
        next(iter(config.teachers.values()), str(ref.model.path)),
        held,
        compute,
        policy.head_dtype,
        longest=config.max_model_len,
        lengths=_lengths(config),
        override_config=ref.model.override_config,
        instead="its score is of use as a reward: reward_model.model.path",
        reads_tokens=True,
        exact_kl=actor.use_kl_loss and actor.kl_loss_type == "full",
    )


def references(config: RunConfig) -> list[Model]:
    """Return the row of the reference, or those of the teachers of each data source."""
    row, teachers = reference(config), config.teachers.items()
    return [replace(row, title=f"teacher of {source}", path=path) for source, path in teachers] or [row]


def reference_passes(config: RunConfig) -> tuple[Pass, ...]:
    """Return the pass of the reference."""
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    key = _budget(config, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu")
    return (Pass("reference", ref.log_prob_micro_batch_size_per_gpu, actor.log_prob_max_token_len(ref), key),)


def why_no_reference(config: RunConfig) -> str:
    """Return why a run has no ranks for a reference."""
    if config.teacher_is_elsewhere:
        return "the teacher runs elsewhere"
    return "the actor without its LoRA adapters is the reference" if config.needs_reference else "no KL term"


# --- the reward model --------------------------------------------------------------------------------------------
def scorer(config: RunConfig) -> Model | None:
    """Return the row of the reward model; None if its path is missing, which a rule reports."""
    section, process = config.reward_model, config.reward_model.process
    if section.model.path is None:
        return None
    heads = (1, 2) if process.enable else (1,)
    compute, retrain = section.model.fsdp_config.resolved_dtype(config.default_dtype), section.retrain
    again = f"retrained after every {retrain.freq} steps (weights {retrain.model_dtype})"
    return Model(
        "reward model",
        REWARD_MODEL_KEY,
        section.model.path,
        retrain.model_dtype if section.is_retrained else compute,
        compute,
        longest=section.max_length or 0,
        lengths=("reward_model.max_length",),
        outputs=heads if process.judging_tokens is None else (),
        new_head="" if process.judging_tokens is None else "steps",
        instead="set reward_model.process.good=null and reward_model.process.bad=null",
        built=False,
        remark=again if section.is_retrained else "",
    )


def scorer_passes(config: RunConfig) -> tuple[Pass, ...]:
    """Return the reward model's pass over what is sampled."""
    section, actor = config.reward_model, config.actor_rollout_ref.actor
    key = _budget(config, "reward_model.forward_max_token_len_per_gpu")
    return (Pass("score", section.micro_batch_size_per_gpu, section.max_token_len(actor), key),)


def retraining_passes(config: RunConfig) -> tuple[Pass, ...]:
    """Return the passes that retrain the reward model; () if it stays as it is."""
    name, retrain = "reward_model.retrain", config.reward_model.retrain
    sizes = retrain.micro_batch_size_per_gpu, retrain.max_token_len_per_gpu, f"{name}.max_token_len_per_gpu"
    return (Pass("retraining", *sizes, updates=name),) if config.reward_model.is_retrained else ()


# --- the critic --------------------------------------------------------------------------------------------------
def critic(config: RunConfig) -> Model:
    """Return the row of the model that foresees returns."""
    model, fsdp = config.critic.model, config.critic.model.fsdp_config
    return Model(
        "critic",
        CRITIC_KEY,
        model.path,
        fsdp.model_dtype,
        fsdp.resolved_dtype(config.default_dtype),
        longest=config.max_model_len,
        lengths=_lengths(config),
        override_config=model.override_config,
        outputs=(1,),
        new_head="values",
        reads_tokens=True,
    )


def critic_passes(config: RunConfig) -> tuple[Pass, ...]:
    """Return the passes of the critic."""
    critic = config.critic
    updates, values = critic.ppo_micro_batch_size_per_gpu, critic.forward_micro_batch_size_per_gpu
    return (
        Pass("update", updates, critic.max_token_len, "critic.ppo_max_token_len_per_gpu", updates="critic.model"),
        Pass("value", values, critic.forward_max_token_len, "critic.forward_max_token_len_per_gpu"),
    )


# --- commands that train one model --------------------------------------------------------------------------------
def trained_model(config: SupervisedConfig) -> Model:
    """Return the row of the model of a command that trains one."""
    return Model(
        POLICY,
        TRAINED_MODEL_KEY,
        config.model.path,
        config.engine.model_dtype,
        config.engine.resolved_dtype(config.default_dtype),
        longest=config.data.max_length,
        lengths=("data.max_length",),
        override_config=config.model.override_config,
        outputs=() if isinstance(config, SFTConfig) else (1,),
        new_head="" if isinstance(config, SFTConfig) else "scores",
    )


def supervised_passes(config: SupervisedConfig) -> tuple[Pass, ...]:
    """Return the passes of a command that trains one model: a pair's answers are in one."""
    data, least = config.data, 1 if isinstance(config, SFTConfig) else 2
    limit = data.max_token_len and max(data.max_token_len, least * data.max_length)
    size, key = max(least, data.micro_batch_size_per_gpu), "data.max_token_len_per_gpu"
    return (Pass("update", size, limit, key, updates="model"),)
