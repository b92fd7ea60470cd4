"""A machine joins the emulated cluster of a running job, which takes an engine more."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.chaos.runs import SETTINGS, train
from tests.cluster.machines import machines
from tests.cluster.ray_nodes import Cluster, classes, environment, start_node

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1200)]
MORE, LIMIT_S = 5, 400
SHORT = [
    *("trainer.total_training_steps=100", "trainer.test_freq=-1", "trainer.val_before_train=false"),
    *("trainer.save_freq=-1", "cluster.actor_world_size=1", "cluster.rollout_world_size=1"),
]


def steps(run_dir: Path) -> list[dict[str, float]]:
    """The metrics of the steps that are done."""
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["step"] > 0]


def test_a_machine_that_joins_brings_an_engine(tmp_path: Path) -> None:
    """The run starts with the one that it asks for. It trains as with one, with which it has more work."""
    with (
        tempfile.TemporaryDirectory(prefix="gm-", ignore_cleanup_errors=True) as folder,
        machines(3, Path(folder)) as there,
    ):
        env = environment()
        start_node(there, env, 0, num_cpus=0)
        start_node(there, env, 1, num_cpus=4)
        cluster = Cluster(there, env, f"{there.addresses[0]}:6379")
        where = [f"trainer.default_local_dir={tmp_path}/grows", f"ray_kwargs.ray_init.address={cluster.address}"]
        size = ["cluster.num_cpus_per_worker=1", "cluster.max_rollout_world_size=2"]
        command = [sys.executable, "-m", "grpo_dist.main", *SETTINGS, *SHORT, *where, *size]
        driver = there.start(0, *command, env=env)
        deadline = time.monotonic() + LIMIT_S
        joined = False
        while sum(row["training/rollout_engines"] == 2 for row in (done := steps(tmp_path / "grows"))) < MORE:
            assert driver.poll() is None, driver.communicate()
            assert time.monotonic() < deadline
            if done and not joined:
                start_node(there, env, 2, num_cpus=4)
                joined = True
            time.sleep(0.2)
        driver.send_signal(signal.SIGTERM)
        _, said = driver.communicate(timeout=300)
        assert driver.returncode == 128 + signal.SIGTERM, said[-6000:]
        assert classes(cluster.logs(2)) == {"RolloutWorker"}
        engines = [int(row["training/rollout_engines"]) for row in done]
        assert engines == sorted(engines)
        assert engines[0] == 1
    alone = train(tmp_path, [], *SHORT, f"trainer.total_training_steps={len(done)}")
    for name in ("critic/score/mean", "actor/grad_norm"):
        assert [(row["step"], row[name]) for row in done] == [pair for pair in alone.curve(name) if pair[0] > 0], name
