"""The base of every worker class: a process's address, build, model folder and peak memory."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
from dataclasses import dataclass

import ray
import torch

from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.paths import is_folder
from grpo_dist.engines.installed_build import build_problem
from grpo_dist.errors import ConfigError


@dataclass(frozen=True)
class Address:
    """The node and the process of a worker; `node_id` and `gpus` (those that it has or shares) are Ray's names."""

    host: str
    ip: str
    pid: int
    node_id: str
    gpus: tuple[str, ...] = ()


class Process:
    """Base of the worker classes."""

    def address(self) -> Address:
        """This process and its node."""
        node_id = ray.get_runtime_context().get_node_id()
        gpus = tuple(map(str, ray.get_gpu_ids()))
        return Address(socket.gethostname(), ray.util.get_node_ip_address(), os.getpid(), node_id, gpus)

    def check_build(self, device: str) -> None:
        """Check that the installed packages can run on `device`.

        Raises:
            ConfigError: they were built for another device.
        """
        if problem := build_problem(device):
            raise ConfigError(f"{self.here()}: {problem}")

    def find_model(self, path: str) -> str:
        """The folder of a model on this node. A model of the hub is downloaded, unless this node has it.

        Raises:
            ConfigError: there is no such folder on this node.
        """
        try:
            folder = resolve_model_path(path)
        except ConfigError as error:
            raise ConfigError(f"{self.here()}: {error}") from None
        if not is_folder(folder):
            raise ConfigError(
                f"{self.here()}: actor_rollout_ref.model.path={path}: there is no such folder on this node; put it on "
                "a disk that all nodes share, or into the same place on each, or name a model of the hub"
            )
        return folder

    def here(self) -> str:
        """This node, for messages."""
        return f"node {socket.gethostname()} ({ray.util.get_node_ip_address()})"

    def peak_memory_gib(self) -> dict[str, float]:
        """The largest memory that this process has held: resident, and on the GPU if it uses one."""
        peak = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            peak["gpu"] = torch.cuda.max_memory_allocated() / 2**30
        return peak


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks for the next pass instead of returning them to the kernel.

    Every pass on CPU allocates the same blocks, and a new block costs a page fault every 4 KiB: 8 % of an update of
    SmolLM2-135M. Without glibc nothing happens.
    """
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, (1 << 31) - 1)


def use_threads(num_threads: int) -> None:
    """Limit torch to this many compute threads, so that processes that share cores do not each take all of them."""
    torch.set_num_threads(num_threads)
