"""The main job on a Ray cluster of two machines, emulated: the same rewards as on one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import Machines, machines
from tests.cluster.ray_nodes import environment, metric, start_ray, workers_on

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
LIMIT_S = 600
TOKEN = "hf_" + "n0tReallyAS3cret" * 2
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
    assert metric(two, "critic/score/mean") == metric(one, "critic/score/mean")
    assert {"ActorWorker", "RolloutWorker"} <= workers_on(two_machines, 0)
    assert {"ActorWorker", "PolicyWorker"} <= workers_on(two_machines, 1)
    assert secret_in_logs(two_machines) == []
