"""What goes into a checkpoint comes out again: into the run that goes on, and into its trackers. Sampling ahead, and
what is finished of it, is in test_staleness.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_dist.config.load import load_config
from grpo_dist.errors import CheckpointError
from grpo_dist.trainer.checkpoint.config_changes import saved_config
from grpo_dist.trainer.checkpoint.folder import RunState, begin_checkpoint, publish_checkpoint
from grpo_dist.trainer.checkpoint.resume import restore_tracker_ids, resume, run_state, tracker_ids
from grpo_dist.workers.event_loop import run


class Recorder:
    """Remembers what it is given."""

    def __init__(self, state: dict | None = None) -> None:
        self.state, self.loaded, self.restored, self.coef, self.target_kl = state, [], {}, 0.5, None

    def state_dict(self) -> dict | None:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state

    def finished_groups(self) -> list:
        return []

    async def load_checkpoint(self, folder: str) -> None:
        self.loaded.append(folder)


async def nothing() -> None: ...


class Saver:
    """Remembers what it need not write again."""

    def resumed_from(self, folder: Path, step: int) -> None:
        self.last, self.step = folder, step


def make_run(run_dir: Path, *overrides: str, state: str = "") -> Any:
    """The parts of a trainer that a checkpoint is about."""
    config, _ = load_config([f"trainer.default_local_dir={run_dir}", *overrides])
    prompts = SimpleNamespace(sampler=Recorder({"order": state}), identity={"count": 2, "fingerprint": "ab"})
    roles = SimpleNamespace(actor=Recorder(), ref=Recorder(), reward=None)
    return SimpleNamespace(
        config=config,
        run_dir=run_dir,
        roles=roles,
        prompts=prompts,
        sampler=Recorder({"ledger": state}),
        kl_controller=Recorder(),
        code={},
        step=0,
        weight_version=-1,
        validated={"val-core/x/reward/mean@1": 0.25},
        changes=[],
        saver=Saver(),
        head=[],
        refresh_reference_head=nothing,
    )


def saved(run: Any, *, ref: bool = False) -> RunState:
    state, groups = run_state(run)
    assert groups == []
    temporary = begin_checkpoint(run.run_dir, state.step)
    (temporary / "actor").mkdir()
    (temporary / "actor/shard").write_text("x")
    if ref:
        (temporary / "ref").mkdir()
        (temporary / "ref/shard").write_text("x")
    publish_checkpoint(temporary, state, saved_config(run.config))
    return state


def test_the_state_goes_on(tmp_path: Path) -> None:
    before = make_run(tmp_path, state="middle")
    before.step, before.weight_version, before.kl_controller.coef = 4, 9, 0.75
    state = saved(before, ref=True)
    assert state.metrics == {"val-core/x/reward/mean@1": 0.25}
    (tmp_path / "global_step_9.tmp").mkdir()
    after = make_run(tmp_path)
    after.kl_controller.target_kl = 0.1
    folder = run(resume(after))
    assert folder == tmp_path / "global_step_4"
    assert after.changes == []
    assert (after.step, after.weight_version) == (4, 8), "the first sync makes it 9 again"
    assert after.prompts.sampler.state == {"order": "middle"}
    assert after.sampler.state == {"ledger": "middle"}
    assert after.kl_controller.coef == 0.75
    assert (after.saver.last, after.saver.step) == (folder, 4), "it need not be written again"
    assert after.roles.actor.loaded == [str(folder / "actor")]
    assert after.roles.ref.loaded == [str(folder / "ref")]
    assert not (tmp_path / "global_step_9.tmp").exists(), "leftovers are cleared at the start"


def test_validation_alone_leaves_alone_what_a_run_at_work_writes(tmp_path: Path) -> None:
    saved(make_run(tmp_path))
    (tmp_path / "global_step_9.tmp").mkdir()
    assert run(resume(make_run(tmp_path, "trainer.val_only=true"))) is not None
    assert (tmp_path / "global_step_9.tmp").exists()


def test_a_fixed_kl_coefficient_and_a_frozen_reference_are_the_configs(tmp_path: Path) -> None:
    before = make_run(tmp_path)
    before.kl_controller.coef = 0.75
    saved(before)
    after = make_run(tmp_path, "actor_rollout_ref.actor.kl_loss_coef=0.5")
    run(resume(after))
    assert after.kl_controller.coef == 0.5
    assert after.roles.ref.loaded == []
    assert after.changes == ["actor_rollout_ref.actor.kl_loss_coef: 0.001 -> 0.5"]


def test_a_config_that_does_not_fit_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    saved(make_run(tmp_path))
    after = make_run(tmp_path, "trainer.seed=2")
    with pytest.raises(CheckpointError, match=r"trainer\.seed: 1 -> 2"):
        run(resume(after))
    assert after.roles.actor.loaded == []
    anew = make_run(tmp_path, "trainer.seed=2", "trainer.resume_mode=disable")
    assert run(resume(anew)) is None


def test_trackers_go_on_in_their_runs_also_from_another_directory(tmp_path: Path) -> None:
    before = make_run(tmp_path / "a")
    assert tracker_ids(tmp_path / "a") == {}
    restore_tracker_ids(tmp_path / "a", {"wandb": "abc123"})
    saved(before)
    folder = tmp_path / "a/global_step_0"
    after = make_run(tmp_path / "b", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}")
    assert run(resume(after)) == folder
    assert (tmp_path / "b/wandb/run_id").read_text() == "abc123\n"
    assert tracker_ids(tmp_path / "b") == {"wandb": "abc123"}
    restore_tracker_ids(tmp_path / "c", {})
    assert not (tmp_path / "c").exists()
