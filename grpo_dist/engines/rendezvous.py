"""Where the ranks of a process group meet: on loopback, closed to other machines, where they share one, else on the
interface between the machines.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from grpo_dist.errors import ConfigError

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
START_TIMEOUT = timedelta(minutes=30)  # until all ranks are there; torch's own


def open_store(host: str, timeout: timedelta = START_TIMEOUT) -> Any:
    """A store in this process, at a port that is free, which listens on the address `host` only; torch's own listens
    on all of the machine's.

    Args:
        host: an address of this machine.
        timeout: limit of every wait on the store.
    """
    import torch.distributed as dist

    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    descriptor = listener.detach()  # the store owns it from here on, and closes it when it ends
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor, timeout=timeout
    )


def stay_on_loopback() -> None:
    """Have gloo listen on loopback, not on the address of the machine's name, unless the user names an interface."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)


def leave_loopback(host: str, port: int) -> None:
    """Have gloo listen on the interface on the way to HOST:PORT, where ranks on several machines meet, unless the user
    names one. gloo's own choice is the address of the machine's name, which is 127.0.1.1 on many.

    Raises:
        ConfigError: the environment ties this process to loopback, where ranks on other machines cannot reach it.
    """
    refuse_loopback(INTERFACE_VARIABLES)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(own_ip(host, port)))


def refuse_loopback(names: Iterable[str]) -> None:
    """Check that none of these environment variables ties this process to loopback.

    Raises:
        ConfigError: one does, and ranks on other machines cannot reach this process.
    """
    for name in names:
        if is_loopback_setting(name, value := os.environ.get(name, "")):
            raise ConfigError(
                f"{name}={value} in the environment of {socket.gethostname()}: ranks on other machines cannot be "
                "reached over loopback. Unset it where `ray start` and the run are started, or name the interface "
                "between the machines"
            )


def is_loopback_setting(name: str, value: str) -> bool:
    """Whether an environment variable binds a process to its own machine: an interface or an address of loopback."""
    if not value or value.startswith("^"):  # NCCL: all interfaces but these
        return False
    if name.endswith("_IFNAME"):
        return all(each == LOOPBACK_INTERFACE for each in value.removeprefix("=").split(","))
    if name.endswith(("_HOST_IP", "_ADDR", "_COMM_ID", "_IP")):
        return value == "localhost" or value.startswith(("127.", "::1", "[::1]", "localhost:"))
    return False


def own_ip(host: str, port: int) -> str:
    """The address of this machine on the way to HOST:PORT."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])


def interface_of(ip: str) -> str:
    """The network interface that has this address.

    Raises:
        ConfigError: none has it.
    """
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == ip for address in addresses):
            return name
    raise ConfigError(
        f"no network interface of {socket.gethostname()} has the address {ip}, at which ranks would meet; set "
        "GLOO_SOCKET_IFNAME in the environment of its workers"
    )
