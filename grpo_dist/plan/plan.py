"""The plan: a run as it will be, decided once before anything starts. Loads neither torch, Ray nor vLLM.

What a null of the config stands for, where each process runs, how many steps there are and what each part is built from
are asked here, and nowhere again. A plan can be pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from grpo_dist.assets import POLICY_KEY
from grpo_dist.config.keys import value_of, with_value
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SupervisedConfig
from grpo_dist.config.schema_roles import ULYSSES, AgentConfig, LoraSection
from grpo_dist.engines.settings import EngineSettings, ModelSettings, RankSettings, SamplingSettings, choose_layout
from grpo_dist.plan import roles
from grpo_dist.plan.placement import Placement, placement
from grpo_dist.plan.roles import Model, Role, roles_of, table_of
from grpo_dist.plugins.names import TOKEN_SELECTING_LOSSES, absolute

if TYPE_CHECKING:
    from grpo_dist.algorithms.settings import ObjectiveSettings, TargetSettings, ValueSettings

C = TypeVar("C", bound=JobConfig)
C_co = TypeVar("C_co", bound=JobConfig, covariant=True)
# Keys of actor_rollout_ref.rollout that engines sample by.
_SAMPLED = ("n", "temperature", "top_p", "top_k", "ignore_eos", "min_p", "min_tokens", "stop", "bad_words")
# Keys of algorithm.rollout_correction that say how weights and masks are made, wherever that is.
_CORRECTION = {"rollout_is_threshold", "rollout_rs", "rollout_rs_threshold"}


@dataclass(frozen=True)
class Plan(Generic[C_co]):
    """A run as it will be.

    Attributes:
        config: with the values that are used where a null leaves them to the machine.
        place: the processes of each role, and what they get.
        steps: training steps; 0: not known.
    """

    config: C_co
    place: Placement
    steps: int = 0

    # --- models that are sharded over ranks ----------------------------------------------------------------------
    def ranks(self, role: str) -> RankSettings:
        """Return what the ranks of a role are built from."""
        config, row = self.config, table_of(self.config)[role]
        assert isinstance(config, RunConfig | SupervisedConfig)
        assert row.ranks is not None, f"{role} is a gang"
        passes = [*row.passes(config), *row.own_passes(config)]
        update = next((limits.limits for limits in passes if limits.updates), None)
        first, *teachers = (self.model(row, model) for model in roles.held_by(config, row))
        return row.ranks(
            config,
            self.steps,
            model=first,
            teachers=tuple(teachers),
            device=self.place.device,
            num_threads=self.place.num_threads[role],
            seed=config.trainer.seed,
            collective_timeout_s=self.collective_timeout_s,
            forward=next((limits.limits for limits in passes if not limits.updates), update),
            update=update,
        )

    def model(self, row: Role, model: Model) -> ModelSettings:
        """Return how a model that a row's ranks hold is loaded: its sections, and what placement and row say."""
        config = self.config
        assert isinstance(config, RunConfig | SupervisedConfig)
        section, updates = value_of(config, model.key.rpartition(".")[0]), roles.layers_key(config, row)
        frozen = isinstance(section, LoraSection) and not updates
        return ModelSettings(
            model=section.without_factors() if frozen else section,
            fsdp_config=value_of(config, row.fsdp),
            layers=value_of(config, updates) if updates else None,
            key=model.key,
            path=model.path,
            model_dtype=model.held,
            compute_dtype=model.compute,
            head_dtype=model.head,
            reshard_after_forward=roles.reshards(config, row),
            optimizer_offload=roles.offloads_optimizer(config, row),
            shares_gpu=bool(self.place.sharing),
            layout=_layout(config),
            max_model_len=model.longest or config.max_model_len,
            num_labels=int(bool(model.outputs or model.new_head)),
            new_head_seed=config.trainer.seed if model.new_head in ("scores", "values") else None,
            small_new_head=model.new_head == "values",
            sequence_parallel_size=config.sequence_parallel_size(row.name),
            sequence_parallel_key=f"{row.section}.{ULYSSES}",
            room=_room(row, model),
            layers_key=updates,
            replays_routes=isinstance(config, RunConfig) and config.replays_routes and model.key == POLICY_KEY,
            sees_images=isinstance(config, RunConfig) and config.data.image_key is not None,
            trains_vision=isinstance(config, RunConfig) and bool(updates) and config.trains_vision,
        )

    @property
    def collective_timeout_s(self) -> int:
        """Seconds that a rank waits for the others in one operation."""
        config: JobConfig = self.config
        assert isinstance(config, RunConfig | SupervisedConfig)
        return (config.actor_rollout_ref if isinstance(config, RunConfig) else config.trainer).nccl_timeout

    # --- engines -------------------------------------------------------------------------------------------------
    @property
    def transport(self: Plan[RunConfig]) -> str:
        """How weights reach the engines: "object_store", "broadcast" or "ipc"."""
        return roles.weight_transport(self.config, shares_gpu=self.place.shares_gpu)

    def engine(
        self: Plan[RunConfig],
        index: int,
        agent: AgentConfig | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> EngineSettings:
        """Return what rollout engine `index` is started with.

        Args:
            agent: the section of the agent loop as workers get it; None: an episode is one response.
            template_kwargs: variables of the chat template; None: there are none.
        """
        config = self.config
        rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
        profiles = config.trainer.profile_dir if config.trainer.profile_steps else None
        agent, (update, *_) = agent or rollout.agent, roles_of(config)[0].passes(config)
        return EngineSettings(
            rollout=rollout.replaced(name=absolute(rollout.name), agent=agent),
            model=model,
            device=self.place.device,
            dtype=roles.engine_dtype(config),
            max_model_len=config.max_model_len,
            max_episode_len=max(config.max_model_len, update.max_token_len or 0),
            seed=config.trainer.seed + index,  # with equal seeds, engines would sample the same
            needs_tokenizer=bool(rollout.stop or rollout.bad_words) or not agent.is_single_turn,
            template_kwargs=template_kwargs or {},
            shares_gpu=self.place.shares_gpu,
            collective_timeout_s=self.collective_timeout_s,
            profile_dir=None if profiles is None else str(profiles.absolute() / f".rollout{index}"),
            min_group_size=config.algorithm.min_group_size,
            records_routes=config.replays_routes,
            sees_images=config.data.image_key is not None,
        )

    @property
    def sampling(self: Plan[RunConfig]) -> SamplingSettings:
        """How training samples; where it is seeded, each prompt gets a seed of its own later."""
        rollout = self.config.actor_rollout_ref.rollout
        seed, longest = 0 if rollout.deterministic else None, self.config.data.max_response_length
        return SamplingSettings(max_tokens=longest, seed=seed, **{name: getattr(rollout, name) for name in _SAMPLED})

    @property
    def val_sampling(self: Plan[RunConfig]) -> SamplingSettings:
        """How validation samples: what ends or forbids text is that of training, what cuts its distribution is not."""
        val = self.config.actor_rollout_ref.rollout.val_kwargs
        return replace(
            self.sampling,
            n=val.n,
            temperature=val.temperature if val.do_sample else 0.0,
            top_p=val.top_p,
            top_k=val.top_k,
            seed=self.config.trainer.seed if val.do_sample else None,
            ignore_eos=False,
            min_p=0.0,
        )

    # --- targets and losses --------------------------------------------------------------------------------------
    @property
    def targets(self: Plan[RunConfig]) -> TargetSettings:
        """What advantages, corrections and targets are computed with, before the loss."""
        from grpo_dist.algorithms.settings import TargetSettings  # loads torch, which a plan does without

        config = self.config
        algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
        correction = algorithm.rollout_correction
        return TargetSettings(
            adv_estimator=absolute(algorithm.adv_estimator),
            options=dict(algorithm),
            kl_penalty=absolute(algorithm.kl_penalty) if algorithm.use_kl_in_reward else None,
            rollout_correction=correction.model_dump(include={*_CORRECTION, "rollout_is_batch_normalize"})
            | {"rollout_is": config.rollout_is},
            m2_threshold=correction.m2_threshold,
            old_log_probs_from=config.old_log_probs_from,
            mask_truncated=algorithm.mask_truncated_responses,
            mask_equal_groups=algorithm.mask_equal_groups,
            top_entropy_quantile=actor.top_entropy_quantile,
            loss_mode=absolute(actor.policy_loss.loss_mode),
            loss_options=dict(actor.policy_loss),
            observations=actor.observation_coeff != 0,
            by_prompt=actor.loss_agg_mode == "prompt-mean",
            has_values=config.needs_critic,
            by_agent=algorithm.credit == "agent",
        )

    @property
    def objective(self: Plan[RunConfig]) -> ObjectiveSettings:
        """What the policy's loss is made of."""
        from grpo_dist.algorithms.settings import ObjectiveSettings  # loads torch, which a plan does without

        config = self.config
        actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
        reinforce = correction.bypass_mode and correction.loss_type == "reinforce"
        in_loss = correction.bypass_mode and (reinforce or correction.rollout_rs)
        in_loss = in_loss or (config.on_policy and config.rollout_is is not None)
        bounds = correction.model_dump(include=_CORRECTION)
        weighted = config.rollout_is is not None or correction.m2_threshold is not None
        loss_mode = "gpg" if reinforce else absolute(actor.policy_loss.loss_mode)  # -A log pi, weighted
        return ObjectiveSettings(
            actor.replaced(
                policy_loss=actor.policy_loss.replaced(loss_mode=loss_mode),
                kl_loss_type=absolute(actor.kl_loss_type),
                loss_scale_factor=actor.loss_scale_factor or config.data.max_response_length,
            ),
            weighted=weighted and not (correction.bypass_mode or config.on_policy),
            selects_tokens=actor.policy_loss.loss_mode in TOKEN_SELECTING_LOSSES,
            correction={"rollout_is": config.rollout_is, **bounds} if in_loss else None,
            off_policy_threshold=correction.off_policy_mask_threshold,
            by_top_tokens=config.teacher_is_elsewhere,
            teaches_itself=config.algorithm.self_distillation.enable,
            on_policy=config.on_policy,
        )

    @property
    def value_objective(self: Plan[RunConfig]) -> ValueSettings:
        """What the loss of the values is made of."""
        from grpo_dist.algorithms.settings import ValueSettings  # loads torch, which a plan does without

        config = self.config
        longest = config.actor_rollout_ref.actor.loss_scale_factor or config.data.max_response_length
        return ValueSettings(config.critic, longest)


def make_plan(config: C, steps: int = 0) -> Plan[C]:
    """Return the plan of a run of so many training steps on machines like this one."""
    config = resolve(config)
    return Plan(config, placement(config), steps)


def resolve(config: C) -> C:
    """Return a config with the values that are used where a null leaves them to the machine, as checkpoints have it."""
    values: dict[str, Any] = {}
    for row in table_of(config).values():
        if row.switch:
            values[row.switch] = row.present(config)
        if row.fsdp and (row.trains or row.present(config)):
            values[f"{row.fsdp}.dtype"] = roles.train_dtype(config, value_of(config, row.fsdp))
    if isinstance(config, RunConfig):
        rollout = "actor_rollout_ref.rollout"
        values[f"{rollout}.dtype"] = roles.engine_dtype(config)
        values[f"{rollout}.deterministic"] = roles.is_deterministic(config)
    for key, value in values.items():
        config = with_value(config, key, value)
    return config


def _layout(config: RunConfig | SupervisedConfig) -> str:
    """Return the layout of sequences, which is the same for all models of a run."""
    if isinstance(config, SupervisedConfig):
        return choose_layout(use_remove_padding=config.model.use_remove_padding, use_prefix_grouper=True)
    packed, actor = config.actor_rollout_ref.model.use_remove_padding, config.actor_rollout_ref.actor
    return choose_layout(use_remove_padding=packed, use_prefix_grouper=actor.use_prefix_grouper)


def _room(row: Role, model: Model) -> str:
    """Return what leaves more room on the GPUs of a row's ranks."""
    states = f"{row.fsdp}.optimizer_offload=true and " if row.trains else ""
    more = "take more GPUs (trainer.n_gpus_per_node, trainer.nnodes)"
    if row.follows:
        more = f"give the {model.title} GPUs of its own, or more of them ({row.size_key})"
    return f"set {states}{row.fsdp}.param_offload=true, or {more}"
