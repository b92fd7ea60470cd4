"""Faults against a run on real workers: it ends as if nothing had happened.

Each row of the matrix is one run that a role suffers six faults in, one after the other, at six different moments. The
whole matrix takes 40 minutes (`make chaos`); the test suite runs a few faults of several roles in one run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.chaos.driver import Fault
from tests.chaos.runs import STEPS, STEPS_PER_EPOCH, SUPERVISED, Outcome, run_command, train
from tests.messages import says
from tests.models import another_builtin_model, builtin_reward_model

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(3000)]
MOMENTS = ("idle", "generating", "scoring", "updating", "syncing", "saving")
ROLES = ("driver", "actor", "rollout", "ref", "reward")
SIGNALS = ("SIGKILL", "SIGSTOP")
# Of the commands that train one model; it is validated and saved at every step.
TRAINING_MOMENTS = ("idle", "updating", "validating", "saving")
ADAPTER = ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=false")
FRAIL = ("actor_rollout_ref.rollout.agent.default_agent_loop=tests/chaos/frail.py:Frail",)
PPO = ("recipe=ppo", "algorithm.adv_estimator=gae", "trainer.critic_warmup=1")


def check(outcome: Outcome, undisturbed: Outcome, faults: list[Fault]) -> None:
    assert [hit["fault"] for hit in outcome.hits] == [asdict(fault) for fault in faults], outcome.log[-6000:]
    for hit in outcome.hits:
        assert hit["fault"]["moment"] in (hit["during"], "idle", "scoring"), f"it came too late: {hit}"
    assert outcome.rewards() == undisturbed.rewards()
    for name in ("reward_model/loss", "val/reward_model/accuracy", "sft/loss", "val/sft/loss"):
        assert outcome.curve(name) == undisturbed.curve(name)
    assert outcome.weights == undisturbed.weights


@pytest.mark.deep
def test_a_run_survives_faults_of_several_roles(main_run: Outcome, tmp_path: Path) -> None:
    """And is told what happened: which role, which stage. The driver is pre-empted in the last step of an epoch, saves
    on SIGTERM and loses nothing. Steps with faults are profiled, and again when they are done again.
    """
    faults = [
        Fault("reward", "scoring", "SIGKILL", 2),
        Fault("driver", "updating", "SIGTERM", STEPS_PER_EPOCH),
        Fault("ref", "generating", "SIGKILL", 4),
        Fault("actor", "updating", "SIGKILL", 6),
    ]
    profile = ("trainer.profile_steps=[4,6]", "trainer.stage_timeout_s.profile=300")
    outcome = train(tmp_path / "run", faults, "trainer.save_freq=100", *profile)
    check(outcome, main_run, faults)
    says(outcome.log.splitlines(), "trainer.profile_steps", "ref rank 0", "step 4", "replaced")
    for step in (4, 6):
        files = sorted(path.name for path in (outcome.run_dir / f"profiles/step_{step}").iterdir())
        roles = ("actor_rank0", "actor_rank1", "ray", "ref_rank0", "rollout_rank0")
        assert files == [f"{name}.json.gz" for name in roles], "of the last time"
    # the reward process may be writing the step before when it is lost
    for role, stages in (("reward", ("score", "write_samples")), ("ref", ("ref_log_prob",)), ("actor", ("update",))):
        told = [line for line in outcome.log.splitlines() if f"{role} worker" in line]
        assert any(f"stage '{stage}'" in line for line in told for stage in stages), "\n".join(told)
    assert outcome.lives == 2
    says(outcome.log, f"resumed from {outcome.run_dir}/global_step_{STEPS_PER_EPOCH}")
    assert [row["step"] for row in outcome.metrics()] == list(range(STEPS + 1)), "each step once"


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    rows = [
        "| role | signal | hit while | ends as undisturbed | seconds | starts of the run |",
        "|---|---|---|---|---|---|",
    ]
    yield rows
    sys.stdout.write("\n" + "\n".join(rows) + "\n")


@pytest.fixture(scope="module")
def scored_by_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[str]]:
    """An undisturbed run with a reward model, and its overrides."""
    folder = tmp_path_factory.mktemp("scored")
    scorer = builtin_reward_model(folder / "scorer")
    overrides = ["reward_model.enable=true", f"reward_model.model.path={scorer}"]
    return train(folder / "run", [], *overrides), overrides


@pytest.fixture(scope="module", params=("reward_model", "sft"))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, str]:
    """An undisturbed run of a command that trains one model, and its name."""
    command: str = request.param
    outcome = run_command(command, tmp_path_factory.mktemp(command) / "run", [], *SUPERVISED)
    assert len(outcome.curve(f"{command}/loss")) == STEPS
    return outcome, command


@pytest.mark.long
@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("role", ROLES)
def test_matrix(main_run: Outcome, tmp_path: Path, table: list[str], role: str, name: str) -> None:
    strike(role, name, tmp_path, table, main_run)


@pytest.mark.long
@pytest.mark.parametrize("name", SIGNALS)
def test_matrix_of_the_reward_model(
    scored_by_model: tuple[Outcome, list[str]], tmp_path: Path, table: list[str], name: str
) -> None:
    undisturbed, overrides = scored_by_model
    strike("reward_model", name, tmp_path, table, undisturbed, *overrides)


@pytest.mark.long
@pytest.mark.parametrize("name", SIGNALS)
def test_matrix_of_supervised_training(
    trained: tuple[Outcome, str], tmp_path: Path, table: list[str], name: str
) -> None:
    undisturbed, command = trained
    faults = [Fault("trained", moment, name, step) for step, moment in enumerate(TRAINING_MOMENTS, 1)]
    outcome = run_command(command, tmp_path / "run", faults, *SUPERVISED)
    judge(outcome, undisturbed, faults, table)


@pytest.fixture(scope="module")
def with_teacher(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[str]]:
    """An undisturbed run of distillation from a teacher of another size, and its overrides."""
    folder = tmp_path_factory.mktemp("taught")
    teacher = another_builtin_model(folder / "teacher")
    overrides = ["recipe=distill", "algorithm.adv_estimator=distill", f"actor_rollout_ref.ref.model.path={teacher}"]
    return train(folder / "run", [], *overrides), overrides


@pytest.mark.long
@pytest.mark.parametrize("name", SIGNALS)
def test_matrix_of_the_teacher(
    with_teacher: tuple[Outcome, list[str]], tmp_path: Path, table: list[str], name: str
) -> None:
    """Its loss is all that trains the policy; and it is loaded again, since it never changes."""
    undisturbed, overrides = with_teacher
    strike("ref", name, tmp_path, table, undisturbed, *overrides)


@pytest.fixture(scope="module")
def with_critic(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """An undisturbed run of PPO, whose policy stands still in the first step."""
    return train(tmp_path_factory.mktemp("ppo") / "run", [], *PPO)


@pytest.mark.long
@pytest.mark.parametrize("name", SIGNALS)
def test_matrix_of_the_critic(with_critic: Outcome, tmp_path: Path, table: list[str], name: str) -> None:
    """The policy's last weights depend on every value of the critic, so they also say that it is the same."""
    moments = tuple("learning" if moment == "updating" else moment for moment in MOMENTS)
    strike("critic", name, tmp_path, table, with_critic, *PPO, moments=moments)


@pytest.fixture(scope="module")
def with_adapter(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """An undisturbed run whose engines get LoRA's factors alone."""
    return train(tmp_path_factory.mktemp("lora") / "run", [], *ADAPTER)


@pytest.mark.long
@pytest.mark.parametrize("name", SIGNALS)
def test_matrix_of_an_adapter(with_adapter: Outcome, tmp_path: Path, table: list[str], name: str) -> None:
    """An engine that starts again gets the factors in force beside the base model that it loads."""
    strike("rollout", name, tmp_path, table, with_adapter, *ADAPTER)


@pytest.fixture(scope="module")
def with_failures(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """An undisturbed run in which episodes fail and are sampled again."""
    outcome = train(tmp_path_factory.mktemp("frail") / "run", [], *FRAIL)
    assert all(row["agent/failures/error"] > 0 for row in outcome.metrics() if row["step"])
    return outcome


@pytest.mark.long
@pytest.mark.parametrize("role", ["driver", "rollout"])
@pytest.mark.parametrize("name", SIGNALS)
def test_matrix_of_failing_episodes(
    with_failures: Outcome, tmp_path: Path, table: list[str], name: str, role: str
) -> None:
    """An episode's next attempt has the same seed after a resume, and on an engine that has just started."""
    strike(role, name, tmp_path, table, with_failures, *FRAIL)


@pytest.fixture(scope="module")
def retrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[str]]:
    """An undisturbed run whose reward model learns after every step, and its overrides."""
    folder = tmp_path_factory.mktemp("iterative")
    scorer = builtin_reward_model(folder / "scorer")
    overrides = ["recipe=deepseekmath_iterative", f"reward_model.model.path={scorer}", "reward_model.retrain.freq=1"]
    outcome = train(folder / "run", [], *overrides, "reward_model.retrain.optim.lr=0.001")
    assert len(outcome.curve("reward_model/loss")) == STEPS
    return outcome, [*overrides, "reward_model.retrain.optim.lr=0.001"]


@pytest.mark.long
@pytest.mark.parametrize("name", SIGNALS)
def test_matrix_of_a_retrained_reward_model(
    retrained: tuple[Outcome, list[str]], tmp_path: Path, table: list[str], name: str
) -> None:
    """Its scores are the reward, so the policy's last weights also say that its own are the same."""
    undisturbed, overrides = retrained
    moments = tuple("retraining" if moment == "updating" else moment for moment in MOMENTS)
    strike("reward_model", name, tmp_path, table, undisturbed, *overrides, moments=moments)


def strike(
    role: str,
    name: str,
    folder: Path,
    table: list[str],
    undisturbed: Outcome,
    *overrides: str,
    moments: Sequence[str] = MOMENTS,
) -> None:
    """One row of the matrix."""
    faults = [Fault(role, moment, name, step) for step, moment in enumerate(moments, 1)]
    judge(train(folder / "run", faults, *overrides), undisturbed, faults, table)


def judge(outcome: Outcome, undisturbed: Outcome, faults: list[Fault], table: list[str]) -> None:
    """Write and check a row of the matrix."""
    same = outcome.weights == undisturbed.weights and outcome.rewards() == undisturbed.rewards()
    hits = ", ".join(hit["fault"]["moment"] for hit in outcome.hits)
    starts = outcome.lives + outcome.log.count("starting all workers again")
    row = (faults[0].role, faults[0].signal, hits, "yes" if same else "NO", f"{outcome.seconds:.0f}", str(starts))
    table.append(f"| {' | '.join(row)} |")
    sys.stdout.write(f"\n{table[-1]}\n")  # at once: the whole takes long
    sys.stdout.flush()
    check(outcome, undisturbed, faults)
