from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import torch.distributed as dist

from grpo_dist.engines.meeting import open_store
from tests.ranks import run_ranks


def listening() -> list[tuple[str, int]]:
    return [tuple(c.laddr) for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def test_a_store_listens_at_its_address_only_and_until_its_end() -> None:
    before = listening()
    store = open_store("127.0.0.1")
    assert [each for each in listening() if each not in before] == [("127.0.0.1", store.port)]
    client = dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=10))
    client.set("key", "value")
    assert store.get("key") == b"value"
    port = store.port
    del store, client
    with socket.create_server(("127.0.0.1", port)):
        pass  # the port is free again


def _listening(rank: int) -> tuple[set[str], str]:
    dist.barrier()  # gloo's ranks are connected
    return {ip for ip, _ in listening()}, os.environ["GLOO_SOCKET_IFNAME"]


def test_ranks_that_meet_on_loopback_listen_there_only() -> None:
    """In their own default group, made by `init_process_group`."""
    assert run_ranks(2, _listening) == [({"127.0.0.1"}, "lo")] * 2
