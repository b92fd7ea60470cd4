"""Rules between batch sizes, lengths and the number of processes: what must divide, and what must fit.

A text begins with the keys, `<rollout.n>`, in whose place stands `actor_rollout_ref.rollout.n=8`.
"""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.config.keys import between_keys, value_of
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SupervisedConfig
from grpo_dist.config.schema_roles import ULYSSES
from grpo_dist.plan.placement import copy_size, node_layout, placement
from grpo_dist.plan.roles import ROLES, Role, roles_of, table_of
from grpo_dist.sizes import divisor_up_to

_SIZES = ", ".join(f"<{row.size_key}>" for row in ROLES.values() if row.shares)
_PER_NODE, _TENSOR_PARALLEL = "<trainer.n_gpus_per_node>", "<rollout.tensor_model_parallel_size>"
_MOST = "<cluster.max_rollout_world_size>"
_LENGTHS = "<data.max_prompt_length>, <data.max_response_length>"


def _trained(config: RunConfig) -> list[Role]:
    return [row for row in roles_of(config) if row.trains]


@between_keys
def batches_are_divided(config: RunConfig) -> Iterator[str]:
    """A batch is a whole number of mini-batches, and every rank gets the same number of sequences of a mini-batch;
    those that split sequences get the same ones.
    """
    batch, n, place = config.data.train_batch_size, config.actor_rollout_ref.rollout.n, placement(config)
    for row in _trained(config):
        mini, split = value_of(config, f"{row.section}.ppo_mini_batch_size"), config.sequence_parallel_size(row.name)
        key, ranks = f"<{row.section}.ppo_mini_batch_size>", place.row_groups(config, row.name)
        if batch % mini:
            fitting = divisor_up_to(batch, mini)
            why = f"the batch must be a multiple of the mini-batch; for example ppo_mini_batch_size={fitting}"
            yield f"<data.train_batch_size>, {key}: {why}"
        if mini * n % ranks:
            groups, others = ("ranks", "") if split == 1 else ("groups of ranks", f", <{row.section}.{ULYSSES}>")
            why = f"{mini} * {n} = {mini * n} sequences of a mini-batch do not split over {ranks} {row.name} {groups}"
            yield f"{key}, <rollout.n>, <{row.size_key}>{others}: {why}"


@between_keys
def ranks_are_divided(config: JobConfig) -> Iterator[str]:
    """The ranks of a role are a number of groups that split sequences, which they can where padding is removed, and of
    copies of its weights.
    """
    place, padding = placement(config), "<model.use_remove_padding>"
    for row in roles_of(config):
        size, ranks = config.sequence_parallel_size(row.name), place.world_sizes.get(row.name, 0)
        if ranks % size:
            fitting = " or ".join(str(number) for number in range(1, ranks + 1) if ranks % number == 0)
            why = f"{ranks} {row.name} ranks are no whole number of groups of {size}; set it to {fitting}"
            yield f"<{row.section}.{ULYSSES}>, <{row.size_key}>: {why}"
        if (
            isinstance(config, RunConfig)
            and ranks
            and size > 1
            and not config.actor_rollout_ref.model.use_remove_padding
        ):
            why = "only sequences without padding are split over ranks; set the second to true, or the first to 1"
            yield f"<{row.section}.{ULYSSES}>, {padding}: {why}"
        copy = value_of(config, f"{row.fsdp}.fsdp_size") if row.trains else -1
        if copy > 0 and ranks % copy:
            why = f"{ranks} {row.name} ranks do not split into copies of {copy}; set a divisor, or -1"
            yield f"<{row.fsdp}.fsdp_size>, <{row.size_key}>: {why}"


@between_keys
def engines_are_whole(config: RunConfig) -> Iterator[str]:
    """Rollout processes are a multiple of those of one engine, and an engine is on one machine."""
    place, per_node = placement(config), config.trainer.n_gpus_per_node
    if place.device == "cuda" and per_node % place.tensor_parallel:
        fitting = " or ".join(str(size) for size in range(1, per_node + 1) if per_node % size == 0)
        why = f"an engine must be on one machine, so it must divide the {per_node} GPUs of one; set it to {fitting}"
        yield f"{_TENSOR_PARALLEL}, {_PER_NODE}: {why}"
    if place.rollout_world_size % place.tensor_parallel:
        what = "GPUs" if place.device == "cuda" else "processes"
        why = f"rollout {what} must be a multiple of the {what} of one engine"
        yield f"<cluster.rollout_world_size>, {_TENSOR_PARALLEL}: {why}"


@between_keys
def more_engines_are_whole_and_apart(config: RunConfig) -> Iterator[str]:
    """Engines that join a run are as large as the others, and need nothing of the actor's machine."""
    place, most = placement(config), config.cluster.max_rollout_world_size
    if most is None:
        return
    if most < place.rollout_world_size or most % place.tensor_parallel:
        least = f"at least the {place.rollout_world_size} that the run starts with"
        why = f"it must be {least}, and a multiple of the {place.tensor_parallel} of one engine; null: none are added"
        yield f"{_MOST}, <cluster.rollout_world_size>, {_TENSOR_PARALLEL}: {why}"
    if not place.extra_engines:
        return
    if place.shares_gpu:
        why = "engines that share the actor's GPUs cannot become more; leave it null, or set colocate=actor_ref"
        yield f"{_MOST}, <cluster.colocate>: {why}"
    if place.device == "cpu" and config.cluster.num_cpus_per_worker is None:
        why = "by default any number of engines fits on this machine; set the second, and of each machine its CPUs"
        yield f"{_MOST}, <cluster.num_cpus_per_worker>: {why}"


@between_keys
def roles_fit_on_the_gpus(config: JobConfig) -> Iterator[str]:
    """There are as many GPUs as the roles need together."""
    place, gpus = placement(config), config.num_gpus
    if place.device == "cpu" or place.num_devices <= gpus:
        return
    own = {role: size for role, size in place.world_sizes.items() if size and (role not in place.sharing[1:])}
    split = " + ".join(f"{role} {size}" for role, size in own.items())
    sizes = [table_of(config)[role].size_key for role in place.world_sizes]
    keys, shared = [f"<{key}>" for key in sizes if value_of(config, key) is not None], ""
    if isinstance(config, RunConfig):
        keys += ["<cluster.colocate>", _TENSOR_PARALLEL]
        shared = "" if place.shares_gpu else ", or cluster.colocate=all, where all roles share the actor's GPUs"
    yield (
        f"{', '.join(keys)}, <trainer.nnodes>, {_PER_NODE}: {split} = {place.num_devices} GPUs are needed and there "
        f"are {gpus}; set smaller {', '.join(sizes)} (null: the default), or more machines{shared}"
    )


@between_keys
def shared_gpus_are_the_actors(config: RunConfig) -> Iterator[str]:
    """Roles that share GPUs share those of the actor."""
    place, actor = placement(config), placement(config).actor_world_size
    if place.device == "cpu":
        return
    for row in roles_of(config):
        if row.follows and place.colocate == "actor_ref" and place.world_sizes[row.name] != actor:
            why = f"each of the {actor} actor ranks shares its GPU with one rank of {row.name}; leave it null"
            yield f"<{row.size_key}>, <cluster.colocate>: {why}"
    if place.colocate == "all" and max(place.world_sizes.values()) > actor:
        split = ", ".join(f"{role} {size}" for role, size in place.world_sizes.items() if size)
        yield (
            f"{_SIZES}, <cluster.colocate>: every shared GPU needs an actor rank, and the processes are {split}; set "
            f"cluster.actor_world_size to {max(place.world_sizes.values())}, the others to {actor}, or all of them to "
            "null"
        )


@between_keys
def copies_and_engines_are_on_one_machine(config: RunConfig) -> Iterator[str]:
    """Engines, and copies of the actor's weights, are not split across machines, unless a copy takes whole ones."""
    place, per_node = placement(config), config.trainer.n_gpus_per_node
    copy, fsdp_size = copy_size(config, place), "<actor.fsdp_config.fsdp_size>"
    if place.device == "cpu" or max(place.world_sizes[role] for role in place.sharing or ("actor",)) > (
        place.actor_world_size
    ):
        return
    if place.num_devices > config.num_gpus or per_node % place.tensor_parallel or place.actor_world_size % (copy or 1):
        return  # other rules report that
    if copy is not None and copy > per_node and copy % per_node:
        fitting = divisor_up_to(place.actor_world_size, per_node)
        yield (
            f"{fsdp_size}, {_PER_NODE}: a copy of the weights on {copy} GPUs would share a machine of {per_node} with "
            f"another copy, and its traffic would cross the network; set it to {fitting}, a multiple of "
            "n_gpus_per_node, or -1"
        )
        return
    homes = node_layout(config)
    units = place.world_sizes | {"rollout": place.num_engines}
    short = [role for role, count in units.items() if len(homes.get(role, ())) < count]
    if place.shares_gpu and not short:  # the GPUs of an engine are those of as many actor ranks, one after the other
        size, actor = place.tensor_parallel, homes["actor"]
        cut = [i for i in range(place.num_engines) if len(set(actor[i * size : (i + 1) * size])) > 1]
        short = ["rollout"] if cut else []
    if short:
        yield (
            f"{fsdp_size}, {_TENSOR_PARALLEL}, {_SIZES}, {_PER_NODE}: copies of the weights on {copy or 1} and engines "
            f"on {place.tensor_parallel} GPUs are not split across machines, so {', '.join(short)} does not fit on "
            f"{config.trainer.nnodes} machines of {per_node} GPUs; set other sizes, or fewer processes in cluster.*"
        )


@between_keys
def passes_hold_what_they_must(config: RunConfig) -> Iterator[str]:
    """The token budget of a micro-batch holds the longest sequence, and an engine step a token of every running
    sequence; vLLM refuses a smaller one when it starts.
    """
    rollout, longest = config.actor_rollout_ref.rollout, config.data.max_prompt_length + config.data.max_response_length
    if config.max_model_len < longest:
        yield f"<rollout.max_model_len>, {_LENGTHS}: must be at least prompt + response = {longest}, or null"
    whole = config.device == "cpu" or not rollout.enable_chunked_prefill  # a pass then holds the longest sequence
    if max(rollout.max_num_batched_tokens, config.max_model_len if whole else 0) < rollout.max_num_seqs:
        why = "an engine step must hold one token of each running sequence; raise the first or lower the second"
        yield f"<rollout.max_num_batched_tokens>, <rollout.max_num_seqs>: {why}"
    short: dict[str, int] = {}  # by key, which roles may share: the ranks that split a sequence
    for row in roles_of(config):
        model = row.model(config)
        if model is not None and 0 < model.longest < longest:
            continue  # its sequences are shorter; a longer one gets a pass of its own
        for limits in row.passes(config):
            if limits.max_token_len is not None and limits.max_token_len < longest:
                short.setdefault(limits.key, config.sequence_parallel_size(row.name))
    for key, ranks in short.items():
        least = f" / {ranks} ranks = {-(-longest // ranks)}" if ranks > 1 else ""
        why = f"a micro-batch must hold the longest sequence: at least prompt + response = {longest}{least}"
        yield f"<{key}>, {_LENGTHS}: {why}"


@between_keys
def offloaded_activations_are_inputs_of_layers(config: RunConfig) -> Iterator[str]:
    """Without checkpointing a layer keeps its weights too, which must not be copied for every pass."""
    models = filter(None, (row.model(config) for row in _trained(config)))
    for section in (model.key.removesuffix(".path") for model in models):
        model = value_of(config, section)
        if model.enable_activation_offload and not model.enable_gradient_checkpointing:
            why = "only what gradient checkpointing keeps is offloaded; set the second to true, or the first to false"
            yield f"<{section}.enable_activation_offload>, <{section}.enable_gradient_checkpointing>: {why}"


@between_keys
def passes_hold_the_longest_row(config: SupervisedConfig) -> Iterator[str]:
    """The token budget holds at least the longest conversation."""
    budget = config.data.max_token_len_per_gpu if config.data.use_dynamic_bsz else None
    if budget is not None and budget < config.data.max_length:
        why = "a pass must hold the longest conversation; raise the first or lower the second"
        yield f"<data.max_token_len_per_gpu>, <data.max_length>: {why}"


PLACEMENT_RULES = (
    batches_are_divided,
    ranks_are_divided,
    engines_are_whole,
    more_engines_are_whole_and_apart,
    roles_fit_on_the_gpus,
    shared_gpus_are_the_actors,
    copies_and_engines_are_on_one_machine,
    passes_hold_what_they_must,
    offloaded_activations_are_inputs_of_layers,
)
