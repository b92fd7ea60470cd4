"""Decides how many processes, GPUs and CPUs each role gets, and on which machine each process runs.

`cluster.*` says how many, and which roles share GPUs; what each null there stands for is decided here.

On GPUs the ranks of a role fill one machine after the other, so that consecutive ranks are on one machine. A replica of
the actor's weights (`fsdp_size` ranks) and the GPUs of one engine are never split across machines. Roles that share
GPUs are placed on the actor's, rank by rank. On CPU, and for reward processes everywhere, each role is spread evenly,
because its processes compete for the cores. Rules compare the result with the machines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from grpo_dist.config.keys import between_keys, value_of
from grpo_dist.config.processor import physical_cores
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, SupervisedConfig
from grpo_dist.config.schema_roles import ULYSSES, Colocation, Device
from grpo_dist.plan.roles import ROLES, roles_of, table_of
from grpo_dist.sizes import divisor_up_to

# Logical CPUs that Ray reserves per process on CPU: small, so that all roles fit on a laptop.
CPU_SHARE = 0.1
# Up to so many processes that share a GPU get equal parts of it from Ray, however many there are.
_FEW = 5
# By role and rank: index of the machine, in the order of `workers.resources`. It never decreases with the rank.
Homes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Placement:
    """Number of processes of each role, and their resources.

    Args:
        world_sizes: number of processes by role; for rollout those of all engines together. Roles that the run lacks
            have 0, and the pool of reward processes, which need no GPUs, is left out.
        tensor_parallel: GPUs per engine, or processes on CPU.
        colocate: which roles share GPUs; "separate" on CPU.
        num_devices: GPUs used by all roles together; on CPU the number of machines.
        num_threads: compute threads of one process on CPU, by role that is started.
        extra_engines: engines beyond those of rollout_world_size, which start when there is room for them.
        engines_sleep: whether engines on the actor's GPUs give their memory back until they sample again.
    """

    device: Device
    world_sizes: dict[str, int]
    tensor_parallel: int
    colocate: Colocation
    num_devices: int
    num_cpus_per_worker: float
    num_threads: Mapping[str, int]
    extra_engines: int
    engines_sleep: bool = False

    @property
    def num_engines(self) -> int:
        """Number of rollout engines that the run starts with."""
        return max(1, self.rollout_world_size // self.tensor_parallel)

    @property
    def actor_world_size(self) -> int:
        """Number of actor processes."""
        return self.world_sizes["actor"]

    @property
    def rollout_world_size(self) -> int:
        """Number of processes of all engines, engines * tensor_parallel; 0 in a run without engines."""
        return self.world_sizes.get("rollout", 0)

    def row_groups(self, config: RunConfig, role: str) -> int:
        """Ranks of a role that work on different rows: those that split sequences count once."""
        return max(1, self.world_sizes[role] // config.sequence_parallel_size(role))

    @property
    def shares_gpu(self) -> bool:
        """Tell if the engines share GPUs with the actor."""
        return self.colocate == "all"

    @property
    def sharing(self) -> tuple[str, ...]:
        """The roles that share the actor's GPUs, the actor included; () if none does."""
        if self.colocate == "separate":
            return ()
        roles = tuple(role for role, size in self.world_sizes.items() if size and self.colocate in ROLES[role].shares)
        return roles if len(roles) > 1 else ()

    @property
    def in_turns(self) -> tuple[str, ...]:
        """The roles that share GPUs with engines which sleep while one of them computes; () if engines never do."""
        return self.sharing if self.engines_sleep else ()

    def num_gpus(self, role: str) -> float:
        """GPUs that Ray reserves for one rank, or for one engine, of a role; less than 1 if they are shared."""
        if self.device == "cpu":
            return 0.0
        if role in self.sharing:  # rounded down, so that the parts are no more than the whole
            return math.floor(1000 / max(_FEW, len(self.sharing))) / 1000
        return float(self.tensor_parallel if role == "rollout" else 1)


# --- numbers ---------------------------------------------------------------------------------------------------------
def placement(config: JobConfig) -> Placement:
    """Return the placement of a config: `cluster.*`, with defaults for the keys that are null."""
    on_cpu, tensor_parallel, most, sleeps = config.device == "cpu", 1, 0, False
    colocate: Colocation = "separate"
    if isinstance(config, SupervisedConfig):  # its ranks have GPUs of their own
        sizes = {config.role: config.world_size}
    else:
        assert isinstance(config, RunConfig)
        tensor_parallel = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        colocate = _colocate(config, tensor_parallel)
        sizes = _sizes(config, tensor_parallel, colocate)
        most = config.cluster.max_rollout_world_size or 0
        sleeps = colocate == "all" and config.actor_rollout_ref.rollout.free_cache_engine
    shares = {role: role != "actor" and colocate in row.shares for role, row in table_of(config).items()}
    return Placement(
        device=config.device,
        world_sizes=sizes,
        tensor_parallel=tensor_parallel,
        colocate=colocate,
        num_devices=config.trainer.nnodes if on_cpu else sum(n for role, n in sizes.items() if not shares[role]),
        num_cpus_per_worker=config.cluster.num_cpus_per_worker or (CPU_SHARE if on_cpu else 1.0),
        num_threads=_threads(config, {role: size for role, size in sizes.items() if size}),
        extra_engines=max(most - sizes.get("rollout", most), 0) // tensor_parallel,
        engines_sleep=sleeps,
    )


def _colocate(config: RunConfig, tensor_parallel: int) -> Colocation:
    """Return the roles that share GPUs: all of them if an engine leaves no GPU for the actor."""
    if config.device == "cpu":
        return "separate"
    if config.cluster.colocate is not None:
        return config.cluster.colocate
    if config.num_gpus in (1, tensor_parallel):
        return "all"
    followers = _followers(config).values()
    return "actor_ref" if followers and not any(followers) else "separate"


def _followers(config: RunConfig) -> dict[str, int | None]:
    return {row.name: value_of(config, row.size_key) for row in roles_of(config) if row.follows}


def _sizes(config: RunConfig, tensor_parallel: int, colocate: Colocation) -> dict[str, int]:
    """Return the number of processes by role; roles that the run lacks have 0."""
    asked, wanted = config.cluster, _followers(config)
    apart: dict[str, int] = {}  # followers that have GPUs, or a share of the cores, of their own
    if config.device == "cpu":
        # 2 for the built-in model, whose matrices are too small for two threads to help. A larger model gets 1: several
        # ranks on one machine copy weights to each other, while threads share them.
        usual = max(2 if config.has_builtin_model else 1, config.sequence_parallel_size("actor"))
        actor, rollout = asked.actor_world_size or usual, asked.rollout_world_size or tensor_parallel
        apart = {role: size or config.sequence_parallel_size(role) for role, size in wanted.items()}
        apart = {role: size for role, size in apart.items() if not ROLES[role].trains}
    elif colocate == "all":
        actor = asked.actor_world_size or config.num_gpus
        rollout = asked.rollout_world_size or max(actor // tensor_parallel, 1) * tensor_parallel
    else:
        if colocate == "separate":
            apart = {role: size or config.sequence_parallel_size(role) for role, size in wanted.items()}
        actor, rollout, left = _split(config, tensor_parallel, sum(apart.values()))
        if open_ended := [role for role in apart if wanted[role] is None]:
            apart[open_ended[0]] += left
    absent = {role: 0 for role, row in ROLES.items() if row.follows}
    followers = {role: size or actor for role, size in wanted.items()}
    return {"actor": actor, "rollout": rollout} | absent | followers | apart


def _split(config: RunConfig, tensor_parallel: int, least: int) -> tuple[int, int, int]:
    """GPUs of the actor, of the engines, and left over, beside `least` of others; too many if there are few."""
    asked, gpus = config.cluster, config.num_gpus
    room = min(gpus // 2, gpus - (asked.rollout_world_size or tensor_parallel) - least)
    actor = asked.actor_world_size or 1 << (max(room, 1).bit_length() - 1)  # a power of two
    rest = gpus - actor - least
    rollout = asked.rollout_world_size or max(rest // tensor_parallel * tensor_parallel, tensor_parallel)
    return actor, rollout, max(rest - rollout, 0)


def _threads(config: JobConfig, processes: Mapping[str, int]) -> dict[str, int]:
    """Compute threads per process of each role. Roles take turns, so the processes of one role share all cores.

    The reference overlaps with generation, but gets all cores too: it has little work then, and runs alone afterwards.
    The built-in model uses one thread: its matrices are too small to be worth splitting.
    """
    asked, nodes = config.cluster.num_threads_per_worker, config.trainer.nnodes
    if asked is not None or config.device != "cpu" or config.has_builtin_model:
        return dict.fromkeys(processes, asked or 1)
    cores = physical_cores()
    return {role: max(1, min(cores, cores * nodes // max(number, 1))) for role, number in processes.items()}


# --- machines --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Seat:
    """The CPUs and GPUs that Ray reserves for one process; a fraction of a GPU if it shares one."""

    role: str
    rank: int
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True)
class Slot:
    """A Ray placement-group bundle: one process, or several that share a GPU, on one machine.

    One that is not `required` is on whichever machine has room for it, now or later; a run does not wait for it.
    """

    machine: int
    num_gpus: float
    seats: tuple[Seat, ...]
    required: bool = True

    @property
    def num_cpus(self) -> float:
        """CPUs of all processes in the slot."""
        return sum(seat.num_cpus for seat in self.seats)


def slots(config: JobConfig) -> list[Slot]:
    """The slots of all processes of a run, ordered by role and rank, on the machines of `node_layout`."""
    place = placement(config)
    cpus, sizes = place.num_cpus_per_worker, {"rollout": place.tensor_parallel}
    needs = {role: (cpus * sizes.get(role, 1), place.num_gpus(role)) for role in place.world_sizes}
    alone = slots_of(node_layout(config), needs | {"reward": (cpus, 0.0)})
    shared: dict[int, list[Slot]] = {}  # by index among the actor's GPUs
    for slot in alone:
        seat = slot.seats[0]
        if seat.role in place.sharing:
            shared.setdefault(seat.rank * sizes.get(seat.role, 1), []).append(slot)
    seats = [(parts[0].machine, tuple(seat for part in parts for seat in part.seats)) for parts in shared.values()]
    merged = [Slot(machine, 1.0, together) for machine, together in seats]
    extra = [
        Slot(0, needs["rollout"][1], (Seat("rollout", rank, *needs["rollout"]),), required=False)
        for rank in range(place.num_engines, place.num_engines + place.extra_engines)
    ]
    return merged + [slot for slot in alone if slot.seats[0].role not in place.sharing] + extra


def slots_of(homes: Mapping[str, Sequence[int]], needs: Mapping[str, tuple[float, float]]) -> list[Slot]:
    """A slot for each process: `homes` has machines by role and rank, `needs` the CPUs and GPUs of each by role."""
    return [
        Slot(machine, needs[role][1], (Seat(role, rank, *needs[role]),))
        for role, home in homes.items()
        for rank, machine in enumerate(home)
    ]


def node_layout(config: JobConfig) -> Homes:
    """The machine of each process. A role that does not fit gets too few entries, which a rule then reports."""
    place, machines = placement(config), config.trainer.nnodes
    processes, free = [0] * machines, [config.trainer.n_gpus_per_node] * machines
    copy = copy_size(config, place)
    # a replica larger than a machine takes whole machines (by a rule), and the actor starts on the first one
    sizes = {"actor": copy if copy is not None and copy <= free[0] else 1, "rollout": place.tensor_parallel}
    homes: Homes = {}
    for role, ranks in place.world_sizes.items():
        size = sizes.get(role, 1)  # GPUs of a unit that must not be split across machines
        count = place.num_engines if role == "rollout" else ranks // size
        if count == 0:
            continue
        if place.device == "cpu":
            homes[role] = spread(count, processes)
        elif role == "actor":
            homes[role] = tuple(home for home in fill(count, size, free) for _ in range(size))
        elif role in place.sharing:  # on the first of the actor's GPUs that it shares
            homes[role] = homes["actor"][: count * size : size]
        else:
            homes[role] = fill(count, size, free)
    if place.device == "cuda":
        for home in (home for role in homes.values() for home in role):
            processes[home] += 1
    if isinstance(config, RunConfig):
        homes["reward"] = spread(config.reward.num_workers, processes)
    return homes


def copy_size(config: JobConfig, place: Placement) -> int | None:
    """Return the actor ranks per replica of the weights with hybrid sharding (HSDP); None if there is one replica."""
    size = config.actor_rollout_ref.actor.fsdp_config.fsdp_size if isinstance(config, RunConfig) else -1
    return size if 0 < size < place.actor_world_size else None


def fill(count: int, size: int, free: list[int]) -> tuple[int, ...]:
    """Place `count` units of `size` GPUs, each on the first machine that has room; returns those of the units that fit.

    Args:
        free: GPUs of each machine; reduced in place.
    """
    homes: list[int] = []
    for machine in range(len(free)):
        fitting = min(free[machine] // size, count - len(homes))
        homes += [machine] * fitting
        free[machine] -= fitting * size
    return tuple(homes)


def spread(count: int, processes: list[int]) -> tuple[int, ...]:
    """The machines of `count` processes that are spread evenly; the remainder goes to those with the fewest processes.

    Args:
        processes: already on each machine; increased in place.
    """
    base, over = divmod(count, len(processes))
    emptiest = set(sorted(range(len(processes)), key=processes.__getitem__)[:over])
    shares = [base + (machine in emptiest) for machine in range(len(processes))]
    for machine, share in enumerate(shares):
        processes[machine] += share
    return tuple(machine for machine, share in enumerate(shares) for _ in range(share))


# --- rules between sizes, lengths and the number of processes: what must divide, and what must fit -------------------
_SIZES = ", ".join(f"<{row.size_key}>" for row in ROLES.values() if row.shares)
_PER_NODE, _TENSOR_PARALLEL = "<trainer.n_gpus_per_node>", "<rollout.tensor_model_parallel_size>"
_MOST = "<cluster.max_rollout_world_size>"
_LENGTHS = "<data.max_prompt_length>, <data.max_response_length>"


@between_keys
def batches_are_divided(config: RunConfig) -> Iterator[str]:
    """A batch is whole mini-batches, of which each group of ranks that split sequences gets equally many."""
    batch, n, place = config.data.train_batch_size, config.actor_rollout_ref.rollout.n, placement(config)
    for row in (row for row in roles_of(config) if row.trains):
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
    """Ranks are whole groups that split sequences, which needs no padding, and whole copies of the weights."""
    place, padding = placement(config), "<model.use_remove_padding>"
    for row in roles_of(config):
        size, ranks = config.sequence_parallel_size(row.name), place.world_sizes.get(row.name, 0)
        if ranks % size:
            fitting = " or ".join(str(number) for number in range(1, ranks + 1) if ranks % number == 0)
            why = f"{ranks} {row.name} ranks are no whole number of groups of {size}; set it to {fitting}"
            yield f"<{row.section}.{ULYSSES}>, <{row.size_key}>: {why}"
        if ranks and size > 1 and not value_of(config, "actor_rollout_ref.model.use_remove_padding"):
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
    place = placement(config)
    actor = place.actor_world_size
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
    most = max(place.world_sizes[role] for role in place.sharing or ("actor",))
    if place.device == "cpu" or most > place.actor_world_size:
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
    """A micro-batch holds the longest sequence, and an engine step a token of each running one: vLLM refuses less."""
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
def passes_hold_the_longest_row(config: SupervisedConfig) -> Iterator[str]:
    """The token budget holds at least the longest conversation."""
    budget = config.data.max_token_len_per_gpu if config.data.use_dynamic_bsz else None
    if budget is not None and budget < config.data.max_length:
        why = "a pass must hold the longest conversation; raise the first or lower the second"
        yield f"<data.max_token_len_per_gpu>, <data.max_length>: {why}"


PLACEMENT_RULES = (
    *(batches_are_divided, ranks_are_divided, engines_are_whole, more_engines_are_whole_and_apart),
    *(roles_fit_on_the_gpus, shared_gpus_are_the_actors, copies_and_engines_are_on_one_machine),
    passes_hold_what_they_must,
)
