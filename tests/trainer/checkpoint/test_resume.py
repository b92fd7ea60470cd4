"""What goes into a checkpoint comes out again, in roles and trackers; of sampling ahead: test_staleness.py."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_dist.algorithms.controllers import AgentBaselines, EntropyController, KLController
from grpo_dist.config.schema import RunConfig
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.plan import make_plan
from grpo_dist.plan.roles import roles_of
from grpo_dist.run.build import restore_roles
from grpo_dist.tracking.base import restore_tracker_ids, tracker_ids
from grpo_dist.trainer.checkpoint.config_changes import saved_config
from grpo_dist.trainer.checkpoint.folder import LATEST, begin_checkpoint, last_checkpoint, publish_checkpoint
from grpo_dist.trainer.checkpoint.saver import Resumed, find_resumed
from grpo_dist.trainer.trainer import Controllers, GRPOTrainer
from grpo_dist.workers.gang import Gang
from grpo_dist.workers.roles import Roles
from tests.tiers import covering


class Ranks(Gang):
    """The actor or the reference: remembers what it loads."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.head_of: Any = None
        self.has_moved = False

    async def load_checkpoint(self, folder: str) -> None:
        self.loaded.append(folder)
        self.has_moved = True

    async def take_reference_head(self, ref: Any) -> None:
        self.head_of = ref


PROMPTS = {"count": 2, "fingerprint": "ab"}
ANEW = "trainer.resume_mode=disable"


def make_config(run_dir: Path, *overrides: str) -> RunConfig:
    return load_config([f"trainer.default_local_dir={run_dir}", *overrides])[0]


def resume(run_dir: Path, *overrides: str) -> Any:
    return find_resumed(make_config(run_dir, *overrides), PROMPTS)


def restored(config: RunConfig, resumed: Resumed) -> Any:
    """Roles that go on from there, with nothing of a step that was open."""
    roles = Roles({row.name: Ranks() for row in roles_of(config)})  # type: ignore[abstract]
    assert restore_roles(make_plan(config), roles, resumed) == {}
    return roles


def save(config: RunConfig, *, step: int = 4, ref: bool = False) -> Path:
    """What a trainer at that step writes, with empty shards."""
    trainer: Any = GRPOTrainer.__new__(GRPOTrainer)
    trainer.run_dir = Path(config.trainer.default_local_dir)
    trainer.data = SimpleNamespace(identity=PROMPTS)
    trainer.order = SimpleNamespace(state_dict=lambda: {"order": "middle"})
    trainer.sampler = SimpleNamespace(state_dict=lambda: {"ledger": "middle"}, finished_groups=list)
    entropy = EntropyController(0.01, target=0.2, entropy=0.5)
    trainer.controllers = Controllers(KLController(0.75, 0.1), entropy, AgentBaselines(0.95, {0: 0.5}))
    trainer.code, trainer.step, trainer.weight_version = {}, step, 9
    trainer.validated = {"val-core/x/reward/mean@1": 0.25}
    state, groups = trainer.state()
    assert groups == []
    temporary = begin_checkpoint(trainer.run_dir, state.step)
    for role in ("actor", "ref") if ref else ("actor",):
        (temporary / role).mkdir()
        (temporary / role / "shard").write_text("x")
    return publish_checkpoint(temporary, state, saved_config(config))


def test_what_went_in_comes_out(tmp_path: Path) -> None:
    folder = save(make_config(tmp_path))
    assert folder == tmp_path / "global_step_4"
    (tmp_path / "global_step_9.tmp").mkdir()
    other, line = "actor_rollout_ref.actor.kl_loss_coef=0.5", "actor_rollout_ref.actor.kl_loss_coef: 0.001 -> 0.5"
    assert resume(tmp_path, other, "trainer.resume_mode=force").changes == [line]
    resumed = resume(tmp_path)
    assert (resumed.folder, list(resumed.changes)) == (folder, [])
    state = resumed.state
    assert (state.step, state.weight_version, state.kl_coef) == (4, 9, 0.75)
    assert state.entropy == {"coef": 0.01, "entropy": 0.5}
    assert (state.sampler, state.ledger) == ({"order": "middle"}, {"ledger": "middle"})
    assert state.metrics == {"val-core/x/reward/mean@1": 0.25}
    assert not (tmp_path / "global_step_9.tmp").exists(), "leftovers are cleared at the start"


FOUR = ("recipe=ppo", "reward_model.enable=true", "reward_model.model.path=builtin:tiny-qwen3")
KL = "actor_rollout_ref.actor.kl_loss_type"


@pytest.mark.parametrize(("moved", "exact_kl"), covering([False, True], [False, True]))
def test_who_loads_what(tmp_path: Path, moved: bool, exact_kl: bool) -> None:
    """A reference that has never moved is the config's; one that has brings its output layer to the actor. Likewise a
    reward model that was never retrained.
    """
    full = ("actor_rollout_ref.actor.use_kl_loss=true", f"{KL}=full") if exact_kl else ()
    config = make_config(tmp_path, *FOUR, *full)
    folder = save(config, ref=moved)
    if moved:
        (folder / "reward_model").mkdir()
    roles = restored(config, resume(tmp_path, *FOUR, *full))
    assert [roles.actor.loaded, roles.critic.loaded] == [[str(folder / name)] for name in ("actor", "critic")]
    for role, name in ((roles.reference, "ref"), (roles.reward_model, "reward_model")):
        assert role.loaded == ([str(folder / name)] if moved else [])
    assert roles.actor.head_of is (roles.reference if moved and exact_kl else None)


def test_a_teacher_takes_the_place_of_a_reference_that_has_moved(tmp_path: Path) -> None:
    exact = ("actor_rollout_ref.actor.use_kl_loss=true", f"{KL}=full")
    save(make_config(tmp_path, *exact), ref=True)
    taught = make_config(tmp_path, *exact, "actor_rollout_ref.ref.model.path=builtin:tiny-qwen3")
    roles = restored(taught, resume(tmp_path, *exact))
    assert (roles.reference.loaded, roles.actor.head_of) == ([], None)


def test_validation_alone_leaves_alone_what_a_run_at_work_writes(tmp_path: Path) -> None:
    save(make_config(tmp_path))
    (tmp_path / "global_step_9.tmp").mkdir()
    assert resume(tmp_path, "trainer.val_only=true") is not None
    assert (tmp_path / "global_step_9.tmp").exists()
    assert resume(tmp_path, "trainer.val_only=true", ANEW) is None
    assert (tmp_path / LATEST).read_text() == "4"


def test_a_run_that_starts_anew_has_no_last_checkpoint_until_it_writes_one(tmp_path: Path) -> None:
    """Those of the run before it stay, and a run that goes on finds them again."""
    folder = save(make_config(tmp_path))
    assert resume(tmp_path, ANEW) is last_checkpoint(tmp_path) is None
    assert resume(tmp_path).folder == folder


def test_trackers_go_on_in_their_runs_also_from_another_directory(tmp_path: Path) -> None:
    assert tracker_ids(tmp_path / "a") == {}
    restore_tracker_ids(tmp_path / "a", {"wandb": "abc123"})
    folder = save(make_config(tmp_path / "a"))
    from_there = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}")
    restore_tracker_ids(tmp_path / "b", resume(tmp_path / "b", *from_there).state.trackers)
    assert (tmp_path / "b/wandb/run_id").read_text() == "abc123\n"
    assert tracker_ids(tmp_path / "b") == {"wandb": "abc123"}
    restore_tracker_ids(tmp_path / "c", {})
    assert not (tmp_path / "c").exists()
