"""Where the ranks of a process group meet, closed to other machines where the ranks share one."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
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
