"""What of the driver's environment reaches a worker, and what Ray writes down of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ray

from grpo_dist.workers.environment import shared_environment, with_environment
from grpo_dist.workers.group import DATA_STAYS_IN_STORE, WorkerGroup
from grpo_dist.workers.limits import TimeLimits
from grpo_dist.workers.process import Process
from tests.processes import reserved

SECRET = "hf_" + "s3cretS3cretS3cretS3cret"


def test_credentials_proxies_and_nccl_are_shared() -> None:
    wanted = {
        "HF_TOKEN": SECRET,
        "HF_ENDPOINT": "https://hub.example",
        "WANDB_API_KEY": "k",
        "WANDB_MODE": "offline",
        "https_proxy": "http://me:pass@proxy:3128",
        "NO_PROXY": "10.0.0.0/8",
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "^lo,docker",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    others = {
        "PATH": "/bin",
        "HF_HOME": "/data/hf",
        "WANDB_SERVICE": "2-1-tcp-localhost-1",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    others |= {"RAY_AUTH_TOKEN": "t", "WANDB_DIR": "/here"}
    assert shared_environment(wanted | others) == wanted


def test_what_ties_a_process_to_its_machine_is_not() -> None:
    """As a local run sets it for itself; a later run in the same process may be one over several nodes."""
    tied = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_COMM_ID": "127.0.0.1:7000"}
    assert shared_environment(tied | {"NCCL_DEBUG": "WARN"}) == {"NCCL_DEBUG": "WARN"}


def test_a_local_runs_own_settings_are_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_dist.workers.cluster import set_local_environment

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    set_local_environment()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in shared_environment(os.environ)
    assert "GLOO_SOCKET_IFNAME" not in shared_environment(os.environ)


def test_the_class_keeps_its_name_and_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(Process):
        def __init__(self, rank: int) -> None:
            self.rank, self.colour = rank, os.environ["COLOUR"]

    monkeypatch.setenv("COLOUR", "red")
    made = with_environment(Named)
    assert (made.__name__, made.__module__) == ("Named", __name__)
    worker = made({"COLOUR": "blue"}, 3)
    assert (worker.rank, worker.colour) == (3, "blue"), "it is set before the constructor runs"


@pytest.mark.ray
def test_workers_have_it_also_after_a_restart_and_ray_does_not_write_it_down(local_ray: None) -> None:
    class Looking(Process):
        def __init__(self) -> None:
            self.seen = os.environ.get("HF_TOKEN")

        def look(self) -> str | None:
            return self.seen

    with reserved(actor=1) as bundles:
        options = {"limits": TimeLimits(240.0), "env": DATA_STAYS_IN_STORE, "shared": {"HF_TOKEN": SECRET}}
        group = WorkerGroup.spawn("actor", Looking, bundles["actor"], args=[()], **options)
        assert group.call(0, "start", "look") == SECRET
        group.respawn(0)
        assert group.call(0, "start", "look") == SECRET
        group.kill()
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    texts = [path.read_bytes() for path in logs.rglob("*") if path.is_file()]
    assert any(b"RAY_max_direct_call_object_size" in text for text in texts), "it does write a runtime_env down"
    assert not any(SECRET.encode() in text for text in texts)
