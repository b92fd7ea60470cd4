from __future__ import annotations

import os
import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from grpo_dist.engines import rendezvous
from grpo_dist.errors import ConfigError
from tests.messages import refuses
from tests.ranks import LIMIT_S, run_ranks


def listening() -> list[tuple[str, int]]:
    return [tuple(c.laddr) for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def test_a_store_listens_at_its_address_only_and_until_its_end() -> None:
    before = listening()
    store = rendezvous.open_store("127.0.0.1")
    assert [each for each in listening() if each not in before] == [("127.0.0.1", store.port)]
    client = dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=10))
    client.set("key", "value")
    assert store.get("key") == b"value"
    port = store.port
    del store, client
    socket.create_server(("127.0.0.1", port)).close()  # which is free again


def _listening(rank: int) -> tuple[set[str], str, float]:
    dist.barrier()  # gloo's ranks are connected
    limit = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    return {ip for ip, _ in listening()}, os.environ["GLOO_SOCKET_IFNAME"], limit.total_seconds()


def test_ranks_that_meet_on_loopback_listen_there_only() -> None:
    """In their own default group, made by `init_process_group`, with the time limit that it is given."""
    assert run_ranks(2, _listening) == [({"127.0.0.1"}, "lo", LIMIT_S)] * 2


# --- on several machines: tests/cluster/test_two_nodes.py --------------------------------------------------------
def test_ranks_on_several_machines_leave_loopback_or_are_told_what_ties_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They listen on the interface that leads to the store, unless the user has named one."""
    elsewhere: Any = SimpleNamespace(host="192.0.2.1", port=1)
    for name in rendezvous.INTERFACE_VARIABLES:
        monkeypatch.setenv(name, "=lo")
        with refuses(ConfigError, f"{name}==lo", socket.gethostname(), "ray start"):
            rendezvous.init_process_group(device="cpu", rank=0, world_size=2, store=elsewhere, timeout_s=60)
        monkeypatch.delenv(name)
    monkeypatch.setattr(rendezvous, "own_ip", lambda host, port: "127.0.0.1")
    rendezvous.leave_loopback("192.0.2.1", 1)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    rendezvous.leave_loopback("192.0.2.1", 1)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_settings_of_loopback_and_the_interface_of_an_address() -> None:
    tied = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", "VLLM_HOST_IP": "127.0.0.1"}
    tied |= {"MASTER_ADDR": "localhost", "NCCL_COMM_ID": "127.0.0.1:5000"}
    free = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "^lo,docker", "VLLM_HOST_IP": "10.0.0.1"}
    free |= {"MASTER_ADDR": "", "NCCL_IB_HCA": "lo", "NCCL_DEBUG": "INFO"}
    assert [name for name, value in tied.items() if not rendezvous.is_loopback_setting(name, value)] == []
    assert [name for name, value in free.items() if rendezvous.is_loopback_setting(name, value)] == []
    assert (rendezvous.interface_of("127.0.0.1"), rendezvous.own_ip("127.0.0.1", 1)) == ("lo", "127.0.0.1")
    with refuses(ConfigError, "192.0.2.1", "GLOO_SOCKET_IFNAME"):
        rendezvous.interface_of("192.0.2.1")
