"""The process group of a role, and the address at which its ranks meet: loopback, closed to other machines, where they
share a machine, else the interface between the machines.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from grpo_dist.errors import ConfigError
from grpo_dist.hosts import LOOPBACK_INTERFACE, stay_on_loopback

LOOPBACK = "127.0.0.1"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
START_TIMEOUT = timedelta(minutes=30)  # until all ranks have connected; torch's own default


def open_store(host: str) -> dist.TCPStore:
    """Open a store in this process, at a free port. Unlike torch's own it listens on `host`, its own address, alone."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    descriptor = listener.detach()  # the store owns it from here on, and closes it when it ends
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor, timeout=START_TIMEOUT
    )


def init_process_group(*, device: str, rank: int, world_size: int, store: dist.TCPStore, timeout_s: float) -> None:
    """Join the role's process group, at the store that rank 0 has opened: gloo on CPU, nccl (gloo for CPU tensors) on
    GPU. A rank that waits longer than `timeout_s` seconds for the others fails.

    Raises:
        ConfigError: the environment ties a rank to loopback, and others are on other machines.
    """
    if device == "cuda":
        torch.cuda.set_device(0)  # Ray shows each process its own GPUs only
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if store.host == LOOPBACK:
        stay_on_loopback()
    else:
        leave_loopback(store.host, store.port)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


@contextmanager
def alone(device: str) -> Iterator[None]:
    """Be the one rank of a process group within the block."""
    init_process_group(device=device, rank=0, world_size=1, store=open_store(LOOPBACK), timeout_s=600.0)
    try:
        yield
    finally:
        if dist.is_initialized():  # a vLLM that was started in this process has ended it
            dist.destroy_process_group()


def world_limit(device: str) -> timedelta:
    """Return how long the ranks of this role wait for each other; unless told, groups of some have torch's default."""
    ranks: Any = dist.group.WORLD
    limit: timedelta = ranks._get_backend(torch.device(device)).options._timeout
    return limit


def leave_loopback(host: str, port: int) -> None:
    """Make gloo listen on the interface that leads to HOST:PORT, where ranks on several machines meet, unless the user
    names one. gloo's own choice is the address of the machine's name, which is 127.0.1.1 on many machines.
    """
    refuse_loopback(INTERFACE_VARIABLES)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(own_ip(host, port)))


def refuse_loopback(names: Iterable[str]) -> None:
    """Check that none of these environment variables ties this process to loopback."""
    for name in names:
        if is_loopback_setting(name, value := os.environ.get(name, "")):
            raise ConfigError(
                f"{name}={value} in the environment of {socket.gethostname()}: ranks on other machines cannot be "
                "reached over loopback. Unset it where `ray start` and the run are started, or name the interface "
                "between the machines"
            )


def is_loopback_setting(name: str, value: str) -> bool:
    """Tell if an environment variable binds a process to its own machine, by an interface or an address of loopback."""
    if not value or value.startswith("^"):  # NCCL: all interfaces but these
        return False
    if name.endswith("_IFNAME"):
        return all(interface == LOOPBACK_INTERFACE for interface in value.removeprefix("=").split(","))
    if name.endswith(("_HOST_IP", "_ADDR", "_COMM_ID", "_IP")):
        return value == "localhost" or value.startswith(("127.", "::1", "[::1]", "localhost:"))
    return False


def own_ip(host: str, port: int) -> str:
    """The address of this machine on the way to HOST:PORT."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])


def interface_of(ip: str) -> str:
    """The network interface that has this address."""
    import psutil  # not needed on a single machine, where an engine may run without it

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == ip for address in addresses):
            return name
    raise ConfigError(
        f"no network interface of {socket.gethostname()} has the address {ip}, at which ranks would meet; set "
        "GLOO_SOCKET_IFNAME in the environment of its workers"
    )
