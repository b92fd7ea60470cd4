"""Every engine has the methods of its protocol, with the same arguments; engines by name; where ranks meet."""

import inspect
import os
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from grpo_dist.engines import rendezvous, settings
from grpo_dist.engines.base import EngineWeights, Response, RolloutEngine, check_responses, rollout_backend
from grpo_dist.engines.float32_products import float32_products
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.vllm.engine import VLLMEngine
from grpo_dist.engines.vllm.weight_update import WeightUpdater
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.registry import load_attribute
from tests.engines.fakes import FakeRolloutEngine, FakeTrainEngine, FakeWeights
from tests.engines.train.plain import told
from tests.messages import refuses, says
from tests.ranks import LIMIT_S, run_ranks


def public(owner: type) -> list[str]:
    return [name for name, each in vars(owner).items() if inspect.isfunction(each) and name[0] != "_"]


# What workers and agent loops call of a rollout engine, and PolicyWorker of the one train engine.
PROTOCOLS = [
    (RolloutEngine, VLLMEngine, public(RolloutEngine)),
    (RolloutEngine, FakeRolloutEngine, public(RolloutEngine)),
    (EngineWeights, WeightUpdater, public(EngineWeights)),
    (EngineWeights, FakeWeights, public(EngineWeights)),
    (FSDPEngine, FakeTrainEngine, public(FakeTrainEngine)),
]


@pytest.mark.parametrize(("protocol", "engine", "methods"), PROTOCOLS)
def test_an_engine_has_what_its_protocol_says(protocol: type, engine: type, methods: list[str]) -> None:
    assert methods
    for name in methods:
        wanted, found = getattr(protocol, name), getattr(engine, name)
        assert inspect.iscoroutinefunction(found) == inspect.iscoroutinefunction(wanted), name
        asked, taken = (inspect.signature(each).parameters.values() for each in (wanted, found))
        assert [(p.name, p.kind, p.default) for p in taken] == [(p.name, p.kind, p.default) for p in asked], name


def test_engines_are_found_by_name(tmp_path: Path) -> None:
    assert load_attribute(settings.FSDP, key="FSDP") is FSDPEngine
    file = tmp_path / "mine.py"
    half = "\n\n\nclass Half:\n    def start(): ...\n"
    file.write_text(f"from tests.engines.fakes import FakeRolloutEngine as Mine{half}")
    assert rollout_backend(f"{file}:Mine").load() is FakeRolloutEngine
    with refuses(ConfigError, "actor_rollout_ref.rollout.name", f"{file}:Half", "generate, abort, shutdown"):
        rollout_backend(f"{file}:Half").load()
    says(told(rollout_backend(f"{file}:Min").load), "ConfigError", "'Mine'")


def answer(*lengths: int) -> Response:
    tokens, log_probs, versions = lengths
    return Response([5] * tokens, [-1.0] * log_probs, False, [0] * versions)


LENGTHS = "token_ids, log_probs, weight_versions, mask"
RETURNED = [
    ([answer(2, 2, 2)], ["length 1", "2 Response"]),
    ("ab", ["'ab' (str)"]),
    ([answer(2, 2, 2), [5, 6]], ["[1] = list", "length 2"]),
    ([answer(2, 2, 2), answer(3, 2, 3)], ["response 1", f"{LENGTHS} = [3, 2, 3, 3]"]),
]


@pytest.mark.parametrize(("returned", "parts"), RETURNED)
def test_an_engine_that_returns_something_else(returned: Any, parts: list[str]) -> None:
    engine: Any = FakeRolloutEngine()
    check_responses(engine, [answer(2, 2, 2), answer(0, 0, 0)], 2)
    with refuses(ConfigError, "actor_rollout_ref.rollout.name", "fakes.py:FakeRolloutEngine", *parts):
        check_responses(engine, returned, 2)


PRECISIONS = [(torch.bfloat16, True, "high"), (torch.float16, True, "high"), (torch.float32, True, "highest")]
PRECISIONS += [(torch.bfloat16, False, "highest")]


@pytest.mark.parametrize(("dtype", "is_cuda", "within"), PRECISIONS)
def test_products_of_hidden_states_of_16_bits_on_a_gpu_may_read_fewer(dtype: Any, is_cuda: bool, within: str) -> None:
    """And only within the block, also where it fails. The mantissas have 7 and 10 bits, and TF32's has 10."""
    states: Any = SimpleNamespace(is_cuda=is_cuda, element_size=lambda: dtype.itemsize)
    seen = [torch.get_float32_matmul_precision()]

    def product() -> None:
        with float32_products(states):
            seen.append(torch.get_float32_matmul_precision())
            raise RuntimeError

    pytest.raises(RuntimeError, product)
    assert [*seen, torch.get_float32_matmul_precision()] == ["highest", within, "highest"]


# --- where ranks meet -------------------------------------------------------------------------------------------------
def listening() -> list[tuple[str, int]]:
    return [tuple(c.laddr) for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def test_a_store_listens_at_its_address_only_and_until_its_end() -> None:
    before = listening()
    store = rendezvous.open_store("127.0.0.1")
    assert [each for each in listening() if each not in before] == [("127.0.0.1", store.port)]
    client = dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=10))
    client.set("key", "value")
    assert store.get("key") == b"value"
    place = ("127.0.0.1", store.port)
    del store, client
    socket.create_server(place).close()  # which is free again


def _listening(rank: int) -> tuple[set[str], str, float]:
    dist.barrier()  # gloo's ranks are connected
    limit = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    return {ip for ip, _ in listening()}, os.environ["GLOO_SOCKET_IFNAME"], limit.total_seconds()


@pytest.mark.deep
def test_ranks_that_meet_on_loopback_listen_there_only() -> None:
    assert run_ranks(2, _listening) == [({"127.0.0.1"}, "lo", LIMIT_S)] * 2


# --- on several machines: tests/cluster/test_nodes.py --------------------------------------------------------
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
    says(told(rendezvous.interface_of, "192.0.2.1"), "ConfigError", "192.0.2.1", "GLOO_SOCKET_IFNAME")
