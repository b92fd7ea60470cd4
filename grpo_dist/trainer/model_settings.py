"""From a row of the table of roles to how its ranks load, shard and feed their model. Imports neither Ray nor vLLM."""

from __future__ import annotations

from grpo_dist.assets import POLICY_KEY
from grpo_dist.config.problems import value_of
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SupervisedConfig
from grpo_dist.config.schema_roles import LoraSection
from grpo_dist.engines.settings import ModelSettings, choose_layout
from grpo_dist.plan.placement import Placement
from grpo_dist.plan.role_models import Model
from grpo_dist.plan.roles import Role, layers_key, offloads_optimizer, reshards


def model_settings(config: JobConfig, row: Role, place: Placement, model: Model | None = None) -> ModelSettings:
    """Return the settings of the (first) model that a row's ranks hold: its sections, what placement and row say."""
    assert isinstance(config, RunConfig | SupervisedConfig)
    model = model or model_of(config, row)
    section, updates = value_of(config, model.key.rpartition(".")[0]), layers_key(config, row)
    factors = isinstance(section, LoraSection) and not updates
    return ModelSettings(
        model=section.without_factors() if factors else section,
        fsdp_config=value_of(config, row.fsdp),
        layers=value_of(config, updates) if updates else None,
        key=model.key,
        path=model.path,
        model_dtype=model.held,
        compute_dtype=model.compute,
        head_dtype=model.head,
        reshard_after_forward=reshards(config, row),
        optimizer_offload=offloads_optimizer(config, row),
        shares_gpu=bool(place.sharing),
        layout=_layout(config),
        max_model_len=model.longest or config.max_model_len,
        num_labels=int(bool(model.outputs or model.new_head)),
        new_head_seed=config.trainer.seed if model.new_head in ("scores", "values") else None,
        small_new_head=model.new_head == "values",
        sequence_parallel_size=config.sequence_parallel_size(row.name),
        sequence_parallel_key=f"{row.section}.ulysses_sequence_parallel_size",
        room=_room(row, model),
        layers_key=updates,
        replays_routes=isinstance(config, RunConfig) and config.replays_routes and model.key == POLICY_KEY,
    )


def model_of(config: JobConfig, row: Role) -> Model:
    """Return the model that a row's ranks hold."""
    model = row.model(config)
    assert model is not None, f"{row.name} has a model: rules ask for its path"
    return model


def _layout(config: RunConfig | SupervisedConfig) -> str:
    """Return the layout of sequences, which is the same for all models of a run."""
    if isinstance(config, SupervisedConfig):
        return choose_layout(use_remove_padding=config.model.use_remove_padding, use_prefix_grouper=True)
    roles = config.actor_rollout_ref
    return choose_layout(
        use_remove_padding=roles.model.use_remove_padding, use_prefix_grouper=roles.actor.use_prefix_grouper
    )


def _room(row: Role, model: Model) -> str:
    """Return what leaves more room on the GPUs of a row's ranks."""
    states = f"{row.fsdp}.optimizer_offload=true and " if row.trains else ""
    more = "take more GPUs (trainer.n_gpus_per_node, trainer.nnodes)"
    if row.follows:
        more = f"give the {model.title} GPUs of its own, or more of them ({row.size_key})"
    return f"set {states}{row.fsdp}.param_offload=true, or {more}"
