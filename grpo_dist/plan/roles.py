"""The table of roles: a row says all that placement, plan, checks, build, checkpoints and metrics ask about a role.

They loop over the table and name no role, so that a new one is a worker class, a section of the config and a row. Code
is named here and loaded by whoever needs it (`registry.load_attribute`): this module needs neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from grpo_dist.config.problems import value_of
from grpo_dist.config.schema_job import JobConfig, RewardModelTrainingConfig, SFTConfig, SupervisedConfig
from grpo_dist.config.schema_roles import Colocation, FSDPConfig
from grpo_dist.engines.settings import RankSettings
from grpo_dist.plan import role_models
from grpo_dist.plan.role_models import Model, Pass

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
        ranks: returns what ranks are built from: (config, training steps, what all roles' ranks have) ->
            `RankSettings`; None: it is no gang.
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
        ranks=role_models.actor_ranks,
        model=role_models.policy,
        trains=True,
        shares=_BESIDE,
        passes=role_models.policy_passes,
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
        ranks=role_models.reference_ranks,
        model=role_models.reference,
        resumes=lambda config: not config.has_teacher,  # which takes the place of one that has moved
        shares=_BESIDE,
        passes=role_models.reference_passes,
        absent=role_models.why_no_reference,
    ),
    Role(
        "reward_model",
        f"{_ROLES}.reward_model:RewardModelWorker",
        f"{_ROLES}.reward_model:RewardModelGroup",
        lambda config: config.reward_model.enable,
        section="reward_model",
        size_key="cluster.reward_model_world_size",
        fsdp="reward_model.model.fsdp_config",
        ranks=role_models.scorer_ranks,
        model=role_models.scorer,
        shares=_BESIDE,
        passes=role_models.scorer_passes,
        own_passes=role_models.retraining_passes,
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
        ranks=role_models.critic_ranks,
        model=role_models.critic,
        trains=True,
        shares=_BESIDE,
        passes=role_models.critic_passes,
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
        ranks=role_models.supervised_ranks,
        model=role_models.trained_model,
        trains=True,
        passes=role_models.supervised_passes,
    )


SUPERVISED_ROLES = {schema.role: _supervised(schema) for schema in (SFTConfig, RewardModelTrainingConfig)}


@dataclass(frozen=True)
class ModelPass:
    """A row of the table of passes: a model adds columns to the batch of a step, while other groups are sampled or,
    where it has to wait, after the rollout.

    Attributes:
        name: of the pass, and of the seconds that it takes.
        role: whose ranks compute it.
        limit: the name of its time limit; "": its own.
        method: of a rank.
        needs: columns that it reads besides the sequences; they come with the scores.
        adds: columns that it always adds.
        present: whether a run with this config has it.
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


_BY_ACTOR = ("ref", "actor", "ref_log_prob", "compute_reference")
PASSES = [
    ModelPass("ref", "ref", "ref_log_prob", needs=_shown, present=ROLES["ref"].present),
    ModelPass(*_BY_ACTOR, needs=_shown, present=attrgetter("actor_is_reference")),
    ModelPass("old_log_prob", "actor", adds=("old_log_probs",), present=attrgetter("needs_old_log_probs")),
    ModelPass("values", "critic", adds=("values",), present=ROLES["critic"].present),
]


def passes_of(config: Any, *, waiting: bool) -> list[ModelPass]:
    """Return the passes of a run's steps that wait until the rollout is over, or those that do not."""
    return [row for row in PASSES if row.present(config) and row.waits(config) == waiting]


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
    return role_models.references(config) if row.name == "ref" else list(filter(None, [row.model(config)]))
