"""What the table of roles says of models, of passes, of what ranks are built from, and what a null means there.

Loads neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_dist.assets import POLICY_KEY, REWARD_MODEL_KEY, TEACHER_KEY, TRAINED_MODEL_KEY
from grpo_dist.config.field_types import RolloutDtype, TrainDtype
from grpo_dist.config.keys import value_of
from grpo_dist.config.processor import is_wsl
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SFTConfig, SupervisedConfig
from grpo_dist.config.schema_roles import LoraSection, ShardsConfig, UpdateSection
from grpo_dist.engines.base import rollout_backend
from grpo_dist.engines.settings import PassLimits, RankSettings, RewardModelSettings

POLICY = "model"  # the title of the model that is trained, and has the tokenizer
_MODEL, _TOKENS = "actor_rollout_ref.model", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


# --- what a null stands for --------------------------------------------------------------------------------------
def train_dtype(config: JobConfig, section: ShardsConfig) -> TrainDtype:
    """Return the type in which a role's passes compute."""
    return section.dtype or config.default_dtype


def engine_dtype(config: RunConfig) -> RolloutDtype:
    """Return the type of the engines' weights."""
    usual: RolloutDtype = "bfloat16" if config.default_dtype == "bf16" else "float32"
    return config.actor_rollout_ref.rollout.dtype or usual


def is_deterministic(config: RunConfig) -> bool:
    """Tell if samples are seeded one by one; null: on CPU only."""
    asked = config.actor_rollout_ref.rollout.deterministic
    return config.device == "cpu" if asked is None else asked


def weight_transport(config: RunConfig, *, shares_gpu: bool) -> str:
    """Return how weights reach the engines."""
    asked = config.actor_rollout_ref.rollout.checkpoint_engine.backend
    if asked is not None:
        return asked
    if config.device == "cpu" or (shares_gpu and is_wsl()):
        return "object_store"
    return "ipc" if shares_gpu else "broadcast"


# --- models and passes -------------------------------------------------------------------------------------------
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
        limits: what ranks are told of both.
        updates: the key of the section that says what layers keep for their backward pass; "": they train nothing.
        none: why there are none; "": there are.
    """

    what: str
    size: int
    max_token_len: int | None
    key: str
    limits: PassLimits
    updates: str = ""
    none: str = ""


def _pass(
    config: JobConfig, what: str, role: str, keys: str, dynamic: bool | None, budget: str = "max_token_len", **more: Any
) -> Pass:
    """Return passes of a role whose keys begin with `keys`.

    Args:
        dynamic: whether tokens fill a pass, as many as the ranks take that split it; null: as in the actor's passes.
        budget: name of the key of the most tokens, between `keys` and `_per_gpu`; where it is null that is the actor's.
    """
    key, size = f"{keys}{budget}_per_gpu", value_of(config, f"{keys}micro_batch_size_per_gpu")
    if value_of(config, key) is None:
        key = _TOKENS
    if dynamic is None:
        dynamic = value_of(config, "actor_rollout_ref.actor.use_dynamic_bsz")
    tokens = value_of(config, key) * config.sequence_parallel_size(role) if dynamic else None
    return Pass(what, size, tokens, key, PassLimits(keys, size, tokens, budget), **more)


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
        train_dtype(config, fsdp),
        head=roles.model.head_dtype,
        longest=0 if unchecked else config.max_model_len,
        lengths=_lengths(config),
        override_config=roles.model.override_config,
    )


def _lengths(config: RunConfig) -> tuple[str, ...]:
    if config.actor_rollout_ref.rollout.max_model_len is not None:
        return ("actor_rollout_ref.rollout.max_model_len",)
    return ("data.max_prompt_length", "data.max_response_length")


def policy_passes(config: RunConfig) -> tuple[Pass, ...]:
    """Return the passes of the ranks that train the policy."""
    dynamic, none = config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz, ""
    if config.on_policy:
        none = "none: on-policy, so the update computes them"
    elif config.old_log_probs_from == "rollout":
        none = "none: the rollout log-probs are used (bypass_mode)"
    return (
        _pass(config, "update", "actor", "actor_rollout_ref.actor.ppo_", None, updates=_MODEL),
        _pass(config, "old log-prob", "actor", "actor_rollout_ref.rollout.log_prob_", dynamic, none=none),
    )


def actor_ranks(config: RunConfig, steps: int, **ranks: Any) -> RankSettings:
    """Return what the actor's ranks are built from; `ranks` is what `Plan.ranks` says of those of all roles."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    return RankSettings(
        **ranks,
        **_optimizer(config, actor, steps),
        temperature=rollout.temperature,
        columns=config.old_policy_columns,
        reference_columns=reference_columns(config) if config.actor_is_reference else (),
        keeps_output_layer=_takes_exact_kl(config) and not (config.has_teacher or config.teacher_is_elsewhere),
        weight_bucket_bytes=rollout.checkpoint_engine.bucket_bytes,
    )


def _optimizer(config: RunConfig, section: UpdateSection, steps: int) -> dict[str, Any]:
    """Return what ranks are told of the optimizer, in a run of so many training steps."""
    steps *= section.ppo_epochs * (config.data.train_batch_size // section.ppo_mini_batch_size)
    return {"optimizer": section.optim, "total_steps": steps, "grad_clip": section.grad_clip}


def _takes_exact_kl(config: RunConfig) -> bool:
    actor = config.actor_rollout_ref.actor
    return actor.use_kl_loss and actor.kl_loss_type == "full"


# --- the reference -----------------------------------------------------------------------------------------------
def reference(config: RunConfig) -> Model:
    """Return the row of a teacher, or of the policy's own start, which is checked as the policy."""
    ref, policy = config.actor_rollout_ref.ref, config.actor_rollout_ref.model
    mixes = ref.ref_model_sync_steps > 0 and ref.ref_model_mixup_alpha < 1  # shares, which bf16 would round away
    compute = train_dtype(config, ref.fsdp_config)
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
        exact_kl=_takes_exact_kl(config),
    )


def references(config: RunConfig) -> list[Model]:
    """Return the row of the reference, or those of the teachers of each data source."""
    row, teachers = reference(config), config.teachers.items()
    return [replace(row, title=f"teacher of {source}", path=path) for source, path in teachers] or [row]


def reference_passes(config: RunConfig) -> tuple[Pass, ...]:
    """Return the pass of the reference."""
    dynamic = config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz
    return (_pass(config, "reference", "ref", "actor_rollout_ref.ref.log_prob_", dynamic),)


def reference_columns(config: RunConfig) -> tuple[str, ...]:
    """Return the columns that the reference is asked for."""
    actor, exact = config.actor_rollout_ref.actor, _takes_exact_kl(config)
    wanted = {
        "ref_log_probs": config.algorithm.use_kl_in_reward or (actor.use_kl_loss and not exact),
        "ref_hidden_states": exact and not config.teacher_is_elsewhere,
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def reference_ranks(config: RunConfig, steps: int, **ranks: Any) -> RankSettings:
    """Return what the reference's ranks are built from; see `actor_ranks`."""
    temperature = config.actor_rollout_ref.rollout.temperature
    return RankSettings(**ranks, temperature=temperature, columns=reference_columns(config))


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
    compute, retrain = train_dtype(config, section.model.fsdp_config), section.retrain
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
    dynamic = config.reward_model.use_dynamic_bsz
    return (_pass(config, "score", "reward_model", "reward_model.", dynamic, "forward_max_token_len"),)


def retraining_passes(config: RunConfig) -> tuple[Pass, ...]:
    """Return the passes that retrain the reward model; () if it stays as it is."""
    if not config.reward_model.is_retrained:
        return ()
    name, dynamic = "reward_model.retrain", config.reward_model.retrain.max_token_len_per_gpu is not None
    passes = _pass(config, "retraining", "reward_model", f"{name}.", dynamic, updates=name)
    return (replace(passes, limits=replace(passes.limits, lengths="reward_model.max_length")),)


def scorer_ranks(config: RunConfig, steps: int, **ranks: Any) -> RankSettings:
    """Return what the reward model's ranks are built from; see `actor_ranks`."""
    section = config.reward_model
    return RewardModelSettings(
        **ranks,
        optimizer=section.retrain.optim if section.is_retrained else None,
        grad_clip=section.retrain.grad_clip,
        section=section,
        trust_input_tokenizer=config.actor_rollout_ref.model.trust_remote_code,
        step_separator=config.reward.step_separator,
    )


# --- the critic --------------------------------------------------------------------------------------------------
def critic(config: RunConfig) -> Model:
    """Return the row of the model that foresees returns."""
    model, fsdp = config.critic.model, config.critic.model.fsdp_config
    return Model(
        "critic",
        "critic.model.path",
        model.path,
        fsdp.model_dtype,
        train_dtype(config, fsdp),
        longest=config.max_model_len,
        lengths=_lengths(config),
        override_config=model.override_config,
        outputs=(1,),
        new_head="values",
        reads_tokens=True,
    )


def critic_passes(config: RunConfig) -> tuple[Pass, ...]:
    """Return the passes of the critic."""
    dynamic = config.critic.use_dynamic_bsz
    return (
        _pass(config, "update", "critic", "critic.ppo_", dynamic, updates="critic.model"),
        _pass(config, "value", "critic", "critic.forward_", dynamic),
    )


def critic_ranks(config: RunConfig, steps: int, **ranks: Any) -> RankSettings:
    """Return what the critic's ranks are built from; see `actor_ranks`."""
    return RankSettings(**ranks, **_optimizer(config, config.critic, steps), columns=("values",))


# --- commands that train one model --------------------------------------------------------------------------------
def trained_model(config: SupervisedConfig) -> Model:
    """Return the row of the model of a command that trains one."""
    return Model(
        POLICY,
        TRAINED_MODEL_KEY,
        config.model.path,
        config.engine.model_dtype,
        train_dtype(config, config.engine),
        longest=config.data.max_length,
        lengths=("data.max_length",),
        override_config=config.model.override_config,
        outputs=() if isinstance(config, SFTConfig) else (1,),
        new_head="" if isinstance(config, SFTConfig) else "scores",
    )


def supervised_passes(config: SupervisedConfig) -> tuple[Pass, ...]:
    """Return the passes of a command that trains one model: a pair's answers are in one."""
    data, least = config.data, 1 if isinstance(config, SFTConfig) else 2
    passes = _pass(config, "update", config.role, "data.", data.use_dynamic_bsz, updates="model")
    limit = passes.max_token_len and max(passes.max_token_len, least * data.max_length)
    limits = replace(passes.limits, lengths="data.max_length")
    return (replace(passes, size=max(least, passes.size), max_token_len=limit, limits=limits),)


def supervised_ranks(config: SupervisedConfig, steps: int, **ranks: Any) -> RankSettings:
    """Return what the ranks of a command that trains one model are built from; see `actor_ranks`."""
    return RankSettings(**ranks, optimizer=config.optim, total_steps=steps, grad_clip=config.optim.clip_grad)
