"""Faults against a run on real workers: it ends as if nothing had happened.

Each row of the matrix is one run that a role suffers six faults in, one after the other, at six different moments. The
whole matrix takes most of an hour (`make chaos`); the test suite runs a few faults of several roles in one run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.chaos.driver import Fault

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(3000)]
MOMENTS = ("idle", "generating", "scoring", "updating", "syncing", "saving")
ROLES = ("driver", "actor", "rollout", "ref", "reward")
SIGNALS = ("SIGKILL", "SIGSTOP")
SETTINGS = [
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
    "data.val_files=null",
    "trainer.total_training_steps=7",
    "trainer.save_freq=1",
    "trainer.max_worker_restarts=12",
    "trainer.max_actor_restarts=12",
    "trainer.worker_timeout_s=25",
    "reward.timeout_s=2",
    "ray_kwargs.ray_init.address=local",
]
MOST_LIVES = 8


@dataclass
class Outcome:
    """What became of a run: its files, how often it was started, what it said, and how long it took."""

    run_dir: Path
    lives: int
    log: str
    seconds: float
    hits: list[str]

    @property
    def weights(self) -> bytes:
        return (self.run_dir / "huggingface" / "model.safetensors").read_bytes()

    def rewards(self) -> list[tuple[int, float]]:
        rows = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return [(row["step"], row["critic/score/mean"]) for row in rows if "critic/score/mean" in row]


def train(folder: Path, faults: list[Fault]) -> Outcome:
    """A run to its end, started again whenever it was killed."""
    folder.mkdir(parents=True)
    plan = folder / "plan.json"
    plan.write_text(json.dumps([asdict(fault) for fault in faults]))
    command = [sys.executable, "-m", "tests.chaos.driver", str(plan), *SETTINGS]
    command.append(f"trainer.default_local_dir={folder}/run")
    started, log = time.monotonic(), ""
    for lives in range(1, MOST_LIVES + 1):
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
        log += done.stderr + done.stdout
        if done.returncode == 0:
            hits = plan.with_suffix(".hits")
            found = hits.read_text().splitlines() if hits.exists() else []
            return Outcome(folder / "run", lives, log, time.monotonic() - started, found)
        assert done.returncode == -9, log[-6000:]  # SIGKILL of the driver: anything else is a failure
    raise AssertionError(f"it did not come to its end:\n{log[-6000:]}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(tmp_path_factory.mktemp("chaos") / "undisturbed", [])


def check(outcome: Outcome, undisturbed: Outcome, faults: list[Fault]) -> None:
    assert len(outcome.hits) == len(faults), outcome.log[-6000:]
    assert outcome.rewards() == undisturbed.rewards()
    assert outcome.weights == undisturbed.weights


def test_a_run_survives_faults_of_several_roles(undisturbed: Outcome, tmp_path: Path) -> None:
    """And is told what happened: which role, which stage."""
    faults = [
        Fault("reward", "scoring", "SIGKILL", 2),
        Fault("ref", "generating", "SIGKILL", 3),
        Fault("actor", "updating", "SIGKILL", 5),
    ]
    outcome = train(tmp_path / "run", faults)
    check(outcome, undisturbed, faults)
    for role, stage in (("reward", "score"), ("ref", "ref_log_prob"), ("actor", "update")):
        assert f"{role} worker" in outcome.log
        assert f"stage '{stage}'" in outcome.log


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    rows = [
        "| role | signal | hit while | ends as undisturbed | seconds | starts of the run |",
        "|---|---|---|---|---|---|",
    ]
    yield rows
    sys.stdout.write("\n" + "\n".join(rows) + "\n")


@pytest.mark.long
@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("role", ROLES)
def test_matrix(undisturbed: Outcome, tmp_path: Path, table: list[str], role: str, name: str) -> None:
    faults = [Fault(role, moment, name, step) for step, moment in enumerate(MOMENTS, 1)]
    outcome = train(tmp_path / "run", faults)
    same = outcome.weights == undisturbed.weights and outcome.rewards() == undisturbed.rewards()
    moments = ", ".join(json.loads(line)["moment"] for line in outcome.hits)
    starts = outcome.lives + outcome.log.count("starting all workers again")
    table.append(f"| {role} | {name} | {moments} | {'yes' if same else 'NO'} | {outcome.seconds:.0f} | {starts} |")
    check(outcome, undisturbed, faults)
