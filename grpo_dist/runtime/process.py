"""What every worker process has: a base class with its address and checks, and the driver's environment variables;
and what its node is asked in a Ray task, since no worker there need answer.

A worker inherits the environment that `ray start` had on its node. The driver's credentials, proxies and NCCL settings
override it. They are passed as a constructor argument, because they may be secrets, and Ray writes a `runtime_env` into
the logs of every node. Variables that name a folder (HF_HOME, SSL_CERT_FILE) are not passed, because nodes differ, nor
those that bind a process to the loopback interface.

When one of several ranks that work together is lost, all of them exceed their time limit; the lost one is the one whose
process the kernel of its node calls stopped, dead or gone. And ranks and reward processes write into the run directory
wherever they are, so all nodes must see it before any worker is started there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import socket
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_dist.assets import POLICY_KEY, is_folder, resolve_model_path
from grpo_dist.engines.base import build_problem
from grpo_dist.engines.rendezvous import is_loopback_setting
from grpo_dist.errors import ConfigError
from grpo_dist.rewards.scorer import OutputLines
from grpo_dist.runtime.nodes import end_with_ray, node_name
from grpo_dist.runtime.resources import nodes_in_order
from grpo_dist.supervisor import process_state


@dataclass(frozen=True)
class Address:
    """Node and process of a worker; `node_id` and `gpus` (the GPUs assigned to it) are Ray's ids."""

    host: str
    ip: str
    pid: int
    node_id: str
    gpus: tuple[str, ...] = ()


class Process:
    """Base class of the workers."""

    def address(self) -> Address:
        """The address of this process."""
        node_id = ray.get_runtime_context().get_node_id()
        gpus = tuple(map(str, ray.get_gpu_ids()))
        return Address(socket.gethostname(), ray.util.get_node_ip_address(), os.getpid(), node_id, gpus)

    def check_build(self, device: str, needs: Callable[[str], str] = build_problem) -> None:
        """Check that the installed packages can run on `device`, by what says what they lack."""
        if problem := needs(device):
            raise ConfigError(f"{self.here()}: {problem}")

    def find_model(self, path: str, key: str = POLICY_KEY, *, weights: bool = True) -> str:
        """The folder of a model on this node. A model of the Hugging Face hub is downloaded if it is not cached.

        Args:
            key: the config key that names it, for messages.
            weights: whether the weights of a hub model are needed too.
        """
        try:
            folder = resolve_model_path(path, weights=weights, key=key)
        except ConfigError as error:
            raise ConfigError(f"{self.here()}: {error}") from None
        if not is_folder(folder):
            raise ConfigError(
                f"{self.here()}: {key}={path}: there is no such folder on this node; put it on "
                "a disk that all nodes share, or at the same path on every node, or use a model of the Hugging Face hub"
            )
        return folder

    @functools.cached_property
    def printed(self) -> OutputLines:
        """Return what custom code has printed in this process, where a method collects it with `printing_to`."""
        return OutputLines()

    def take_printed(self) -> tuple[list[str], int]:
        """The first lines of it since the last call, and the number of further lines."""
        return self.printed.take()

    def here(self) -> str:
        """This node, for messages."""
        return f"node {socket.gethostname()} ({ray.util.get_node_ip_address()})"

    def peak_memory_gib(self) -> dict[str, float]:
        """Peak memory of this process, GiB: "resident", and "gpu" if it uses one itself, unlike a rollout worker."""
        peak = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        if allocated := torch.cuda.max_memory_allocated():
            peak["gpu"] = allocated / 2**30
        return peak


class Addresses:
    """Addresses of processes by rank, of which some may still be starting."""

    def __init__(self) -> None:
        self._known: dict[int, Address] = {}
        self._expected: dict[int, ray.ObjectRef] = {}
        self._last: dict[int, Address] = {}

    def expect(self, rank: int, address: ray.ObjectRef) -> None:
        """There is a new process, which will give its address once it has started."""
        self.forget(rank)
        self._expected[rank] = address

    def note(self, addresses: Mapping[int, Address]) -> None:
        """Store the addresses of all processes."""
        self._known, self._expected = dict(addresses), {}

    def forget(self, rank: int) -> None:
        """A process has ended."""
        if (address := self.known().get(rank)) is not None:
            self._last[rank] = address
        self._known.pop(rank, None)
        self._expected.pop(rank, None)

    def known(self) -> dict[int, Address]:
        """The addresses of the processes that have started."""
        refs = {ref: rank for rank, ref in self._expected.items()}
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0) if refs else ([], [])
        for ref in done:
            del self._expected[refs[ref]]
            with contextlib.suppress(RayError):  # that process was lost too
                self._known[refs[ref]] = ray.get(ref)
        return self._known

    def last(self, rank: int) -> Address | None:
        """The address of a process, or of the one before it; None if none has started yet."""
        return self.known().get(rank) or self._last.get(rank)


NAMES = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
    *("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DISABLE_XET"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("GLOO_SOCKET_IFNAME", "CUDA_DEVICE_ORDER", "GRPO_DIST_SANDBOX"),
)
PREFIXES = ("WANDB_", "NCCL_", "TORCH_NCCL_", "VLLM_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_")
# Addresses of the driver's services, and folders: both are useless on other nodes. The key of a server of the user's.
_OF_THE_DRIVER = (
    *("WANDB_SERVICE", "WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"),
    *("VLLM_HOST_IP", "VLLM_PORT", "VLLM_RPC_BASE_PATH", "VLLM_API_KEY"),
)


def shared_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of the driver's environment that workers get.

    CUDA numbers their GPUs as NVML does, which measures their memory; by itself it would begin with the fastest.
    """
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | {
        name: value
        for name, value in environment.items()
        if (name in NAMES or name.startswith(PREFIXES))
        and name not in _OF_THE_DRIVER
        and not is_loopback_setting(name, value)
    }


def with_environment(worker_class: type) -> type:
    """A subclass whose constructor takes environment variables as its first argument, and sets them first.

    Its process ends once Ray's control service is lost (nodes.py). It keeps the name of the worker class, which
    Ray's tools show.
    """

    class Worker(worker_class):  # type: ignore[misc, valid-type]
        def __init__(self, environment: Mapping[str, str], *args: Any) -> None:
            os.environ.update(environment)
            end_with_ray()
            super().__init__(*args)

    Worker.__name__, Worker.__qualname__ = worker_class.__name__, worker_class.__qualname__
    Worker.__module__, Worker.__doc__ = worker_class.__module__, worker_class.__doc__
    return Worker


# --- what a node is asked ------------------------------------------------------------------------------------------
# A live node answers within a second or two, even if Ray must start a process there first.
ANSWER_S = 20.0
LOST = ("stopped", "dead", "gone")


def process_states(addresses: Mapping[int, Address], timeout_s: float = ANSWER_S) -> dict[int, str]:
    """Return by rank the value of `process_state`, or "gone" if another node does not answer within `timeout_s`."""
    here = ray.get_runtime_context().get_node_id()
    states = {rank: process_state(address.pid) for rank, address in addresses.items() if address.node_id == here}
    others = {rank: (address.node_id, address.pid) for rank, address in addresses.items() if address.node_id != here}
    answers = ask_nodes(process_state, list(others.values()), timeout_s)
    return states | {rank: state or "gone" for rank, state in zip(others, answers, strict=True)}


def ask_nodes(question: Callable[[Any], str], asked: Sequence[tuple[str, Any]], timeout_s: float) -> list[str | None]:
    """Ask nodes something that any process there can see, each in a Ray task.

    Args:
        asked: Ray's id of each node, and the argument.
        timeout_s: seconds after which the answer of a node is None.
    """
    if not asked:
        return []
    task: Any = ray.remote(num_cpus=0, max_retries=0)(question)
    calls = [(NodeAffinitySchedulingStrategy(node_id, soft=False), argument) for node_id, argument in asked]
    refs = [task.options(scheduling_strategy=place).remote(argument) for place, argument in calls]
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
    answers: list[str | None] = []
    for ref in refs:
        try:
            answers.append(ray.get(ref) if ref in ready else None)
        except RayError:
            answers.append(None)
    return answers


# A live node answers within seconds. One that does not is named when its workers do not start.
ANSWER_TIMEOUT_S = 60.0


def check_shared(run_dir: Path, nodes: Collection[str]) -> None:
    """Check that nodes see a folder of the driver's machine, by a file that is in it meanwhile, and may write into it.

    Args:
        run_dir: the run directory, absolute.
        nodes: Ray's ids of the nodes; the driver's own is not asked.
    """
    here, *others = nodes_in_order()
    asked = [node for node in others if node["NodeID"] in nodes]
    if not asked:
        return
    with tempfile.NamedTemporaryFile(prefix="seen_by_all_nodes.", dir=run_dir) as mark:
        answers = ask_nodes(folder_problem, [(node["NodeID"], mark.name) for node in asked], ANSWER_TIMEOUT_S)
    problems = [f"node {node_name(node)} {answer}" for node, answer in zip(asked, answers, strict=True) if answer]
    if problems:
        raise ConfigError(
            f"trainer.default_local_dir={run_dir}: node {node_name(here)} made this folder, but {'; '.join(problems)}. "
            "Checkpoints and samples are written into it on every node: set a folder on a disk that all nodes share"
        )


def folder_problem(mark: str) -> str:
    """Return what is wrong with the folder of a file on this node; "" if nothing is."""
    if not Path(mark).is_file():
        return "does not see it"
    return "" if os.access(Path(mark).parent, os.W_OK | os.X_OK) else "cannot write into it"
