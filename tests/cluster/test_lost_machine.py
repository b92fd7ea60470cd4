"""A machine of an emulated cluster is lost: actor, engine or reference, beside a driver on the head alone."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from grpo_dist.errors import RayLost
from tests.chaos.driver import Fault
from tests.chaos.runs import SETTINGS, Outcome, hits_of, saved, train
from tests.cluster.losing import NAMES
from tests.cluster.machines import Machines, lose, machines, pids_on
from tests.cluster.ray_nodes import SOON, ended, environment, start_ray
from tests.messages import says
from tests.observed import assert_gone, command_line

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1500)]
STEPS = 3
SHORT = [
    *(f"trainer.total_training_steps={STEPS}", "trainer.test_freq=-1", "trainer.val_before_train=false"),
    *("cluster.actor_world_size=1", "cluster.rollout_world_size=1", "cluster.ref_world_size=1"),
    *("reward.num_workers=3", "trainer.log_rollouts=false"),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(tmp_path_factory.mktemp("alone"), [], *SHORT)


@pytest.fixture
def four_machines() -> Iterator[Machines]:
    with machines(4) as there:
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
    code, said = ended(driver)
    return code, Outcome(folder / "run", 1, said, 0.0, hits_of(plan))


@pytest.mark.parametrize("moment", ["generating", "updating", "syncing", "saving"])
@pytest.mark.parametrize("role", ["actor", "rollout", "ref"])
def test_a_lost_machine_costs_time_and_nothing_else(
    undisturbed: Outcome, four_machines: Machines, tmp_path: Path, role: str, moment: str
) -> None:
    """Its workers find room on the others. It counts as one fault, and there is no budget for more."""
    fault = Fault(role, moment, "CUT" if moment == "generating" else "SIGKILL", 2)
    budget = ["trainer.max_worker_restarts=1", "trainer.max_actor_restarts=1"]
    code, outcome = run_on(four_machines, tmp_path, fault, *budget, num_cpus=4)
    assert code == 0, outcome.log[-6000:]
    assert [hit["fault"] for hit in outcome.hits] == [asdict(fault)], outcome.log[-6000:]
    assert outcome.hits[0]["during"] == moment, "it came too late"
    assert outcome.rewards() == undisturbed.rewards()
    assert outcome.weights == undisturbed.weights


def test_with_no_room_the_run_ends_and_says_what_to_do(four_machines: Machines, tmp_path: Path) -> None:
    """Each machine has room for the two processes that are on it."""
    fault = Fault("ref", "generating", "SIGKILL", 2)
    full = ["cluster.num_cpus_per_worker=1", "trainer.node_wait_minutes=0.2"]
    code, outcome = run_on(four_machines, tmp_path, fault, *full, num_cpus=2)
    assert code == 1, outcome.log[-6000:]
    says(outcome.log, "trainer.node_wait_minutes=0.2", "ray start", "node3 (10.")


def test_without_its_head_a_run_on_another_machine_says_so_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The head is cut off and then gone, in the middle of a step."""
    with machines(2) as there:
        env = environment() | SOON
        address = start_ray(there, env, num_cpus=4)
        run_dir = tmp_path / "run"
        where = [f"trainer.default_local_dir={run_dir}", f"ray_kwargs.ray_init.address={address}"]
        command = [sys.executable, "-m", "grpo_dist.main", *SETTINGS, *SHORT, *where]
        driver = there.start(1, *command, "trainer.total_training_steps=200", env=env)
        pointer = saved(driver, run_dir)
        there_now = map(psutil.Process, pids_on(there.names[1]))
        workers = {each for each in there_now if re.match(r"ray::\w*Worker", command_line(each))}  # ours, not Ray's own
        assert len(workers) >= 5, "actor, engine, reference and reward processes"
        lose(there.names[0], cut=True)
        _, said = driver.communicate(timeout=120)
        assert driver.returncode == RayLost.exit_code, said[-6000:]
        says(said, "gcs_server", address, f"{run_dir}/global_step_{pointer.read_text()}", "ray start")
        assert_gone(workers, within_s=150)
