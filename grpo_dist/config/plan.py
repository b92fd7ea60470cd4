"""The plan of a run as text, before anything starts: placement, batch sizes, memory and a time estimate."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from grpo_dist.config.load import readable_config
from grpo_dist.config.memory import RoleMemory, kv_cache_tokens, memory_estimate
from grpo_dist.config.model_shape import model_config_at_hand
from grpo_dist.config.node_layout import node_layout
from grpo_dist.config.placement import Placement, placement
from grpo_dist.config.plan_text import Rows, added, device_memory, indent, many, table
from grpo_dist.config.problems import shown
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.shorter_steps import shorter_steps
from grpo_dist.config.step_estimate import step_estimate
from grpo_dist.config.step_rates import CALIBRATE, machine_rates


def batch_arithmetic(config: RunConfig) -> Rows:
    """How the prompts of a step become the micro-batches of a rank, as (label, value) rows."""
    actor, rollout, place = (
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
        placement(config),
    )
    prompts, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    sequences = prompts * rollout.n
    minis = prompts // mini
    per_rank = mini * rollout.n // (groups := place.row_groups(config, "actor"))
    per_engine = ceil(sequences / place.num_engines)
    longest = config.data.max_prompt_length + config.data.max_response_length
    rows = [
        ("prompts per training step", f"{prompts:,}"),
        ("sequences per training step", f"{prompts:,} prompts * n={rollout.n} = {sequences:,}"),
        ("tokens per training step", f"at most {sequences:,} * {longest:,} = {sequences * longest:,}"),
        ("sequences per engine", f"{per_engine:,} ({min(per_engine, rollout.max_num_seqs):,} at once)"),
        ("mini-batches per pass", f"{minis:,} of {mini:,} prompts = {mini * rollout.n:,} sequences"),
        (
            "optimizer steps per training step",
            f"{minis:,} * ppo_epochs={actor.ppo_epochs} = {minis * actor.ppo_epochs:,}",
        ),
        ("sequences per actor rank and mini-batch", f"{per_rank:,}"),
        (
            "micro-batches per actor rank and mini-batch",
            _passes(per_rank, rollout.n, actor.ppo_micro_batch_size_per_gpu, actor.max_token_len),
        ),
        ("old log-prob passes per actor rank", _old_log_prob_passes(config, ceil(sequences / groups))),
    ]
    if place.ref_world_size:
        ref = config.actor_rollout_ref.ref
        limits = ref.log_prob_micro_batch_size_per_gpu, actor.log_prob_max_token_len(ref)
        per_rank = ceil(sequences / place.row_groups(config, "ref"))
        rows.append(("reference passes per ref rank", _passes(per_rank, rollout.n, *limits)))
    if place.reward_model_world_size:
        section = config.reward_model
        per_rank = ceil(sequences / place.reward_model_world_size)
        limits = section.micro_batch_size_per_gpu, section.max_token_len(actor)
        rows.append(("reward model passes per rank", _passes(per_rank, rollout.n, *limits)))
    if place.critic_world_size:
        rows += _critic_batches(config, place.row_groups(config, "critic"))
    return rows


def _critic_batches(config: RunConfig, ranks: int) -> Rows:
    critic, n, prompts = config.critic, config.actor_rollout_ref.rollout.n, config.data.train_batch_size
    values = critic.forward_micro_batch_size_per_gpu, critic.forward_max_token_len
    updates = critic.ppo_micro_batch_size_per_gpu, critic.max_token_len
    steps = prompts // critic.ppo_mini_batch_size * critic.ppo_epochs
    return [
        ("value passes per critic rank", _passes(ceil(prompts * n / ranks), n, *values)),
        ("critic's optimizer steps per training step", f"{steps:,}"),
        (
            "micro-batches per critic rank and mini-batch",
            _passes(ceil(critic.ppo_mini_batch_size * n / ranks), n, *updates),
        ),
    ]


def _old_log_prob_passes(config: RunConfig, per_rank: int) -> str:
    if config.on_policy:
        return "none: on-policy, so the update computes them"
    if not config.needs_old_log_probs:
        return "none: the rollout log-probs are used (bypass_mode)"
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    limits = rollout.log_prob_micro_batch_size_per_gpu, actor.log_prob_max_token_len(rollout)
    return _passes(per_rank, rollout.n, *limits)


def format_plan(config: RunConfig, notes: list[str]) -> str:
    """The output of a dry run: the whole config, then the plan."""
    model = model_config_at_hand(config.actor_rollout_ref.model.path)
    tokens = kv_cache_tokens(config, model)
    blocks = [
        "resolved config\n" + indent(readable_config(config).rstrip().splitlines()),
        "run\n" + table(_run_rows(config)),
        "batch\n" + table(batch_arithmetic(config)),
        "placement\n" + table(_placement_rows(config)),
        "memory per process (estimate)\n"
        + table(
            _memory_rows(memory_estimate(config, model), tokens, placement(config).world_sizes),
        ),
    ]
    if rows := _step_rows(config, model):
        blocks.append("a step (estimate)\n" + table(rows))
    if notes:
        blocks.append("notes\n" + indent(notes))
    return "\n\n".join(blocks)


def format_summary(config: RunConfig, notes: list[str]) -> str:
    """A short form of the plan, shown at the start of a run."""
    actor, rollout, place = (
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
        placement(config),
    )
    per_rank = actor.ppo_mini_batch_size * rollout.n // place.row_groups(config, "actor")
    sequences = config.data.train_batch_size * rollout.n
    steps = config.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
    if actor.max_token_len is not None:
        micro = f"micro-batches of at most {actor.max_token_len:,} tokens"
    else:
        size = _whole_groups(actor.ppo_micro_batch_size_per_gpu, rollout.n)
        micro = many(ceil(per_rank / size), "micro-batch", "micro-batches")
    step = (
        f"{config.data.train_batch_size:,} prompts * n={rollout.n} = {sequences:,} sequences; "
        f"{many(steps, 'optimizer step')}; a mini-batch is {many(per_rank, 'sequence')} per actor rank, "
        f"in {micro}"
    )
    rows = [*_run_rows(config), ("step", step), ("workers", _workers(place))]
    return "\n".join([table(rows), *(f"  note: {note}" for note in notes)])


def _run_rows(config: RunConfig) -> Rows:
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    algorithm = config.algorithm
    terms = [algorithm.adv_estimator, *([loss] if (loss := actor.policy_loss.loss_mode) != "vanilla" else [])]
    terms.append(actor.loss_agg_mode)
    if actor.use_kl_loss:
        terms.append(f"KL {actor.kl_loss_coef:g} * {actor.kl_loss_type}")
    if algorithm.use_kl_in_reward:
        terms.append(f"KL {algorithm.kl_ctrl.kl_coef:g} * {algorithm.kl_penalty} in the reward")
    if not config.needs_reference:
        terms.append("no KL")
    terms.append(f"lr {actor.optim.lr:g}")
    if trainer.max_staleness:
        weights = f"rollout_is={config.rollout_is}" if config.rollout_is else "no importance weights"
        terms.append(f"up to {many(trainer.max_staleness, 'update')} stale, {weights}")
    limit = many(trainer.total_epochs, "epoch")
    if trainer.total_training_steps is not None:
        limit = many(trainer.total_training_steps, "training step")
    return [
        ("algorithm", ", ".join(terms)),
        ("model", config.actor_rollout_ref.model.path),
        ("train data", ", ".join(config.data.train_files)),
        ("validation data", ", ".join(config.data.val_files) or "none"),
        ("length", limit),
        ("run directory", f"{trainer.default_local_dir} (resume: {trainer.resume_mode})"),
        ("logs", ", ".join(trainer.records)),
    ]


def _workers(place: Placement) -> str:
    engines = many(place.num_engines, "rollout engine")
    if place.extra_engines:
        engines += f", up to {place.num_engines + place.extra_engines}"
    if place.tensor_parallel > 1:
        engines += f" (TP={place.tensor_parallel})"
    ref = f"{place.ref_world_size} ref" if place.ref_world_size else "no ref"
    if place.reward_model_world_size:
        ref += f", {place.reward_model_world_size} reward model"
    if place.critic_world_size:
        ref += f", {place.critic_world_size} critic"
    where = "CPU" if place.device == "cpu" else many(place.num_devices, "GPU") + _shared(place)
    return f"{place.actor_world_size} actor, {engines}, {ref}, on {where}"


def _shared(place: Placement) -> str:
    """Which roles share GPUs; "" if none do."""
    if not place.sharing:
        return ""
    *first, last = place.sharing
    return f"; {', '.join(first)} and {last} share {'it' if place.num_devices == 1 else 'theirs'}"


def _placement_rows(config: RunConfig) -> Rows:
    place, trainer, rollout = placement(config), config.trainer, config.actor_rollout_ref.rollout
    fsdp, ref = config.actor_rollout_ref.actor.fsdp_config, config.actor_rollout_ref.ref.fsdp_config
    compute = fsdp.resolved_dtype(config.default_dtype)
    rows = [
        ("machines", f"{trainer.nnodes} with {many(trainer.n_gpus_per_node, 'GPU')} each"),
        ("actor", f"{_ranks(config, 'actor')}, weights {fsdp.model_dtype}, compute {compute}"),
        (
            "rollout",
            f"{many(place.num_engines, 'engine')}, TP={place.tensor_parallel}, "
            f"{rollout.resolved_dtype(config.default_dtype)}, "
            f"deterministic={shown(rollout.resolved_deterministic(place.device))}",
        ),
    ]
    if place.ref_world_size:
        teacher = f", {config.actor_rollout_ref.ref.model.path}" if config.has_teacher else ""
        dtype = ref.resolved_dtype(config.default_dtype)
        rows.append(("ref", f"{_ranks(config, 'ref')}, {dtype}{teacher}"))
    elif config.needs_reference:
        rows.append(("ref", "not started: the actor without its LoRA adapters is the reference"))
    else:
        rows.append(("ref", "not started: no KL term"))
    if place.reward_model_world_size:
        section = config.reward_model
        dtype, freq = section.model.fsdp_config.resolved_dtype(config.default_dtype), section.retrain.freq
        again = f", retrained after every {freq} steps (weights {section.retrain.model_dtype})" if freq > 0 else ""
        rows.append(
            ("reward_model", f"{many(place.reward_model_world_size, 'rank')}, {dtype}, {section.model.path}{again}")
        )
    if place.critic_world_size:
        held = config.critic.model.fsdp_config
        dtypes = f"weights {held.model_dtype}, compute {held.resolved_dtype(config.default_dtype)}"
        rows.append(("critic", f"{_ranks(config, 'critic')}, {dtypes}, {config.critic.model.path}"))
    rows.append(("reward", many(config.reward.num_workers, "process", "processes")))
    if place.device == "cuda":
        unused = config.num_gpus - place.num_devices
        idle = f", {unused} idle" if unused > 0 else ""
        rows.append(("GPUs", f"{place.num_devices} of {config.num_gpus} used{idle}{_shared(place)}"))
    rows += _machine_rows(config)
    rows.append(("per worker", f"{place.num_cpus_per_worker:g} logical CPU"))
    if place.device == "cpu":
        rows.append(("threads per worker", ", ".join(f"{role} {count}" for role, count in place.num_threads.items())))
    return rows


def _ranks(config: RunConfig, role: str) -> str:
    place, split = placement(config), config.sequence_parallel_size(role)
    groups = f" in {many(place.row_groups(config, role), 'group')} that split sequences" if split > 1 else ""
    return many(place.world_sizes[role], "rank") + groups


def _machine_rows(config: RunConfig) -> Rows:
    """The ranks on each machine, if there are several machines."""
    machines = config.trainer.nnodes
    if machines == 1:
        return []
    ranks: list[dict[str, list[int]]] = [{} for _ in range(machines)]
    for role, home in node_layout(config).items():
        for rank, machine in enumerate(home):
            ranks[machine].setdefault(role, []).append(rank)
    rows = []
    for machine, there in enumerate(ranks):
        parts = [f"{role} {_from_to(found)}" for role, found in there.items()]
        rows.append((f"machine {machine}", ", ".join(parts) or "idle"))
    return rows


def _from_to(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _memory_rows(memory: list[RoleMemory] | None, kv_tokens: int | None, sizes: Mapping[str, int]) -> Rows:
    if memory is None:
        return [("all roles", "unknown: the model's config.json is not on this machine")]
    rows = [(role.role, device_memory(role)) for role in memory]
    estimated = {role.role for role in memory}
    missing = [role for role, size in sizes.items() if size and role not in estimated]
    rows += [(role, "unknown: its config.json is not on this machine") for role in missing]
    rows += [(f"{role.role}, CPU memory", added(role.host)) for role in memory]
    if kv_tokens is not None:
        rows.append(("KV cache", f"{kv_tokens:,} tokens per engine"))
    return rows


def _step_rows(config: RunConfig, model: Mapping[str, Any] | None) -> Rows:
    """Seconds by phase, idle shares by role, and settings with which a step would be shorter."""
    machine = machine_rates(config.device)
    if machine is None:
        return [("rates", f"of this processor are not known; `{CALIBRATE}` measures them in a minute or two")]
    found = step_estimate(config, model, machine)
    if found is None:
        return []
    longest, expected = config.data.max_response_length, config.trainer.expected_response_length
    which = "as expected" if expected else "the longest; trainer.expected_response_length changes that"
    phases = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in found.phases.items())
    overlap = f", since phases overlap ({_seconds(found.beyond)} of log-probs after generation)" * bool(found.waiting)
    rows = [
        ("rates", machine.source + ("" if machine.measured else f"; `{CALIBRATE}` measures what is at hand")),
        (
            "tokens",
            f"responses of {expected or longest:,} ({which}), prompts of {config.data.max_prompt_length // 2:,} (half "
            "of the longest)",
        ),
        ("seconds", f"{phases}; together {_seconds(found.total)}{overlap}; without the reward function"),
    ]
    if found.waiting:
        rows.append(("idle", ", ".join(f"{role} {share:.0%} of the step" for role, share in found.waiting.items())))
    others = shorter_steps(config, model, found.total, machine)
    shorter = [f"{_seconds(seconds)} with {text}" for seconds, text in others]
    return [*rows, ("shorter", "; ".join(shorter))] if shorter else rows


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2g}"


def _passes(per_rank: int, n: int, size: int, max_token_len: int | None) -> str:
    if max_token_len is not None:
        return f"as many as needed with {max_token_len:,} tokens each"
    size = min(_whole_groups(size, n), per_rank)
    return f"{ceil(per_rank / size):,} of {size:,} sequences"


def _whole_groups(size: int, n: int) -> int:
    """Sequences in a pass of at most `size`: whole groups of n responses, or equal parts of one group."""
    return size // n * n if n <= size else ceil(n / ceil(n / size))
