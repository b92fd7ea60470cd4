"""The base class of all workers: address, check of the installed packages, model folder and peak memory."""

from __future__ import annotations

import functools
import os
import resource
import socket
from dataclasses import dataclass

import ray
import torch

from grpo_dist.assets import POLICY_KEY, resolve_model_path
from grpo_dist.assets.paths import is_folder
from grpo_dist.engines.installed_build import build_problem
from grpo_dist.errors import ConfigError
from grpo_dist.rewards.output_lines import OutputLines


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
        """Check that the installed packages can run on `device`.

        Raises:
            ConfigError: the packages were built for another device.
        """
        if problem := build_problem(device):
            raise ConfigError(f"{self.here()}: {problem}")

    def find_model(self, path: str, key: str = POLICY_KEY, *, weights: bool = True) -> str:
        """The folder of a model on this node. A model of the Hugging Face hub is downloaded if it is not cached.

        Args:
            path: of the model.
            key: the config key that names it, for messages.
            weights: whether the weights of a hub model are needed too.

        Raises:
            ConfigError: there is no such folder on this node, or the download failed.
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
        """What custom code has printed in this process, where a method collects it with `printing_to`."""
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


def use_threads(num_threads: int) -> None:
    """Set torch's number of compute threads; by default every process would use all cores."""
    torch.set_num_threads(num_threads)
