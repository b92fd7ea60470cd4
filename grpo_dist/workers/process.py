"""What every worker process can tell about itself."""

from __future__ import annotations

import os
import resource
import socket
from dataclasses import dataclass

import ray

from grpo_dist.errors import ConfigError


@dataclass(frozen=True)
class Address:
    """Where a worker runs, and its process; `node_id` is Ray's, and so are the `gpus` that it has or shares."""

    host: str
    ip: str
    pid: int
    node_id: str
    gpus: tuple[str, ...] = ()


class Process:
    """Base of the worker classes: address and peak memory."""

    def address(self) -> Address:
        """This process and its node."""
        node_id = ray.get_runtime_context().get_node_id()
        gpus = tuple(map(str, ray.get_gpu_ids()))
        return Address(socket.gethostname(), ray.util.get_node_ip_address(), os.getpid(), node_id, gpus)

    def check_build(self, device: str) -> None:
        """Check that the packages of this node can run on `device`.

        Raises:
            ConfigError: they were built for other machines.
        """
        from grpo_dist.engines.installed_build import build_problem

        if problem := build_problem(device):
            raise ConfigError(f"{self.here()}: {problem}")

    def find_model(self, path: str) -> str:
        """The folder of a model on this node. One of the hub's is downloaded, unless it is here already.

        Raises:
            ConfigError: it is not on this node.
        """
        from grpo_dist.assets import resolve_model_path
        from grpo_dist.assets.paths import is_folder

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
        """Most memory this process has held: resident, and on the GPU where there is one."""
        import torch

        peak = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            peak["gpu"] = torch.cuda.max_memory_allocated() / 2**30
        return peak


def keep_freed_memory() -> None:
    """Have glibc keep large blocks that are freed, for the next pass, instead of giving them back to the kernel.

    A pass on CPU asks for the same blocks again and again, and each new one costs a page fault every 4 KiB: 8 % of an
    update of SmolLM2-135M. Elsewhere than on glibc nothing happens.
    """
    import ctypes

    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, (1 << 31) - 1)


def use_threads(num_threads: int) -> None:
    """Limit torch to this many compute threads: processes that share cores must not all take all of them."""
    import torch

    torch.set_num_threads(num_threads)
