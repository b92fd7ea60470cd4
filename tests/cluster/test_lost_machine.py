"""The main job on an emulated cluster of which a machine is lost: it ends with the weights of an undisturbed run.

The head has the driver alone. Of three machines one has the actor, one the engine and one the reference, and each has a
reward process; every one has room for what is on another.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.chaos.driver import Fault
from tests.chaos.runs import SETTINGS, Outcome, train
from tests.cluster.losing import NAMES
from tests.cluster.machines import Machines, machines
from tests.cluster.ray_nodes import environment, start_ray
from tests.messages import says

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1500)]
LIMIT_S = 600
STEPS = 3
SHORT = [
    *(f"trainer.total_training_steps={STEPS}", "trainer.test_freq=-1", "trainer.val_before_train=false"),
    *("cluster.actor_world_size=1", "cluster.rollout_world_size=1", "cluster.ref_world_size=1"),
    *("reward.num_workers=3", "trainer.log_rollouts=false"),
]
# Ray's default is up to 65 s.
SOON = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
MOMENTS = ("generating", "updating", "syncing", "saving")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """On one machine."""
    return train(tmp_path_factory.mktemp("alone"), [], *SHORT)


@pytest.fixture
def four_machines() -> Iterator[Machines]:
    with (
        tempfile.TemporaryDirectory(prefix="gm-", ignore_cleanup_errors=True) as folder,
        machines(4, Path(folder)) as there,
    ):
        yield there


def run_on(there: Machines, folder: Path, fault: Fault, *overrides: str, num_cpus: int) -> tuple[int, Outcome]:
    """A run on the cluster that suffers a fault: (exit code, outcome)."""
    env = environment() | SOON
    address = start_ray(there, env, num_cpus=num_cpus, head_cpus=0)
    plan = folder / "plan.json"
    plan.write_text(json.dumps([asdict(fault)]))
    where = [f"trainer.default_local_dir={folder}/run", f"ray_kwargs.ray_init.address={address}", "trainer.nnodes=3"]
    command = [sys.executable, "-m", "tests.cluster.losing", str(plan), "main", *SETTINGS, *SHORT, *where, *overrides]
    driver = there.start(0, *command, env=env | {NAMES: " ".join(there.names[1:])})
    try:
        out, said = driver.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        driver.kill()
        raise AssertionError(f"it did not end:\n{driver.communicate()[1][-6000:]}") from None
    hits = plan.with_suffix(".hits")
    found = [json.loads(line) for line in hits.read_text().splitlines()] if hits.exists() else []
    return driver.returncode, Outcome(folder / "run", 1, said + out, 0.0, found)


def check(code: int, outcome: Outcome, undisturbed: Outcome, fault: Fault) -> None:
    assert code == 0, outcome.log[-6000:]
    assert [hit["fault"] for hit in outcome.hits] == [asdict(fault)], outcome.log[-6000:]
    assert outcome.hits[0]["during"] == fault.moment, "it came too late"
    assert outcome.rewards() == undisturbed.rewards()
    assert outcome.weights == undisturbed.weights


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("role", ["actor", "rollout", "ref"])
def test_a_lost_machine_costs_time_and_nothing_else(
    undisturbed: Outcome, four_machines: Machines, tmp_path: Path, role: str, moment: str
) -> None:
    """Its workers find room on the others. It counts as one fault, and there is no budget for more."""
    fault = Fault(role, moment, "CUT" if moment == "generating" else "SIGKILL", 2)
    budget = ["trainer.max_worker_restarts=1", "trainer.max_actor_restarts=1"]
    code, outcome = run_on(four_machines, tmp_path, fault, *budget, num_cpus=4)
    check(code, outcome, undisturbed, fault)


def test_with_no_room_the_run_ends_and_says_what_to_do(four_machines: Machines, tmp_path: Path) -> None:
    fault = Fault("ref", "generating", "SIGKILL", 2)
    code, outcome = run_on(four_machines, tmp_path, fault, "trainer.node_wait_minutes=0.2", num_cpus=2)
    assert code == 1, outcome.log[-6000:]
    says(outcome.log, "trainer.node_wait_minutes=0.2", "ray start", "(10.", "node")
