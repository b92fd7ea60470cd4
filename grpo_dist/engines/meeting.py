"""Where the ranks of a process group meet, closed to other machines where the ranks share one."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"


def open_store(host: str, port: int = 0, *, world_size: int | None = None, timeout: timedelta | None = None) -> Any:
    """A store in this process that listens on the address `host` only; torch's own listens on all of the machine's.

    Args:
        host: an address of this machine.
        port: 0: any that is free.
        world_size: ranks to wait for, this one included; None: waits for none.
        timeout: limit of this wait, and of every one on the store.
    """
    import torch.distributed as dist

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    port = listener.getsockname()[1]
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    # the store owns the descriptor from here on, and closes it when it ends
    descriptor = listener.detach()
    return dist.TCPStore(
        host, port, world_size, True, wait_for_workers=world_size is not None, master_listen_fd=descriptor, **options
    )


def stay_on_loopback() -> None:
    """Have gloo listen on loopback, not on the address of the machine's name, unless the user names an interface."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
