from __future__ import annotations

import json
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from grpo_dist.engines.rendezvous import INTERFACE_VARIABLES, interface_of, is_loopback_setting, open_store, own_ip
from grpo_dist.errors import ConfigError
from tests.cluster.machines import Machines, machines
from tests.messages import refuses, says
from tests.ranks import LIMIT_S, run_ranks


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
    socket.create_server(("127.0.0.1", port)).close()  # which is free again


def _listening(rank: int) -> tuple[set[str], str, float]:
    dist.barrier()  # gloo's ranks are connected
    limit = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    return {ip for ip, _ in listening()}, os.environ["GLOO_SOCKET_IFNAME"], limit.total_seconds()


def test_ranks_that_meet_on_loopback_listen_there_only() -> None:
    """In their own default group, made by `init_process_group`, with the time limit that it is given."""
    assert run_ranks(2, _listening) == [({"127.0.0.1"}, "lo", LIMIT_S)] * 2


# --- on several machines -------------------------------------------------------------------------------------------
RANK = """
import json, os, sys, time
from pathlib import Path
import psutil, torch, torch.distributed as dist
from grpo_dist.engines.rendezvous import START_TIMEOUT, init_process_group, open_store
from grpo_dist.errors import ConfigError

rank, host, note = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
if rank == 0:
    store = open_store(host)
    note.with_suffix(".tmp").write_text(str(store.port))
    note.with_suffix(".tmp").rename(note)
else:
    while not note.exists():
        time.sleep(0.05)
    store = dist.TCPStore(host, int(note.read_text()), timeout=START_TIMEOUT)
try:
    init_process_group(device="cpu", rank=rank, world_size=2, store=store, timeout_s=60)
except ConfigError as error:
    print(json.dumps(str(error)), flush=True)
    os._exit(0)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
listening = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
print(json.dumps([total.item(), sorted(listening), os.environ["GLOO_SOCKET_IFNAME"]]), flush=True)
dist.barrier()
"""


def ranks_on(there: Machines, tmp_path: Path, *numbers: int, **env: str) -> list[Any]:
    """What the ranks tell, each on a machine of its own."""
    plain = {name: value for name, value in os.environ.items() if name not in INTERFACE_VARIABLES}
    note = tmp_path / "port"
    rank = (sys.executable, "-c", RANK)
    started = [there.start(n, *rank, str(n), there.addresses[0], str(note), env=plain | env) for n in numbers]
    try:
        told = [process.communicate(timeout=200) for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(out for out, _ in told), told
    return [json.loads(out) for out, _ in told]


def test_ranks_on_two_machines_meet_on_the_interface_between_them(tmp_path: Path) -> None:
    """Not at the address of the machine's name, which is 127.0.1.1."""
    with machines(2, tmp_path) as there:
        found = ranks_on(there, tmp_path, 0, 1)
        first, second = there.addresses
    assert found == [[3.0, [first], "eth0"], [3.0, [second], "eth0"]]


def test_a_rank_that_is_tied_to_loopback_says_so(tmp_path: Path) -> None:
    with machines(1, tmp_path) as there:
        (told,) = ranks_on(there, tmp_path, 0, NCCL_SOCKET_IFNAME="=lo")
    says(told, "NCCL_SOCKET_IFNAME==lo", "node0", "ray start")


def test_settings_of_loopback_and_the_interface_of_an_address() -> None:
    tied = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", "VLLM_HOST_IP": "127.0.0.1"}
    tied |= {"MASTER_ADDR": "localhost", "NCCL_COMM_ID": "127.0.0.1:5000"}
    free = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "^lo,docker", "VLLM_HOST_IP": "10.0.0.1"}
    free |= {"MASTER_ADDR": "", "NCCL_IB_HCA": "lo", "NCCL_DEBUG": "INFO"}
    assert [name for name, value in tied.items() if not is_loopback_setting(name, value)] == []
    assert [name for name, value in free.items() if is_loopback_setting(name, value)] == []
    assert (interface_of("127.0.0.1"), own_ip("127.0.0.1", 1)) == ("lo", "127.0.0.1")
    with refuses(ConfigError, "192.0.2.1", "GLOO_SOCKET_IFNAME"):
        interface_of("192.0.2.1")
