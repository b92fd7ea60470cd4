"""CPUs, GPUs and memory of this machine, against what a run here would need."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from grpo_dist.checks import all_checks
from grpo_dist.checks.all_checks import check_machine, gpu_memory_gib, memory_gib
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.placement import slots
from grpo_dist.runtime import cluster
from grpo_dist.sizes import GIB
from tests.messages import refuses
from tests.workers.services import control_service

GPU4 = ("cluster=node8", "trainer.n_gpus_per_node=4")


@pytest.fixture(autouse=True)
def no_cluster_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "running_cluster", lambda: None)


def check(*overrides: str):
    config, _ = load_config(list(overrides))
    return check_machine(config, slots(config))


def gpus(monkeypatch: pytest.MonkeyPatch, *gib: float) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gib))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = [SimpleNamespace(total_memory=int(size * GIB)) for size in gib]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: found[number])


def test_memory_of_the_machine_and_of_its_smallest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check().host_gib == memory_gib()
    assert check().gpu_gib is None
    assert 0 < memory_gib() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    monkeypatch.setattr(all_checks, "logical_cpus", lambda: 8)
    gpus(monkeypatch, 80, 40, 80, 80)
    assert gpu_memory_gib() == [80, 40, 80, 80]
    assert check(*GPU4).gpu_gib == 40
    assert check(*GPU4).host_gib == memory_gib()
    assert check(*GPU4, "cluster.gpu_memory_gib=24").gpu_gib == 24


def test_a_driver_that_is_older_than_torch_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML counts the GPUs; only a context says that the driver is too old."""
    import torch

    def refuse(number: int) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nPlease update it")

    gpus(monkeypatch, 80, 80, 80, 80)
    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    with refuses(ConfigError, "13.0", "12040", "CUDA=12", "trainer.n_gpus_per_node=0") as caught:
        check(*GPU4)
    assert len(str(caught.value).splitlines()) == 1


def test_fewer_gpus_than_the_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses(ConfigError, "trainer.n_gpus_per_node=4", "torch", "make setup DEVICE=gpu", "trainer.dry_run=config"):
        check(*GPU4)
    monkeypatch.setattr(all_checks, "logical_cpus", lambda: 8)
    gpus(monkeypatch, 80, 80, 80)
    with refuses(ConfigError, "trainer.nnodes=1", "trainer.n_gpus_per_node=4", "3 GPUs", "trainer.dry_run=config"):
        check(*GPU4)


def test_fewer_cpus_than_ray_would_reserve() -> None:
    """Two actor ranks, an engine, a reference and the reward process with 10 each."""
    count = 4 + load_config([])[0].reward.num_workers
    ten = "cluster.num_cpus_per_worker=10"
    with refuses(ConfigError, ten, 10 * count, "ray_kwargs.ray_init.num_cpus=12"):
        check(ten, "ray_kwargs.ray_init.num_cpus=12")
    check(ten, f"ray_kwargs.ray_init.num_cpus={10 * count}", "cluster.max_rollout_world_size=9")


def test_an_address_for_agents_that_this_machine_does_not_have() -> None:
    """Without episodes nobody is asked for it, and nodes of a cluster have their own."""
    away = "actor_rollout_ref.rollout.agent.endpoint_host=203.0.113.7"
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=external"
    with refuses(ConfigError, away, "auto"):
        check(loop, away)
    check(away)
    check(loop, "actor_rollout_ref.rollout.agent.endpoint_host=127.0.0.2")
    with control_service() as address:
        check(loop, away, f"ray_kwargs.ray_init.address={address}")


def test_a_cluster_that_does_not_answer_and_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that answers nothing more is known: neither its CPUs nor its GPUs are those of this machine."""
    with control_service() as address:
        there = (f"ray_kwargs.ray_init.address={address}", "cluster=node8")
        assert check(*there).gpu_gib is None
        assert check(*there, "cluster.gpu_memory_gib=80").gpu_gib == 80
    with refuses(ConfigError, f"ray_kwargs.ray_init.address={address}", "Ray cluster"):
        check(*there)
