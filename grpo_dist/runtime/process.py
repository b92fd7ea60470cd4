"""What every worker process has: a base class with its address and checks, and the driver's environment variables.

A worker inherits the environment that `ray start` had on its node. The driver's credentials, proxies and NCCL settings
override it. They are passed as a constructor argument, because they may be secrets, and Ray writes a `runtime_env` into
the logs of every node. Variables that name a folder (HF_HOME, SSL_CERT_FILE) are not passed, because nodes differ, nor
those that bind a process to the loopback interface.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from grpo_dist.assets import POLICY_KEY, is_folder, resolve_model_path
from grpo_dist.engines.rendezvous import is_loopback_setting
from grpo_dist.engines.vllm.installed import build_problem
from grpo_dist.errors import ConfigError
from grpo_dist.rewards.scorer import OutputLines
from grpo_dist.runtime.connection import end_with_ray


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

    def check_build(self, device: str) -> None:
        """Check that the installed packages can run on `device`."""
        if problem := build_problem(device):
            raise ConfigError(f"{self.here()}: {problem}")

    def find_model(self, path: str, key: str = POLICY_KEY, *, weights: bool = True) -> str:
        """The folder of a model on this node. A model of the Hugging Face hub is downloaded if it is not cached.

        Args:
            path: of the model.
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
        """Peak memory of this process, GiB: "resident", and "gpu" if it uses one."""
        peak = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            peak["gpu"] = torch.cuda.max_memory_allocated() / 2**30
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


NAMES = frozenset(
    {
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
        *("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DISABLE_XET"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
        *("GLOO_SOCKET_IFNAME", "CUDA_DEVICE_ORDER"),
    }
)
PREFIXES = ("WANDB_", "NCCL_", "TORCH_NCCL_", "VLLM_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_")
# Addresses of the driver's services, and folders: both are useless on other nodes. The key of a server of the user's.
_OF_THE_DRIVER = frozenset(
    {
        *("WANDB_SERVICE", "WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"),
        *("VLLM_HOST_IP", "VLLM_PORT", "VLLM_RPC_BASE_PATH", "VLLM_API_KEY"),
    }
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

    Its process ends once Ray's control service is lost (connection.py). It keeps the name of the worker class, which
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
