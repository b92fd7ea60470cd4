"""Who is on a GPU when: a whole run of real workers, whose engines write down when their tensors would be there."""

import itertools
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_dist.assets import resolve_model_path
from grpo_dist.checks.all_checks import Ready
from grpo_dist.config.schema import RunConfig
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.placement import Placement, slots
from grpo_dist.plan.roles import ROLES
from grpo_dist.run import build
from grpo_dist.trainer.preemption import Preemption
from grpo_dist.trainer.run_prompts import load_run_prompts
from tests.models import builtin_reward_model, policy_folder
from tests.run import ledger

pytestmark = [pytest.mark.ray, pytest.mark.deep, pytest.mark.timeout(300)]

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
AWAKE = "rollout:awake"
IN_TURNS = (
    *("trainer.n_gpus_per_node=1", "cluster.colocate=all", f"{ROLLOUT}.free_cache_engine=true"),
    *(f"{section}.fsdp_config.param_offload=true" for section in (ACTOR, REF, "critic.model", "reward_model.model")),
    f"{ACTOR}.fsdp_config.optimizer_offload=true",
    f"{ROLLOUT}.checkpoint_engine.backend=object_store",  # the others need a GPU
    *("data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=2", f"{ROLLOUT}.n=2", "data.val_max_samples=4"),
    *("trainer.test_freq=1", "trainer.save_freq=1", "trainer.health.agreement.action=off", "trainer.logger=[]"),
    f"{ROLLOUT}.name={ledger.__file__}:EngineOnLedger",
)
EVERY_ROLE = (
    *("recipe=deepseekmath_iterative", "reward_model.retrain.freq=1", "reward_model.retrain.train_batch_size=4"),
    "algorithm.adv_estimator=gae",
)


def in_turns(folder: Path, *overrides: str) -> RunConfig:
    """The config of a run whose model's path tells every process where the ledger is."""
    paths = (f"actor_rollout_ref.model.path={folder}/model", f"trainer.default_local_dir={folder}/run")
    return load_config([*IN_TURNS, "cluster.num_cpus_per_worker=0.01", *paths, *overrides])[0]


def train(config: RunConfig) -> None:
    """The training loop from the start of its processes to their end; it goes on where there is a checkpoint."""
    ready = Ready(load_run_prompts(config, policy_folder(config))[0], config.trainer.total_training_steps, [])
    with ExitStack() as stack:
        build.start_run(config, Path(config.trainer.default_local_dir), stack, Preemption(), ready).fit()


def intervals(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """By what was on the GPU: from when to when; what was there to the end of a run ends with its last line."""
    found: dict[str, list[tuple[float, float]]] = {}
    begun: dict[str, float] = {}
    lines = [line.split() for line in (folder / ledger.LEDGER).read_text().splitlines()]
    for seconds, what, state in sorted((float(at), what, state) for at, what, state in lines):
        if state == "begins":
            assert what not in begun, f"{what} is there already"
            begun[what] = seconds
        else:
            found.setdefault(what, []).append((begun.pop(what), seconds))
    for what, start in begun.items():
        found.setdefault(what, []).append((start, float(lines[-1][0])))
    return found


def together(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The times at which both are there."""
    shared = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return [(start, end) for start, end in shared if start < end]


@pytest.fixture(scope="module", autouse=True)
def on_ledger(local_ray: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for role, worker in ledger.WORKERS.items():
            patch.setitem(ROLES, role, replace(ROLES[role], worker=f"{worker.__module__}:{worker.__name__}"))
        patch.setattr(Placement, "num_gpus", lambda *_: 0.0)
        patch.setattr(build, "slots", lambda config: [replace(slot, num_gpus=0.0) for slot in slots(config)])
        yield


def new_run(folder: Path) -> Path:
    """A folder with a policy, and with a reward model."""
    builtin_reward_model(folder / "scorer", template=None)
    shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), folder / "model")
    return folder


def train_every_role(folder: Path, *overrides: str, steps: int) -> None:
    scorer = f"reward_model.model.path={folder}/scorer"
    train(in_turns(folder, *EVERY_ROLE, scorer, f"trainer.total_training_steps={steps}", *overrides))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps in turns, and one that goes on from there."""
    folder = new_run(tmp_path_factory.mktemp("turns"))
    for steps in (2, 3):
        train_every_role(folder, steps=steps)
    return folder


def test_roles_and_engines_that_take_turns_never_meet(folder: Path) -> None:
    there = intervals(folder)
    roles = ("actor", "ref", "critic", "reward_model")
    meet = {(one, other): together(there[one], there[other]) for one, other in itertools.combinations(there, 2)}
    met = {pair for pair, times in meet.items() if times and pair[0].partition(":")[0] != pair[1].partition(":")[0]}
    scores = {frozenset({AWAKE, f"reward_model:{what}"}) for what in ("weights", "pass")}
    assert {frozenset(pair) for pair in met} <= scores
    assert len(there[AWAKE]) == 2 * 1 + 3 + 2, "from a start to the first sleep; from a sync to the next update"
    assert {what.partition(":")[0] for what in there if what.endswith(":update")} == {"actor", "critic", "reward_model"}
    assert {what.partition(":")[0] for what in there if what.endswith(":pass")} == set(roles)


@pytest.mark.long
@pytest.mark.parametrize("colocate", ["actor_ref", "separate"])
def test_engines_with_gpus_of_their_own_stay_awake(colocate: str, tmp_path: Path) -> None:
    """And the roles that share the others compute one after the other."""
    gpus = {"actor_ref": 2, "separate": 5}[colocate]
    placed = (f"cluster.colocate={colocate}", f"trainer.n_gpus_per_node={gpus}", "cluster.actor_world_size=1")
    train_every_role(new_run(tmp_path), *placed, steps=1)
    there = intervals(tmp_path)
    assert len(there[AWAKE]) == 1
    computes = {what: times for what, times in there.items() if what.endswith((":pass", ":update"))}
    assert len(computes) == 7
    meet = [pair for pair in itertools.combinations(computes, 2) if together(*(computes[what] for what in pair))]
    assert colocate == "separate" or meet == []
