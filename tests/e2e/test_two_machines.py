"""The main job on a Ray cluster of two machines, emulated: the same rewards as on one."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_dist.engines.rendezvous import INTERFACE_VARIABLES
from tests.machines import Machines, machines

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
LIMIT_S = 600
TOKEN = "hf_" + "n0tReallyAS3cret" * 2
RAY = Path(sys.executable).parent / "ray"
OVERRIDES = [
    *("trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=-1"),
    *("trainer.save_freq=-1", "trainer.export_hf_model=false", "trainer.logger=[jsonl]", "trainer.log_rollouts=false"),
]


@pytest.fixture
def two_machines() -> Iterator[Machines]:
    """In a folder with a short name: the paths of Ray's sockets are limited to 107 characters."""
    with (
        tempfile.TemporaryDirectory(prefix="gm-", ignore_cleanup_errors=True) as folder,
        machines(2, Path(folder)) as there,
    ):
        yield there


def environment() -> dict[str, str]:
    """Ours, without what closes Ray and process groups to other machines; with a token, as on a real cluster."""
    left_out = ("RAY_", *INTERFACE_VARIABLES)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return plain | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}


def start_ray(there: Machines, env: dict[str, str]) -> str:
    """A head and another node; returns the cluster's address."""
    address = f"{there.addresses[0]}:6379"
    common = ["--num-cpus=3", "--object-store-memory=300000000", "--disable-usage-stats", "--block"]
    head = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={there.private}"]
    for number, how in enumerate((head, [f"--address={address}"])):
        ip = f"--node-ip-address={there.addresses[number]}"
        process = there.start(number, str(RAY), "start", *how, ip, *common, env=env)
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "Ray runtime started" in line:
                break
        else:
            pytest.fail(f"ray start ended: {''.join(said)}")
    return address


def rewards(run_dir: Path) -> list[float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["critic/score/mean"] for row in rows if row["step"] > 0]


def workers_on(there: Machines, number: int) -> set[str]:
    """Classes of the workers that ran on a machine, by Ray's logs."""
    logs = (there.own(number) / "private").rglob("worker-*.out")
    lines = (line for path in logs for line in path.read_text().splitlines())
    return {line.removeprefix(":actor_name:") for line in lines if line.startswith(":actor_name:")}


def secret_in_logs(there: Machines) -> list[str]:
    files = (path for path in there.folder.rglob("logs/**/*") if path.is_file())
    return [str(path) for path in files if TOKEN.encode() in path.read_bytes()]


def test_two_machines_give_the_rewards_of_one(two_machines: Machines, tmp_path: Path) -> None:
    env = environment()
    one, two = tmp_path / "one", tmp_path / "two"
    main = [sys.executable, "-m", "grpo_dist.main", *OVERRIDES]
    alone = [*main, f"trainer.default_local_dir={one}", "ray_kwargs.ray_init.address=local"]
    subprocess.run(alone, check=True, capture_output=True, timeout=LIMIT_S)
    address = start_ray(two_machines, env)
    where = [f"trainer.default_local_dir={two}", f"ray_kwargs.ray_init.address={address}", "trainer.nnodes=2"]
    # as a run on one machine leaves them behind in its process
    driver = two_machines.start(0, *main, *where, env=env | {"HF_TOKEN": TOKEN, "NCCL_SOCKET_IFNAME": "lo"})
    _, said = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 0, said
    assert rewards(two) == rewards(one)
    assert {"ActorWorker", "RolloutWorker"} <= workers_on(two_machines, 0)
    assert {"ActorWorker", "PolicyWorker"} <= workers_on(two_machines, 1)
    assert secret_in_logs(two_machines) == []
