"""A plan as text, before anything starts: placement, batch sizes and memory, of every command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from grpo_dist.config.command import AnyCommand
from grpo_dist.config.environment import recorded
from grpo_dist.config.keys import flatten, shown, value_of
from grpo_dist.config.load import default_values, readable_config
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SupervisedConfig
from grpo_dist.plan.memory import kv_cache_tokens, memory_estimate, worst_moments
from grpo_dist.plan.model_shape import model_config_at_hand
from grpo_dist.plan.placement import Placement, node_layout, placement
from grpo_dist.plan.roles import Pass, Role, engine_dtype, is_deterministic, lora_of, models_of, roles_of, table_of

_WHOLE = "(all other keys have their defaults; --full shows the whole config)"
# (label, value)
Rows = list[tuple[str, str]]


def format_plan(config: JobConfig, notes: list[str], changed: Sequence[str] | None = None) -> str:
    """Return the output of a dry run: the config, then the plan.

    Args:
        changed: the keys to show, as key=value; None: the whole config.
    """
    settings = readable_config(config).rstrip().splitlines() if changed is None else [*changed, _WHOLE]
    blocks = [
        "resolved config\n" + _indent(settings),
        "run\n" + _table(_run_rows(config)),
        "batch\n" + _table(batch_arithmetic(config)),
        "placement\n" + _table(_placement_rows(config)),
        "memory per process (estimate)\n" + _table(_memory_rows(config)),
    ]
    if notes:
        blocks.append("notes\n" + _indent(notes))
    return "\n\n".join(blocks)


def format_summary(config: JobConfig, notes: list[str]) -> str:
    """Return a short form of the plan, shown at the start of a run."""
    rows = [*_run_rows(config), ("step", _step(config)), ("workers", _workers(config))]
    return "\n".join([_table(rows), *(f"  note: {note}" for note in notes)])


# --- the run ---------------------------------------------------------------------------------------------------------
def _run_rows(config: JobConfig) -> Rows:
    trainer = config.trainer
    steps = trainer.total_training_steps
    limit = _many(trainer.total_epochs, "epoch") if steps is None else _many(steps, "training step")
    images = []
    if isinstance(config, RunConfig) and (seen := config.data.image_key):
        vision = "trains" if config.trains_vision else "is frozen"
        images = [("images", f"of the column {seen}; the vision part {vision}")]
    return [
        ("algorithm", _algorithm(config)),
        ("model", config.model_path),
        *images,
        ("train data", ", ".join(config.data.train_files)),
        ("validation data", ", ".join(config.data.val_files) or "none"),
        ("length", limit),
        ("run directory", f"{trainer.default_local_dir} (resume: {trainer.resume_mode})"),
        ("logs", ", ".join(trainer.records)),
    ]


def _algorithm(config: JobConfig) -> str:
    if isinstance(config, SupervisedConfig):
        return f"{config.role}, lr {config.optim.lr:g}"
    assert isinstance(config, RunConfig)
    actor, algorithm, stale = config.actor_rollout_ref.actor, config.algorithm, config.trainer.max_staleness
    terms = [algorithm.adv_estimator, *([loss] if (loss := actor.policy_loss.loss_mode) != "vanilla" else [])]
    terms.append(actor.loss_agg_mode)
    if actor.use_kl_loss:
        terms.append(f"KL {actor.kl_loss_coef:g} * {actor.kl_loss_type}")
    if algorithm.use_kl_in_reward:
        terms.append(f"KL {algorithm.kl_ctrl.kl_coef:g} * {algorithm.kl_penalty} in the reward")
    if not config.needs_reference:
        terms.append("no KL")
    terms.append(f"lr {actor.optim.lr:g}")
    if stale:
        terms.append(f"up to {_many(stale, 'update')} stale")
        terms.append(f"rollout_is={config.rollout_is}" if config.rollout_is else "no importance weights")
    return ", ".join(terms)


# --- the batch -------------------------------------------------------------------------------------------------------
def batch_arithmetic(config: JobConfig) -> Rows:
    """Return how the rows of a step become the micro-batches of a rank, as (label, value) rows."""
    if isinstance(config, SupervisedConfig):
        step = f"{config.data.train_batch_size:,}"
        return [("rows per training step", step), (f"passes of a {config.role} rank", _limit(config))]
    assert isinstance(config, RunConfig)
    rollout, place = config.actor_rollout_ref.rollout, placement(config)
    prompts, sequences = config.data.train_batch_size, config.data.train_batch_size * rollout.n
    per_engine = ceil(sequences / place.num_engines)
    longest = config.data.max_prompt_length + config.data.max_response_length
    rows = [
        ("prompts per training step", f"{prompts:,}"),
        ("sequences per training step", f"{prompts:,} prompts * n={rollout.n} = {sequences:,}"),
        ("tokens per training step", f"at most {sequences:,} * {longest:,} = {sequences * longest:,}"),
        ("sequences per engine", f"{per_engine:,} ({min(per_engine, rollout.max_num_seqs):,} at once)"),
    ]
    return rows + [passes for row in roles_of(config) if row.passes(config) for passes in _passes_of(config, row)]


def _passes_of(config: RunConfig, row: Role) -> Rows:
    """Return the passes of a role over a batch, and over the mini-batches of one that trains."""
    groups, n = placement(config).row_groups(config, row.name), config.actor_rollout_ref.rollout.n
    rows, whose = [], "" if row.name == "actor" else f"{row.name}'s "
    for limits in row.passes(config):
        if limits.updates:
            section = value_of(config, row.section)
            mini, epochs = section.ppo_mini_batch_size, section.ppo_epochs
            count, per_rank = config.data.train_batch_size // mini, mini * n // groups
            rows += [
                (f"{whose}mini-batches per pass", f"{count:,} of {mini:,} prompts = {mini * n:,} sequences"),
                (f"{whose}optimizer steps per training step", f"{count:,} * ppo_epochs={epochs} = {count * epochs:,}"),
                (f"sequences per {row.name} rank and mini-batch", f"{per_rank:,}"),
                (f"micro-batches per {row.name} rank and mini-batch", _passes(per_rank, n, limits)),
            ]
        else:
            per_rank = ceil(config.data.train_batch_size * n / groups)
            rows.append((f"{limits.what} passes per {row.name} rank", limits.none or _passes(per_rank, n, limits)))
    return rows


def _passes(per_rank: int, n: int, limits: Pass) -> str:
    if limits.max_token_len is not None:
        return f"as many as needed with {limits.max_token_len:,} tokens each"
    whole = limits.size // n * n if n <= limits.size else ceil(n / ceil(n / limits.size))  # groups, or equal parts
    size = min(whole, per_rank)
    groups = f" (whole groups of {n})" if size < min(limits.size, per_rank) and size % n == 0 else ""
    return f"{ceil(per_rank / size):,} of {size:,} sequences{groups}"


def _limit(config: SupervisedConfig) -> str:
    data = config.data
    if data.use_dynamic_bsz:
        return f"at most {data.max_token_len_per_gpu:,} tokens"
    return f"{data.micro_batch_size_per_gpu:,} conversations of up to {data.max_length:,} tokens"


def _step(config: JobConfig) -> str:
    if isinstance(config, SupervisedConfig):
        return f"{_many(config.data.train_batch_size, 'row')}, in passes of {_limit(config)}"
    assert isinstance(config, RunConfig)
    actor, n, prompts = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n, config.data.train_batch_size
    per_rank = actor.ppo_mini_batch_size * n // placement(config).row_groups(config, "actor")
    steps = prompts // actor.ppo_mini_batch_size * actor.ppo_epochs
    update, *_ = roles_of(config)[0].passes(config)
    return (
        f"{prompts:,} prompts * n={n} = {prompts * n:,} sequences; {_many(steps, 'optimizer step')}; a mini-batch is "
        f"{_many(per_rank, 'sequence')} per actor rank, in micro-batches: {_passes(per_rank, n, update)}"
    )


# --- placement -------------------------------------------------------------------------------------------------------
def _workers(config: JobConfig) -> str:
    place, table, counts = placement(config), table_of(config), []
    for role, size in place.world_sizes.items():
        if role == "rollout":
            engines = _many(place.num_engines, "rollout engine")
            more = f", up to {place.num_engines + place.extra_engines}" if place.extra_engines else ""
            counts.append(engines + more + (f" (TP={place.tensor_parallel})" if place.tensor_parallel > 1 else ""))
        elif size or table[role].absent(config):
            counts.append(f"{size or 'no'} {role}")
    where = "CPU" if place.device == "cpu" else _many(place.num_devices, "GPU") + _shared(place)
    return f"{', '.join(counts)}, on {where}"


def _shared(place: Placement) -> str:
    if not place.sharing:
        return ""
    *first, last = place.sharing
    return f"; {', '.join(first)} and {last} share {'it' if place.num_devices == 1 else 'theirs'}"


def _placement_rows(config: JobConfig) -> Rows:
    place, trainer = placement(config), config.trainer
    rows = [("machines", f"{trainer.nnodes} with {_many(trainer.n_gpus_per_node, 'GPU')} each")]
    for row in table_of(config).values():
        if row.present(config):
            rows.append((row.name, _processes(config, row)))
        elif why := row.absent(config):
            rows.append((row.name, f"not started: {why}"))
    if place.device == "cuda":
        unused = config.num_gpus - place.num_devices
        idle = f", {unused} idle" if unused > 0 else ""
        rows.append(("GPUs", f"{place.num_devices} of {config.num_gpus} used{idle}{_shared(place)}"))
    rows += _machine_rows(config)
    rows.append(("per worker", f"{place.num_cpus_per_worker:g} logical CPU"))
    if place.device == "cpu":
        rows.append(("threads per worker", ", ".join(f"{role} {count}" for role, count in place.num_threads.items())))
    return rows


def _processes(config: JobConfig, row: Role) -> str:
    """Return the processes of a role: engines, ranks with their types and model, or how many there are."""
    place = placement(config)
    if row.name == "rollout" and isinstance(config, RunConfig):
        return (
            f"{_many(place.num_engines, 'engine')}, TP={place.tensor_parallel}, "
            f"{engine_dtype(config)}{_head(config.actor_rollout_ref.model.head_dtype)}, "
            f"deterministic={shown(is_deterministic(config))}"
        )
    if (model := row.model(config)) is None:
        return _many(value_of(config, row.size_key), "process", "processes")
    split = config.sequence_parallel_size(row.name)
    ranks = _many(place.world_sizes[row.name], "rank")
    if split > 1:
        ranks += f" in {_many(place.world_sizes[row.name] // split, 'group')} that split sequences"
    dtypes = f"weights {model.held}, compute {model.compute}" if row.trains else model.compute
    if row.trains and lora_of(config, model) is not None:
        dtypes = f"factors {model.held}, weights and compute {model.compute}"
    path = "" if model.key == models_of(config)[0].key else model.path
    return ", ".join(filter(None, (ranks, f"{dtypes}{_head(model.head)}", path, model.remark)))


def _head(dtype: str | None) -> str:
    return f", output layer {dtype}" if dtype else ""


def _machine_rows(config: JobConfig) -> Rows:
    """Return the ranks on each machine, if there are several machines."""
    rows, machines, homes = [], config.trainer.nnodes, node_layout(config)
    for machine in range(machines if machines > 1 else 0):
        parts = []
        for role, home in homes.items():
            if count := home.count(machine):  # of ranks one after the other
                first = home.index(machine)
                parts.append(f"{role} {first}" + (f"-{first + count - 1}" if count > 1 else ""))
        rows.append((f"machine {machine}", ", ".join(parts) or "idle"))
    return rows


# --- memory ----------------------------------------------------------------------------------------------------------
def _memory_rows(config: JobConfig) -> Rows:
    model = model_config_at_hand(config.model_path)
    memory = memory_estimate(config, model)
    if memory is None:
        return [("all roles", "unknown: the model's config.json is not on this machine")]
    rest = "; KV cache: what is left of {:.0%} of the GPU"
    rows = [(role.role, _added(role.parts) + (rest.format(role.share) if role.share else "")) for role in memory]
    estimated, sizes = {role.role for role in memory}, placement(config).world_sizes
    missing = [role for role, size in sizes.items() if size and role not in estimated]
    rows += [(role, "unknown: its config.json is not on this machine") for role in missing]
    rows += [(f"{role.role}, CPU memory", _added(role.host)) for role in memory]
    if config.device == "cuda":
        gib = config.cluster.gpu_memory_gib
        for names, worst in worst_moments(config, memory, gib or 0.0):
            total = sum(worst.values())
            if gib is not None:
                rows.append((f"a GPU with {names}", f"{total:.1f} of {gib:g} GiB{', too much' if total > gib else ''}"))
            elif "rollout" not in names:  # an engine's share is not known
                rows.append((f"a GPU with {names}", f"{total:.1f} GiB"))
    if isinstance(config, RunConfig) and (tokens := kv_cache_tokens(config, model)) is not None:
        rows.append(("KV cache", f"{tokens:,} tokens per engine"))
    return rows


# --- text ------------------------------------------------------------------------------------------------------------
def _table(rows: Rows) -> str:
    width = max(len(label) for label, _ in rows)
    return _indent([f"{label.ljust(width)}  {value}" for label, value in rows])


def _indent(lines: Sequence[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


def _many(count: int, one: str, more: str = "") -> str:
    """Return a count with its noun: "1 rank", "2 ranks"."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def _added(parts: Mapping[str, float]) -> str:
    listed = " + ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
    return f"{listed} = {_gib(sum(parts.values()))} GiB" if len(parts) > 1 else f"{listed} GiB"


def _gib(size: float) -> str:
    """Return a size in GiB, with three digits where it is small."""
    return f"{size:.1f}" if size >= 10 else f"{size:.3g}" if size >= 0.01 else f"{size:.4f}"


def changed_keys(config: JobConfig, command: AnyCommand, saved: Mapping[str, object] | None = None) -> list[str]:
    """The keys whose values, or `saved` ones, are not the command's defaults, as key=value; none of roles it lacks."""
    lacking = tuple(f"{row.section}." for row in table_of(config).values() if row.section and not row.present(config))
    plain = command.schema.model_validate(default_values(command)).model_dump(mode="json")
    before, now = dict(flatten(plain)), dict(flatten(saved or recorded(config, config.model_dump(mode="json"))))
    changed = (key for key, value in now.items() if before.get(key) != value and not key.startswith(lacking))
    return [f"{key}={shown(now[key])}" for key in changed]
