"""Faults against a run on real workers: it ends as if nothing had happened. `make chaos` plays the whole matrix."""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.chaos.driver import Fault
from tests.chaos.runs import SETTINGS, STEPS, STEPS_PER_EPOCH, SUPERVISED, Outcome, run_command, train
from tests.messages import says
from tests.models import another_builtin_model, builtin_reward_model

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(3000)]
MOMENTS = ("idle", "generating", "scoring", "updating", "syncing", "saving")
# Of the commands that train one model; it is validated and saved at every step.
TRAINING_MOMENTS = ("idle", "updating", "validating", "saving")


@dataclass(frozen=True)
class Kind:
    """A kind of run: the roles that faults hit, what makes it so, and a metric that is above 0 in each step."""

    roles: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    moments: tuple[str, ...] = MOMENTS
    metric: str = ""
    command: str = "main"


def instead_of_updating(moment: str) -> tuple[str, ...]:
    return tuple(moment if each == "updating" else each for each in MOMENTS)


TAUGHT = ("recipe=distill", "algorithm.adv_estimator=distill", "actor_rollout_ref.ref.model.path={teacher}")
RETRAINED = ("recipe=deepseekmath_iterative", "reward_model.retrain.freq=1", "reward_model.retrain.optim.lr=0.001")
SCORER = "reward_model.model.path={scorer}"
KINDS = {
    "plain": Kind(("driver", "actor", "rollout", "ref", "reward")),
    "scored": Kind(("reward_model",), ("reward_model.enable=true", SCORER)),
    # the teacher's loss is all that trains the policy; and it is loaded again, since it never changes
    "taught": Kind(("ref",), TAUGHT),
    # the policy stands still in the first step; then its weights depend on every value of the critic
    "ppo": Kind(
        ("critic",),
        ("recipe=ppo", "algorithm.adv_estimator=gae", "trainer.critic_warmup=1"),
        instead_of_updating("learning"),
    ),
    # an engine that starts again gets the factors in force beside the base model that it loads
    "adapter": Kind(("rollout",), ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=false")),
    # an episode's next attempt has the same seed after a resume, and on an engine that has just started
    "frail": Kind(
        ("driver", "rollout"),
        ("actor_rollout_ref.rollout.agent.default_agent_loop=tests/chaos/frail.py:Frail",),
        metric="agent/failures/error",
    ),
    # its scores are the reward, so the policy's last weights also say that its own are the same
    "retrained": Kind(
        ("reward_model",), (*RETRAINED, SCORER), instead_of_updating("retraining"), metric="reward_model/loss"
    ),
    **{name: Kind(("trained",), (), TRAINING_MOMENTS, f"{name}/loss", name) for name in ("reward_model", "sft")},
}


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
    """And says which; the driver, pre-empted in the last step of an epoch, loses nothing; profiles are made again."""
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
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[str]]:
    """A run of a kind in which nothing happens, and its overrides."""
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp(request.param)
    models = {"scorer": builtin_reward_model(folder / "scorer"), "teacher": another_builtin_model(folder / "teacher")}
    settings = SETTINGS if kind.command == "main" else SUPERVISED
    overrides = [*settings, *(each.format(**models) for each in kind.overrides)]
    if request.param == "plain":
        return request.getfixturevalue("main_run"), overrides
    outcome = run_command(kind.command, folder / "run", [], *overrides)
    above_0 = [step for step, value in outcome.curve(kind.metric) if step and value > 0]
    assert not kind.metric or above_0 == list(range(1, STEPS + 1))
    return outcome, overrides


@pytest.mark.long
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize(
    ("undisturbed", "role"),
    [(name, role) for name, kind in KINDS.items() for role in kind.roles],
    indirect=["undisturbed"],
    scope="module",
)
def test_matrix(
    undisturbed: tuple[Outcome, list[str]],
    tmp_path: Path,
    table: list[str],
    role: str,
    name: str,
    request: pytest.FixtureRequest,
) -> None:
    expected, overrides = undisturbed
    kind = KINDS[request.node.callspec.params["undisturbed"]]
    faults = [Fault(role, moment, name, step) for step, moment in enumerate(kind.moments, 1)]
    outcome = run_command(kind.command, tmp_path / "run", faults, *overrides)
    same = outcome.weights == expected.weights and outcome.rewards() == expected.rewards()
    hits = ", ".join(hit["fault"]["moment"] for hit in outcome.hits)
    starts = outcome.lives + outcome.log.count("starting all workers again")
    row = (role, name, hits, "yes" if same else "NO", f"{outcome.seconds:.0f}", str(starts))
    table.append(f"| {' | '.join(row)} |")
    sys.stdout.write(f"\n{table[-1]}\n")  # at once: the whole takes long
    sys.stdout.flush()
    check(outcome, expected, faults)
