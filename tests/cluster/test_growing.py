"""A machine joins the emulated cluster of a running job, which takes an engine more."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.runs import SETTINGS, train
from tests.cluster.machines import lose, machines
from tests.cluster.ray_nodes import PORT, SOON, Cluster, classes, environment, start_node

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1200)]
MORE, LIMIT_S = 5, 400
SHORT = [
    *("trainer.total_training_steps=300", "trainer.test_freq=-1", "trainer.val_before_train=false"),
    *("cluster.actor_world_size=1", "cluster.rollout_world_size=1", "trainer.max_actor_ckpt_to_keep=2"),
    "trainer.console=false",
]


class Run:
    """A run on the first of the machines."""

    def __init__(self, driver: subprocess.Popen[str], folder: Path) -> None:
        self.driver, self.folder = driver, folder

    def steps(self) -> dict[int, dict[str, float]]:
        """The metrics of the steps that are done; of one that is done again, the last."""
        path = self.folder / "metrics.jsonl"
        rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return {row["step"]: row for row in rows if row["step"] > 0}

    def goes_on_with(self, engines: int) -> None:
        """Wait until it has trained some steps more with so many engines."""
        deadline, since = time.monotonic() + LIMIT_S, max(self.steps(), default=0)
        while (
            sum(row["training/rollout_engines"] == engines for step, row in self.steps().items() if step > since) < MORE
        ):
            assert self.driver.poll() is None, self.driver.communicate()
            assert time.monotonic() < deadline, self.steps()
            time.sleep(0.2)


def test_a_machine_joins_with_an_engine_and_leaves_again(tmp_path: Path) -> None:
    """The run trains as with the one that it asks for. There is no budget for lost workers."""
    with machines(3) as there:
        env = environment() | SOON
        for number, cpus in enumerate((0, 4)):
            start_node(there, env, number, num_cpus=cpus)
        cluster = Cluster(there, env, f"{there.addresses[0]}:{PORT}")
        where = [f"trainer.default_local_dir={tmp_path}/grows", f"ray_kwargs.ray_init.address={cluster.address}"]
        size = ["cluster.num_cpus_per_worker=1", "cluster.max_rollout_world_size=2", "trainer.max_worker_restarts=0"]
        command = [sys.executable, "-m", "grpo_dist.main", *SETTINGS, *SHORT, *where, *size]
        growing = Run(there.start(0, *command, env=env), tmp_path / "grows")
        growing.goes_on_with(1)
        start_node(there, env, 2, num_cpus=4)
        growing.goes_on_with(2)
        assert classes(cluster.logs(2)) == {"RolloutWorker"}
        lose(there.names[2], cut=False)
        growing.goes_on_with(1)
        growing.driver.send_signal(signal.SIGTERM)
        _, said = growing.driver.communicate(timeout=LIMIT_S)
        assert growing.driver.returncode == 128 + signal.SIGTERM, said[-6000:]
    done = growing.steps()
    alone = train(tmp_path, [], *SHORT, f"trainer.total_training_steps={len(done)}")
    for name in ("critic/score/mean", "actor/grad_norm"):
        assert {step: row[name] for step, row in done.items()} == dict(alone.curve(name)), name
