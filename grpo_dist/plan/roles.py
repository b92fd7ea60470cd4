"""The table of roles: a row says all that placement, plan, checks, build, checkpoints and metrics ask about a role.

They loop over the table and name no role, so that a new one is a worker class, a section of the config and a row. Code
is named here and loaded by whoever needs it (`registry.load_attribute`): this module needs neither torch nor Ray.
Before the table stands what it says of models, of passes, of what ranks are built from, and what a null means there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from grpo_dist.assets import POLICY_KEY, REWARD_MODEL_KEY, TEACHER_KEY, TRAINED_MODEL_KEY
from grpo_dist.config.field_types import PassDtype, RolloutDtype
from grpo_dist.config.keys import value_of
from grpo_dist.config.processor import is_wsl
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, RewardModelTrainingConfig, SFTConfig, SupervisedConfig
from grpo_dist.config.schema_roles import Colocation, FSDPConfig, LoraSection, ShardsConfig, UpdateSection
from grpo_dist.engines.base import rollout_backend
from grpo_dist.engines.settings import PassLimits, RankSettings, RewardModelSettings

POLICY = "model"  # the title of the model that is trained, and has the tokenizer
_MODEL, _TOKENS = "actor_rollout_ref.model", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


# --- what a null stands for --------------------------------------------------------------------------------------
def train_dtype(config: JobConfig, section: ShardsConfig) -> PassDtype:
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
def _policy(config: RunConfig) -> Model:
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


def _policy_passes(config: RunConfig) -> tuple[Pass, ...]:
    dynamic, none = config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz, ""
    if config.on_policy:
        none = "none: on-policy, so the update computes them"
    elif config.old_log_probs_from == "rollout":
        none = "none: the rollout log-probs are used (bypass_mode)"
    return (
        _pass(config, "update", "actor", "actor_rollout_ref.actor.ppo_", None, updates=_MODEL),
        _pass(config, "old log-prob", "actor", "actor_rollout_ref.rollout.log_prob_", dynamic, none=none),
    )


def _actor_ranks(config: RunConfig, steps: int, **ranks: Any) -> RankSettings:
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
    steps *= section.ppo_epochs * (config.data.train_batch_size // section.ppo_mini_batch_size)
    return {"optimizer": section.optim, "total_steps": steps, "grad_clip": section.grad_clip}


def _takes_exact_kl(config: RunConfig) -> bool:
    actor = config.actor_rollout_ref.actor
    return actor.use_kl_loss and actor.kl_loss_type == "full"


# --- the reference -----------------------------------------------------------------------------------------------
def _reference(config: RunConfig) -> Model:
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


def _why_no_reference(config: RunConfig) -> str:
    if config.teacher_is_elsewhere:
        return "the teacher runs elsewhere"
    return "the actor without its LoRA adapters is the reference" if config.needs_reference else "no KL term"


# --- the reward model --------------------------------------------------------------------------------------------
def _scorer(config: RunConfig) -> Model | None:
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


def _scorer_passes(config: RunConfig) -> tuple[Pass, ...]:
    dynamic = config.reward_model.use_dynamic_bsz
    return (_pass(config, "score", "reward_model", "reward_model.", dynamic, "forward_max_token_len"),)


def _retraining_passes(config: RunConfig) -> tuple[Pass, ...]:
    if not config.reward_model.is_retrained:
        return ()
    name, dynamic = "reward_model.retrain", config.reward_model.retrain.max_token_len_per_gpu is not None
    passes = _pass(config, "retraining", "reward_model", f"{name}.", dynamic, updates=name)
    return (replace(passes, limits=replace(passes.limits, lengths="reward_model.max_length")),)


def _scorer_ranks(config: RunConfig, steps: int, **ranks: Any) -> RankSettings:
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
def _critic(config: RunConfig) -> Model:
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


def _critic_passes(config: RunConfig) -> tuple[Pass, ...]:
    dynamic = config.critic.use_dynamic_bsz
    return (
        _pass(config, "update", "critic", "critic.ppo_", dynamic, updates="critic.model"),
        _pass(config, "value", "critic", "critic.forward_", dynamic),
    )


def _critic_ranks(config: RunConfig, steps: int, **ranks: Any) -> RankSettings:
    return RankSettings(**ranks, **_optimizer(config, config.critic, steps), columns=("values",))


# --- commands that train one model --------------------------------------------------------------------------------
def _trained_model(config: SupervisedConfig) -> Model:
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


def _supervised_passes(config: SupervisedConfig) -> tuple[Pass, ...]:
    data, least = config.data, 1 if isinstance(config, SFTConfig) else 2  # a pair's answers are in one pass
    passes = _pass(config, "update", config.role, "data.", data.use_dynamic_bsz, updates="model")
    limit = passes.max_token_len and max(passes.max_token_len, least * data.max_length)
    limits = replace(passes.limits, lengths="data.max_length")
    return (replace(passes, size=max(least, passes.size), max_token_len=limit, limits=limits),)


def _supervised_ranks(config: SupervisedConfig, steps: int, **ranks: Any) -> RankSettings:
    return RankSettings(**ranks, optimizer=config.optim, total_steps=steps, grad_clip=config.optim.clip_grad)


# --- the table of roles -----------------------------------------------------------------------------------------------
_ACTOR, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
_ROLES = "grpo_dist.workers"


@dataclass(frozen=True)
class Role:
    """A row of the table.

    Attributes:
        name: of the role, in metrics and messages, and of its folder in a checkpoint.
        worker: `module:Class` of a process.
        group: `module:Class` of all its processes: a pool, or a gang whose ranks hold one model.
        present: whether a run with this config has it.
        switch: the key that asks for it, whose null leaves it to others; "": it has none.
        section: the key of its section; "": it has none.
        size_key: the key of its number of processes.
        fsdp: the key of the section that says how its weights are sharded.
        ranks: what ranks are built from: (config, training steps, what all roles' ranks have); None: it is no gang.
        model: the model that ranks hold; None: the policy's, or it has no path, which a rule reports.
        trains: whether it has an optimizer: its state is in every checkpoint, and without one a lost rank ends the run.
        resumes: whether it loads the state that a checkpoint may have of it.
        shares: the values of `cluster.colocate` with which it lies on the actor's GPUs.
        passes: its passes, for the plan, its memory and the rules on their sizes.
        own_passes: passes over batches that are not those of a step, for its memory.
        absent: why a run lacks it, as the plan says it; "": the plan does not say it.
    """

    name: str
    worker: str
    group: str
    present: Callable[[Any], bool] = lambda config: True
    switch: str = ""
    section: str = ""
    size_key: str = ""
    fsdp: str = ""
    ranks: Callable[..., RankSettings] | None = None
    model: Callable[[Any], Model | None] = lambda config: None
    trains: bool = False
    resumes: Callable[[Any], bool] = lambda config: True
    shares: tuple[Colocation, ...] = ()
    passes: Callable[[Any], tuple[Pass, ...]] = lambda config: ()
    own_passes: Callable[[Any], tuple[Pass, ...]] = lambda config: ()
    absent: Callable[[Any], str] = lambda config: ""

    @property
    def follows(self) -> bool:
        """Tell if its ranks may lie beside those of the actor, as many on the same GPUs."""
        return self.ranks is not None and self.name != "actor" and bool(self.shares)


_BESIDE: tuple[Colocation, ...] = ("actor_ref", "all")
_ROWS = (
    Role(
        "actor",
        f"{_ROLES}.actor:ActorWorker",
        f"{_ROLES}.actor:ActorGroup",
        section=_ACTOR,
        size_key="cluster.actor_world_size",
        fsdp=f"{_ACTOR}.fsdp_config",
        ranks=_actor_ranks,
        model=_policy,
        trains=True,
        shares=_BESIDE,
        passes=_policy_passes,
    ),
    Role(
        "rollout",
        f"{_ROLES}.rollout:RolloutWorker",
        f"{_ROLES}.rollout:RolloutGroup",
        section="actor_rollout_ref.rollout",
        size_key="cluster.rollout_world_size",
        shares=("all",),
    ),
    Role(
        "ref",
        f"{_ROLES}.gang:PolicyWorker",
        f"{_ROLES}.gang:ReferenceGroup",
        lambda config: config.needs_reference_workers,
        section=_REF,
        size_key="cluster.ref_world_size",
        fsdp=f"{_REF}.fsdp_config",
        ranks=reference_ranks,
        model=_reference,
        resumes=lambda config: not config.has_teacher,  # which takes the place of one that has moved
        shares=_BESIDE,
        passes=reference_passes,
        absent=_why_no_reference,
    ),
    Role(
        "reward_model",
        f"{_ROLES}.reward_model:RewardModelWorker",
        f"{_ROLES}.reward_model:RewardModelGroup",
        lambda config: config.reward_model.enable,
        section="reward_model",
        size_key="cluster.reward_model_world_size",
        fsdp="reward_model.model.fsdp_config",
        ranks=_scorer_ranks,
        model=_scorer,
        shares=_BESIDE,
        passes=_scorer_passes,
        own_passes=_retraining_passes,
    ),
    Role(
        "critic",
        f"{_ROLES}.gang:TrainedWorker",
        f"{_ROLES}.gang:TrainedGroup",
        lambda config: config.needs_critic,
        switch="critic.enable",
        section="critic",
        size_key="cluster.critic_world_size",
        fsdp="critic.model.fsdp_config",
        ranks=_critic_ranks,
        model=_critic,
        trains=True,
        shares=_BESIDE,
        passes=_critic_passes,
    ),
    Role(
        "reward",
        f"{_ROLES}.reward:RewardWorker",
        f"{_ROLES}.reward:RewardPool",
        section="reward",
        size_key="reward.num_workers",
    ),
)
ROLES: dict[str, Role] = {row.name: row for row in _ROWS}


def _supervised(schema: type[SupervisedConfig]) -> Role:
    return Role(
        schema.role,
        f"{_ROLES}.supervised:SupervisedWorker",
        f"{_ROLES}.supervised:SupervisedGroup",
        lambda config: isinstance(config, schema),
        section="model",
        size_key="cluster.world_size",
        fsdp="engine",
        ranks=_supervised_ranks,
        model=_trained_model,
        trains=True,
        passes=_supervised_passes,
    )


SUPERVISED_ROLES = {schema.role: _supervised(schema) for schema in (SFTConfig, RewardModelTrainingConfig)}


@dataclass(frozen=True)
class ModelPass:
    """A row of the table of passes: a model adds columns to a step's batch, during the rollout or, if it waits, after.

    Attributes:
        name: of the pass, and of the seconds that it takes.
        role: whose ranks compute it.
        limit: the name of its time limit; "": its own.
        needs: columns that it reads besides the sequences; they come with the scores.
        adds: columns that it always adds.
    """

    name: str
    role: str
    limit: str = ""
    method: str = "compute_log_probs"
    needs: Callable[[Any], tuple[str, ...]] = lambda config: ()
    adds: tuple[str, ...] = ()
    present: Callable[[Any], bool] = lambda config: True

    def waits(self, config: Any) -> bool:
        """Tell if it comes after the rollout: it needs what comes with the scores, or its model changes meanwhile."""
        return bool(self.needs(config)) or (ROLES[self.role].trains and config.trainer.samples_during_updates)


def _shown(config: Any) -> tuple[str, ...]:
    """What the reference reads in place of the prompt, where the policy teaches itself."""
    return ("teacher_prompts",) if config.algorithm.self_distillation.enable else ()


PASSES = [
    ModelPass("ref", "ref", "ref_log_prob", needs=_shown, present=ROLES["ref"].present),
    ModelPass("ref", "actor", "ref_log_prob", "compute_reference", _shown, present=attrgetter("actor_is_reference")),
    ModelPass("old_log_prob", "actor", adds=("old_log_probs",), present=lambda c: c.old_log_probs_from == "actor"),
    ModelPass("values", "critic", adds=("values",), present=ROLES["critic"].present),
]


def passes_of(config: Any, in_turns: Sequence[str], *, waiting: bool) -> list[ModelPass]:
    """Return the passes of a run's steps that wait for the end of the rollout, as do those of `Placement.in_turns`."""
    return [row for row in PASSES if row.present(config) and (row.role in in_turns or row.waits(config)) == waiting]


def table_of(config: JobConfig) -> Mapping[str, Role]:
    """Return the rows of the roles that runs of this command may have, by name."""
    return SUPERVISED_ROLES if isinstance(config, SupervisedConfig) else ROLES


def roles_of(config: JobConfig) -> list[Role]:
    """Return the rows of the roles that a run has; the first is trained."""
    return [row for row in table_of(config).values() if row.present(config)]


def layers_key(config: JobConfig, row: Role) -> str:
    """Return the key of the section that says what a row's layers keep for their backward pass; "": none trains."""
    return next((limits.updates for limits in (*row.passes(config), *row.own_passes(config)) if limits.updates), "")


def optimizer_key(config: JobConfig, row: Role) -> str:
    """Return the key of the section of a row's optimizer; "": it has none."""
    for key in filter(None, (row.section, layers_key(config, row))):
        if hasattr(value_of(config, key), "optim"):
            return f"{key}.optim"
    return "optim" if hasattr(config, "optim") else ""


def reshards(config: JobConfig, row: Role) -> bool:
    """Tell if a row's ranks free gathered weights after each layer; where nothing trains, as those of the first row."""
    held, first = (value_of(config, one.fsdp) for one in (row, roles_of(config)[0]))
    return bool((held if isinstance(held, FSDPConfig) else first).reshard_after_forward)


def offloads_optimizer(config: JobConfig, row: Role) -> bool:
    """Tell if a row's optimizer states wait in CPU memory; its sections may lack the key."""
    sections = (value_of(config, key) for key in (row.fsdp, layers_key(config, row)) if key)
    return any(getattr(section, "optimizer_offload", False) for section in sections)


def models_of(config: JobConfig) -> list[Model]:
    """Return the rows of a run's models; the first is trained, and has the tokenizer."""
    return [model for row in roles_of(config) for model in held_by(config, row)]


def held_by(config: Any, row: Role) -> list[Model]:
    """Return the models that a row's ranks hold: none, one, or several teachers."""
    if row.name != "ref":
        return list(filter(None, [row.model(config)]))
    own, teachers = _reference(config), config.teachers.items()
    return [replace(own, title=f"teacher of {source}", path=path) for source, path in teachers] or [own]
