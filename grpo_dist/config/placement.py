"""Decides how many processes, GPUs and CPUs each role gets: `cluster.*`, with a default for every null.

Without GPUs: 2 actor ranks for the built-in model and 1 for larger ones, as many of the critic, 1 engine, 1 reference
and 1 reward model, sharing the CPU cores. With GPUs `cluster.colocate` says which roles share them. "actor_ref": about
half of the GPUs run the actor, the reference, the reward model and the critic together, and the others generate. "all":
each GPU runs all roles; the default on one GPU, and if one engine needs all GPUs. "separate": no GPU is shared. Nothing
is checked here: placement_rules.py compares the result with the machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_dist.config.processor import physical_cores
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_roles import Colocation, Device

# Logical CPUs that Ray reserves per process on CPU: small, so that all roles fit on a laptop.
CPU_SHARE = 0.1
# Fraction of a GPU that Ray reserves for a process that shares it: at most five roles share one.
_GPU_SHARE = 0.2
# Roles that may lie beside the actor: as many ranks on the same GPUs.
FOLLOWERS = ("ref", "reward_model", "critic")
# Roles with an optimizer; the others only run forward passes.
TRAINED = ("actor", "critic")
# Roles that share the actor's GPUs.
_SHARING: Mapping[Colocation, tuple[str, ...]] = {
    "separate": (),
    "actor_ref": ("actor", *FOLLOWERS),
    "all": ("actor", "rollout", *FOLLOWERS),
}


@dataclass(frozen=True)
class Placement:
    """Number of processes of each role, and their resources.

    Args:
        device: "cpu" or "cuda".
        actor_world_size: actor processes.
        rollout_world_size: engines * tensor_parallel.
        tensor_parallel: GPUs per engine, or processes on CPU.
        ref_world_size: reference processes; 0 if none is needed.
        reward_model_world_size: reward model processes; 0 if there is no reward model.
        critic_world_size: critic processes; 0 if there is no critic.
        colocate: which roles share GPUs; "separate" on CPU.
        num_devices: GPUs used by all roles together; on CPU the number of machines.
        num_cpus_per_worker: logical CPUs that Ray reserves for one process.
        num_threads: compute threads of one process on CPU, by role that is started.
        extra_engines: engines beyond those of rollout_world_size, which start when there is room for them.
    """

    device: Device
    actor_world_size: int
    rollout_world_size: int
    tensor_parallel: int
    ref_world_size: int
    reward_model_world_size: int
    critic_world_size: int
    colocate: Colocation
    num_devices: int
    num_cpus_per_worker: float
    num_threads: Mapping[str, int]
    extra_engines: int

    @property
    def num_engines(self) -> int:
        """Number of rollout engines that the run starts with."""
        return max(1, self.rollout_world_size // self.tensor_parallel)

    @property
    def world_sizes(self) -> dict[str, int]:
        """Number of processes by role; for rollout those of all engines together."""
        return {
            "actor": self.actor_world_size,
            "rollout": self.rollout_world_size,
            "ref": self.ref_world_size,
            "reward_model": self.reward_model_world_size,
            "critic": self.critic_world_size,
        }

    def row_groups(self, config: RunConfig, role: str) -> int:
        """Ranks of a role that work on different rows: those that split sequences count once."""
        return max(1, self.world_sizes[role] // config.sequence_parallel_size(role))

    @property
    def shares_gpu(self) -> bool:
        """Whether the engines share GPUs with the actor."""
        return self.colocate == "all"

    @property
    def sharing(self) -> tuple[str, ...]:
        """The roles that share the actor's GPUs, the actor included; () if none does."""
        roles = tuple(role for role in _SHARING[self.colocate] if self.world_sizes[role])
        return roles if len(roles) > 1 else ()

    def num_gpus(self, role: str) -> float:
        """GPUs that Ray reserves for one rank, or for one engine, of a role; less than 1 if they are shared."""
        if self.device == "cpu":
            return 0.0
        return _GPU_SHARE if role in self.sharing else float(self.tensor_parallel if role == "rollout" else 1)


def placement(config: RunConfig) -> Placement:
    """The placement of a config: `cluster.*`, with defaults for the keys that are null."""
    asked, gpus = config.cluster, config.num_gpus
    tensor_parallel = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    colocate = _colocate(config, tensor_parallel)
    if config.device == "cpu":
        actor = asked.actor_world_size or _cpu_actors(config)
        rollout = asked.rollout_world_size or tensor_parallel
        followers = {
            role: size or (actor if role == "critic" else config.sequence_parallel_size(role))
            for role, size in _followers(config).items()
        }
    elif colocate == "all":
        actor = asked.actor_world_size or gpus
        rollout = asked.rollout_world_size or max(actor // tensor_parallel, 1) * tensor_parallel
        followers = {role: size or actor for role, size in _followers(config).items()}
    else:
        actor, rollout, followers = _split(config, gpus, tensor_parallel, colocate)
    sizes = {"actor": actor, "rollout": rollout, **dict.fromkeys(FOLLOWERS, 0), **followers}
    own = sum(size for role, size in sizes.items() if role == "actor" or role not in _SHARING[colocate])
    return Placement(
        device=config.device,
        actor_world_size=actor,
        rollout_world_size=rollout,
        tensor_parallel=tensor_parallel,
        ref_world_size=sizes["ref"],
        reward_model_world_size=sizes["reward_model"],
        critic_world_size=sizes["critic"],
        colocate=colocate,
        num_devices=config.trainer.nnodes if config.device == "cpu" else own,
        num_cpus_per_worker=asked.num_cpus_per_worker or (CPU_SHARE if config.device == "cpu" else 1.0),
        num_threads=_threads(config, {role: size for role, size in sizes.items() if size}),
        extra_engines=max((asked.max_rollout_world_size or rollout) - rollout, 0) // tensor_parallel,
    )


def _colocate(config: RunConfig, tensor_parallel: int) -> Colocation:
    """Which roles share GPUs: all of them if an engine leaves no GPU for the actor."""
    asked, gpus = config.cluster, config.num_gpus
    if config.device == "cpu":
        return "separate"
    if asked.colocate is not None:
        return asked.colocate
    if gpus == 1 or gpus == tensor_parallel:
        return "all"
    followers = _followers(config).values()
    return "actor_ref" if followers and not any(followers) else "separate"


def _followers(config: RunConfig) -> dict[str, int | None]:
    """The followers that this run has, with the size that is asked for."""
    needed = {
        "ref": config.needs_reference_workers,
        "reward_model": config.reward_model.enable,
        "critic": config.needs_critic,
    }
    return {role: getattr(config.cluster, f"{role}_world_size") for role in FOLLOWERS if needed[role]}


def _cpu_actors(config: RunConfig) -> int:
    """Actor ranks on CPU: 2 for the built-in model, whose matrices are too small for two threads to help.

    A larger model gets 1: several ranks on one machine copy weights to each other, while threads share them. Ranks that
    split sequences are as many as do.
    """
    return max(2 if config.has_builtin_model else 1, config.sequence_parallel_size("actor"))


def _threads(config: RunConfig, processes: Mapping[str, int]) -> dict[str, int]:
    """Compute threads per process of each role. Roles take turns, so the processes of one role share all cores.

    The reference overlaps with generation, but gets all cores too: it has little work then, and runs alone afterwards.
    The built-in model uses one thread: its matrices are too small to be worth splitting.
    """
    asked, nodes = config.cluster.num_threads_per_worker, config.trainer.nnodes
    if asked is not None or config.device != "cpu" or config.has_builtin_model:
        return dict.fromkeys(processes, asked or 1)
    cores = physical_cores()
    return {role: max(1, min(cores, cores * nodes // max(number, 1))) for role, number in processes.items()}


def _split(config: RunConfig, gpus: int, tensor_parallel: int, colocate: Colocation) -> tuple[int, int, dict[str, int]]:
    """GPUs of the actor, of the engines and of each follower; their sum exceeds those that there are if they are few.

    Of followers with GPUs of their own, the first whose size is not set gets what is left.
    """
    asked, wanted = config.cluster, _followers(config)
    least_of = {role: size or config.sequence_parallel_size(role) for role, size in wanted.items()}
    apart = least_of if colocate == "separate" else {}
    least = sum(apart.values())
    room = min(gpus // 2, gpus - (asked.rollout_world_size or tensor_parallel) - least)
    actor = asked.actor_world_size or _power_of_two(room)
    rest = gpus - actor - least
    rollout = asked.rollout_world_size or max(rest // tensor_parallel * tensor_parallel, tensor_parallel)
    if open_ended := [role for role in apart if wanted[role] is None]:
        apart[open_ended[0]] += max(rest - rollout, 0)
    return actor, rollout, {role: size or actor for role, size in wanted.items()} | apart


def _power_of_two(most: int) -> int:
    """The largest power of two up to `most`; at least 1."""
    return 1 << (max(most, 1).bit_length() - 1)
