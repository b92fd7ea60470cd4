"""What every worker process can tell about itself."""

from __future__ import annotations

import resource
import socket
from dataclasses import dataclass

import ray


@dataclass(frozen=True)
class Address:
    """Where a worker runs, and a port that was free there a moment ago."""

    host: str
    ip: str
    port: int


class Process:
    """Base of the worker classes: address and peak memory."""

    def address(self) -> Address:
        """This process's node and a free port of it."""
        ip = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((ip, 0))
            return Address(socket.gethostname(), ip, probe.getsockname()[1])

    def peak_memory_gib(self) -> dict[str, float]:
        """Most memory this process has held: resident, and on the GPU where there is one."""
        import torch

        peak = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            peak["gpu"] = torch.cuda.max_memory_allocated() / 2**30
        return peak


def use_threads(num_threads: int) -> None:
    """Limit torch to this many compute threads: processes that share cores must not all take all of them."""
    import torch

    torch.set_num_threads(num_threads)
