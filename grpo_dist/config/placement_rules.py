"""Rules between batch sizes, lengths and the number of processes: what must divide, and what must fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from grpo_dist.config.node_layout import copy_size, node_layout
from grpo_dist.config.placement import FOLLOWERS, placement
from grpo_dist.config.problems import Problem, problem_between, value_of
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_models import CriticModelConfig
from grpo_dist.config.schema_roles import ModelConfig
from grpo_dist.sizes import divisor_up_to

Rule = Callable[[RunConfig], Iterator[Problem]]

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_CLUSTER = (
    "cluster.actor_world_size",
    "cluster.rollout_world_size",
    "cluster.ref_world_size",
    "cluster.reward_model_world_size",
    "cluster.critic_world_size",
)
_COLOCATE = "cluster.colocate"
_ULYSSES = "ulysses_sequence_parallel_size"


def _trained(config: RunConfig) -> dict[str, tuple[str, int]]:
    """The roles that train: section of the config, and number of ranks."""
    place = placement(config)
    roles = {"actor": (_ACTOR, place.actor_world_size), "critic": ("critic", place.critic_world_size)}
    return {role: found for role, found in roles.items() if found[1]}


def mini_batches_divide_the_batch(config: RunConfig) -> Iterator[Problem]:
    """A training batch is a whole number of mini-batches."""
    batch = config.data.train_batch_size
    for section, _ in _trained(config).values():
        key = f"{section}.ppo_mini_batch_size"
        if batch % (mini := value_of(config, key)):
            fitting = divisor_up_to(batch, mini)
            why = f"the batch must be a multiple of the mini-batch; for example ppo_mini_batch_size={fitting}"
            yield problem_between(config, why, "data.train_batch_size", key)


def ranks_divide_the_mini_batch(config: RunConfig) -> Iterator[Problem]:
    """Every rank of a role that trains gets the same number of sequences of a mini-batch; those that split them, the
    same sequences.
    """
    n, place = config.actor_rollout_ref.rollout.n, placement(config)
    for role, (section, _) in _trained(config).items():
        key, ranks, size = f"{section}.ppo_mini_batch_size", place.row_groups(config, role), f"{section}.{_ULYSSES}"
        if (sequences := value_of(config, key) * n) % ranks:
            split = f"{value_of(config, key)} * {n} = {sequences}"
            groups = "ranks" if value_of(config, size) == 1 else "groups of ranks"
            why = f"{split} sequences of a mini-batch do not split over {ranks} {role} {groups}"
            others = () if value_of(config, size) == 1 else (size,)
            yield problem_between(config, why, key, f"{_ROLLOUT}.n", f"cluster.{role}_world_size", *others)


def sequences_are_split_over_whole_groups(config: RunConfig) -> Iterator[Problem]:
    """The ranks of a role are a number of groups that split sequences, which they can where padding is removed."""
    sections, place = {"actor": _ACTOR, "ref": "actor_rollout_ref.ref", "critic": "critic"}, placement(config)
    for role, section in sections.items():
        key, size, ranks = f"{section}.{_ULYSSES}", config.sequence_parallel_size(role), place.world_sizes[role]
        if ranks % size:
            fitting = " or ".join(str(each) for each in range(1, ranks + 1) if ranks % each == 0)
            why = f"{ranks} {role} ranks are no whole number of groups of {size}; set it to {fitting}"
            yield problem_between(config, why, key, f"cluster.{role}_world_size")
        padding = "actor_rollout_ref.model.use_remove_padding"
        if ranks and size > 1 and not value_of(config, padding):
            why = "only sequences without padding are split over ranks; set the second to true, or the first to 1"
            yield problem_between(config, why, key, padding)


def copies_divide_the_ranks(config: RunConfig) -> Iterator[Problem]:
    """Each copy of the weights of a role that trains lies on equally many ranks."""
    sections = {"actor": f"{_ACTOR}.fsdp_config", "critic": "critic.model.fsdp_config"}
    for role, (_, ranks) in _trained(config).items():
        key = f"{sections[role]}.fsdp_size"
        size = value_of(config, key)
        if size > 0 and ranks % size:
            why = f"{ranks} {role} ranks do not split into copies of {size}; set a divisor, or -1"
            yield problem_between(config, why, key, f"cluster.{role}_world_size")


def engines_are_whole(config: RunConfig) -> Iterator[Problem]:
    """Rollout processes are a multiple of those of one engine, and an engine is on one machine."""
    place, per_node = placement(config), config.trainer.n_gpus_per_node
    key = f"{_ROLLOUT}.tensor_model_parallel_size"
    if place.device == "cuda" and per_node % place.tensor_parallel:
        fitting = " or ".join(str(size) for size in range(1, per_node + 1) if per_node % size == 0)
        why = f"an engine must be on one machine, so it must divide the {per_node} GPUs of one; set it to {fitting}"
        yield problem_between(config, why, key, "trainer.n_gpus_per_node")
    if place.rollout_world_size % place.tensor_parallel:
        what = "GPUs" if place.device == "cuda" else "processes"
        why = f"rollout {what} must be a multiple of the {what} of one engine"
        yield problem_between(config, why, "cluster.rollout_world_size", key)


def more_engines_are_whole_and_apart(config: RunConfig) -> Iterator[Problem]:
    """Engines that join a run are as large as the others, and need nothing of the actor's machine."""
    key, most = "cluster.max_rollout_world_size", config.cluster.max_rollout_world_size
    if most is None:
        return
    place, backend = placement(config), f"{_ROLLOUT}.checkpoint_engine.backend"
    if most < place.rollout_world_size or most % place.tensor_parallel:
        least = f"at least the {place.rollout_world_size} that the run starts with"
        why = f"it must be {least}, and a multiple of the {place.tensor_parallel} of one engine; null: none are added"
        size = f"{_ROLLOUT}.tensor_model_parallel_size"
        yield problem_between(config, why, key, "cluster.rollout_world_size", size)
    if place.shares_gpu and place.extra_engines:
        why = f"engines that share the actor's GPUs cannot become more; leave {key} null, or set colocate=actor_ref"
        yield problem_between(config, why, key, _COLOCATE)
    cpus = "cluster.num_cpus_per_worker"
    if place.device == "cpu" and place.extra_engines and value_of(config, cpus) is None:
        why = "by default any number of engines fits on this machine; set the second, and of each machine its CPUs"
        yield problem_between(config, why, key, cpus)
    if value_of(config, backend) == "ipc" and place.extra_engines:
        why = "weights do not get to other machines by ipc; set the second to null"
        yield problem_between(config, why, key, backend)


def roles_fit_on_the_gpus(config: RunConfig) -> Iterator[Problem]:
    """There are as many GPUs as the roles need together."""
    place, gpus = placement(config), config.num_gpus
    if place.device == "cpu" or place.num_devices <= gpus:
        return
    own = {role: size for role, size in place.world_sizes.items() if size and (role not in place.sharing[1:])}
    split = " + ".join(f"{role} {size}" for role, size in own.items())
    asked = [key for key in _CLUSTER if value_of(config, key) is not None]
    keys = (*asked, _COLOCATE, f"{_ROLLOUT}.tensor_model_parallel_size", "trainer.nnodes", "trainer.n_gpus_per_node")
    shared = "" if place.shares_gpu else f", or {_COLOCATE}=all, where all roles share the actor's GPUs"
    why = (
        f"{split} = {place.num_devices} GPUs are needed and there are {gpus}; set smaller {', '.join(_CLUSTER)}, or "
        f"more machines{shared}"
    )
    yield problem_between(config, why, *keys)


def shared_gpus_are_the_actors(config: RunConfig) -> Iterator[Problem]:
    """Roles that share GPUs share those of the actor."""
    place = placement(config)
    if place.device == "cpu":
        if config.cluster.colocate not in (None, "separate"):
            yield Problem(
                f"{_COLOCATE}={config.cluster.colocate}: there are no GPUs to share; leave it null", (_COLOCATE,)
            )
        return
    actor = place.actor_world_size
    for role in FOLLOWERS:
        if place.colocate == "actor_ref" and place.world_sizes[role] not in (0, actor):
            key = f"cluster.{role}_world_size"
            why = f"each of the {actor} actor ranks shares its GPU with one rank of {role}; leave {key} null"
            yield problem_between(config, why, key, _COLOCATE)
    if place.colocate == "all" and max(place.world_sizes.values()) > actor:
        split = ", ".join(f"{role} {size}" for role, size in place.world_sizes.items() if size)
        why = (
            f"every shared GPU needs an actor rank, and the processes are {split}; set cluster.actor_world_size to "
            f"{max(place.world_sizes.values())}, the others to {actor}, or all of them to null"
        )
        yield problem_between(config, why, *_CLUSTER, _COLOCATE)


def copies_and_engines_are_on_one_machine(config: RunConfig) -> Iterator[Problem]:
    """Engines, and copies of the actor's weights, are not split across machines, unless a copy takes whole ones."""
    place, per_node = placement(config), config.trainer.n_gpus_per_node
    if place.device == "cpu":
        return
    copy, fsdp_size = copy_size(config, place), f"{_ACTOR}.fsdp_config.fsdp_size"
    beside = place.sharing or ("actor",)
    if max(place.world_sizes[role] for role in beside) > place.actor_world_size:
        return
    if place.num_devices > config.num_gpus or per_node % place.tensor_parallel or place.actor_world_size % (copy or 1):
        return  # other rules report that
    if copy is not None and copy > per_node and copy % per_node:
        fitting = divisor_up_to(place.actor_world_size, per_node)
        why = (
            f"a copy of the weights on {copy} GPUs would share a machine of {per_node} with another copy, and its "
            f"traffic would cross the network; set it to {fitting}, a multiple of n_gpus_per_node, or -1"
        )
        yield problem_between(config, why, fsdp_size, "trainer.n_gpus_per_node")
        return
    homes = node_layout(config)
    units = place.world_sizes | {"rollout": place.num_engines}
    short = [role for role, count in units.items() if len(homes.get(role, ())) < count]
    if place.shares_gpu and not short:  # the GPUs of an engine are those of as many actor ranks, one after the other
        size, actor = place.tensor_parallel, homes["actor"]
        cut = [i for i in range(place.num_engines) if len(set(actor[i * size : (i + 1) * size])) > 1]
        short = ["rollout"] if cut else []
    if short:
        parts = f"copies of the weights on {copy or 1} and engines on {place.tensor_parallel} GPUs"
        why = (
            f"{parts} are not split across machines, so {', '.join(short)} does not fit on "
            f"{config.trainer.nnodes} machines of {per_node} GPUs; set other sizes, or fewer processes in cluster.*"
        )
        yield problem_between(
            config, why, fsdp_size, f"{_ROLLOUT}.tensor_model_parallel_size", *_CLUSTER, "trainer.n_gpus_per_node"
        )


def broadcast_has_a_gpu_for_each_process(config: RunConfig) -> Iterator[Problem]:
    """NCCL does not allow two processes on one GPU."""
    key, place = f"{_ROLLOUT}.checkpoint_engine.backend", placement(config)
    if config.actor_rollout_ref.rollout.checkpoint_engine.backend == "broadcast" and place.shares_gpu:
        why = "NCCL does not allow two processes on one GPU, but roles share GPUs; set it to null, ipc or object_store"
        yield problem_between(config, why, key, "trainer.n_gpus_per_node")


def ipc_has_memory_to_share(config: RunConfig) -> Iterator[Problem]:
    """An engine and an actor rank are on the same GPU, or without GPUs on the same machine."""
    key, place = f"{_ROLLOUT}.checkpoint_engine.backend", placement(config)
    if config.actor_rollout_ref.rollout.checkpoint_engine.backend != "ipc" or place.shares_gpu:
        return
    if config.device == "cuda":
        why = "it needs an actor rank on each engine's GPU, but these roles do not share GPUs; set it to null"
        yield problem_between(config, why, key, "trainer.n_gpus_per_node")
    elif config.trainer.nnodes > 1:
        why = "it needs an actor rank on each engine's machine, and several machines may lack one; set it to null"
        yield problem_between(config, why, key, "trainer.nnodes")


def engines_sleep_between_their_batches(config: RunConfig) -> Iterator[Problem]:
    """An engine that sleeps during the update cannot sample then."""
    key, rollout = f"{_ROLLOUT}.free_cache_engine", config.actor_rollout_ref.rollout
    if rollout.free_cache_engine and placement(config).shares_gpu and config.trainer.max_staleness:
        why = (
            "engines that sample ahead need their memory during the update; set the first to false, or the second to 0"
        )
        yield problem_between(config, why, key, "trainer.max_staleness")


def engine_holds_the_longest_sequence(config: RunConfig) -> Iterator[Problem]:
    """The engine's longest sequence covers the longest prompt and response."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    if config.max_model_len < longest:
        why = f"must be at least prompt + response = {longest}, or null"
        yield problem_between(
            config, why, f"{_ROLLOUT}.max_model_len", "data.max_prompt_length", "data.max_response_length"
        )


def engine_passes_hold_a_token_of_each_sequence(config: RunConfig) -> Iterator[Problem]:
    """An engine step generates one token of every running sequence; vLLM refuses a smaller budget when it starts."""
    rollout = config.actor_rollout_ref.rollout
    whole = config.device == "cpu" or not rollout.enable_chunked_prefill  # a pass then holds the longest sequence
    least = config.max_model_len if whole else 0
    if max(rollout.max_num_batched_tokens, least) < rollout.max_num_seqs:
        why = "an engine step must hold one token of each running sequence; raise the first or lower the second"
        yield problem_between(config, why, f"{_ROLLOUT}.max_num_batched_tokens", f"{_ROLLOUT}.max_num_seqs")


def token_budgets_hold_the_longest_sequence(config: RunConfig) -> Iterator[Problem]:
    """The token budget of a micro-batch holds at least the longest sequence."""
    roles, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
    longest = config.data.max_prompt_length + config.data.max_response_length
    own = f"{_ACTOR}.ppo_max_token_len_per_gpu"
    budgets = [("actor", own, actor.max_token_len)]
    for name, role, section in (("rollout", "actor", roles.rollout), ("ref", "ref", roles.ref)):
        key = f"actor_rollout_ref.{name}.log_prob_max_token_len_per_gpu"
        asked = key if section.log_prob_max_token_len_per_gpu else own
        budgets.append((role, asked, actor.log_prob_max_token_len(section)))
    if config.reward_model.enable and config.reward_model.forward_max_token_len_per_gpu:
        budget = config.reward_model.max_token_len(actor)
        budgets.append(("reward_model", "reward_model.forward_max_token_len_per_gpu", budget))
    if config.needs_critic:
        budgets.append(("critic", "critic.ppo_max_token_len_per_gpu", config.critic.max_token_len))
        budgets.append(("critic", "critic.forward_max_token_len_per_gpu", config.critic.forward_max_token_len))
    told = set()
    for role, key, budget in budgets:
        if key.startswith("reward_model.") and (config.reward_model.max_length or longest) < longest:
            continue  # its conversations are shorter; a longer one gets a pass of its own
        if budget is not None and budget < longest and key not in told:
            told.add(key)
            ranks = config.sequence_parallel_size(role)
            least = f" / {ranks} ranks = {-(-longest // ranks)}" if ranks > 1 else ""
            why = f"a micro-batch must hold the longest sequence: at least prompt + response = {longest}{least}"
            yield problem_between(config, why, key, "data.max_prompt_length", "data.max_response_length")


def offloaded_activations_are_inputs_of_layers(config: RunConfig) -> Iterator[Problem]:
    """Without checkpointing a layer keeps its weights too, which must not be copied for every pass."""
    sections: list[tuple[str, ModelConfig | CriticModelConfig]] = [
        ("actor_rollout_ref.model", config.actor_rollout_ref.model)
    ]
    if config.needs_critic:
        sections.append(("critic.model", config.critic.model))
    for key, model in sections:
        if model.enable_activation_offload and not model.enable_gradient_checkpointing:
            why = "only what gradient checkpointing keeps is offloaded; set the second to true, or the first to false"
            yield problem_between(
                config, why, f"{key}.enable_activation_offload", f"{key}.enable_gradient_checkpointing"
            )


PLACEMENT_RULES: tuple[Rule, ...] = (
    mini_batches_divide_the_batch,
    ranks_divide_the_mini_batch,
    sequences_are_split_over_whole_groups,
    copies_divide_the_ranks,
    engines_are_whole,
    more_engines_are_whole_and_apart,
    roles_fit_on_the_gpus,
    shared_gpus_are_the_actors,
    copies_and_engines_are_on_one_machine,
    broadcast_has_a_gpu_for_each_process,
    ipc_has_memory_to_share,
    engines_sleep_between_their_batches,
    engine_holds_the_longest_sequence,
    engine_passes_hold_a_token_of_each_sequence,
    token_budgets_hold_the_longest_sequence,
    offloaded_activations_are_inputs_of_layers,
)
