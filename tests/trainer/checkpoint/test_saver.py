"""Checkpoints while training goes on: begun, asked for, waited for, and given up. On roles that write when told to."""

from pathlib import Path
from typing import Any

import pytest

from grpo_dist.errors import CheckpointError, GrpoDistError, RewardError, TrainingDiverged, WorkerError
from grpo_dist.plan.commands import load_config
from grpo_dist.runtime.event_loop import run
from grpo_dist.trainer.checkpoint.folder import LATEST, find_checkpoint, own_checkpoints, read_state
from grpo_dist.trainer.checkpoint.saver import CheckpointSaver
from tests.disks import MIB, enlarge, small_disk
from tests.messages import refuses
from tests.trainer.checkpoints import Writer, names, run_state


def saved_until(saver: CheckpointSaver, step: int, error: GrpoDistError) -> None:
    """A run that begins to save a step, and fails after it."""
    with saver.completing():
        run(saver.begin(run_state(step)))
        raise error


def make_saver(run_dir: Path, *overrides: str) -> tuple[CheckpointSaver, Writer, Writer]:
    """A saver, its actor and its reference."""
    config, _ = load_config([f"trainer.default_local_dir={run_dir}", *overrides])
    actor, ref, asynchronous = Writer(), Writer(), config.actor_rollout_ref.actor.checkpoint.async_save

    def holders() -> Any:
        return {"actor": actor} | ({"ref": ref} if ref.has_moved else {})

    return CheckpointSaver(config, holders, async_save=asynchronous, reward=None), actor, ref


def save(saver: CheckpointSaver, *steps: int) -> None:
    """Begin to save each step, and wait until it is there."""
    for step in steps:
        run(saver.begin(run_state(step)))
        run(saver.finish())


def test_training_goes_on_until_all_roles_have_written(tmp_path: Path) -> None:
    saver, actor, ref = make_saver(tmp_path)
    ref.has_moved = True
    run(saver.begin(run_state(1)))
    assert names(tmp_path) == ["global_step_1.tmp"]
    actor.done = True
    run(saver.poll())
    assert names(tmp_path) == ["global_step_1.tmp"], "the reference still writes"
    ref.done = True
    run(saver.poll())
    assert names(tmp_path) == ["global_step_1", LATEST]
    assert (actor.begun, ref.begun) == (["actor"], ["ref"])
    assert actor.waits == ref.waits == 0
    assert read_state(tmp_path / "global_step_1") == run_state(1), "it has none before it"
    run(saver.poll())
    run(saver.finish())


def test_the_next_save_waits_for_the_one_before_and_older_ones_go_only_when_it_is_there(tmp_path: Path) -> None:
    saver, actor, _ = make_saver(tmp_path, "trainer.max_actor_ckpt_to_keep=1")
    run(saver.begin(run_state(1)))
    run(saver.begin(run_state(2)))
    run(saver.poll())
    assert actor.waits == 1
    assert names(tmp_path) == ["global_step_1", "global_step_2.tmp", LATEST]
    assert find_checkpoint(tmp_path, "auto", None) == tmp_path / "global_step_1"
    run(saver.finish())
    assert names(tmp_path) == ["global_step_2", LATEST]
    saver, actor, ref = make_saver(tmp_path, "actor_rollout_ref.actor.checkpoint.async_save=false")
    run(saver.begin(run_state(3)))
    run(saver.poll())
    assert "global_step_3" in names(tmp_path)
    assert (actor.waits, ref.begun) == (1, []), "a reference that has not moved is not saved"


def test_a_worker_that_cannot_write_is_told_and_nothing_is_lost(tmp_path: Path) -> None:
    saver, actor, _ = make_saver(tmp_path)
    save(saver, 1)
    run(saver.begin(run_state(2)))
    actor.error, actor.done = CheckpointError("rank 1: OSError: [Errno 28] No space left on device"), True
    key = f"trainer.default_local_dir={tmp_path}"
    with refuses(CheckpointError, f"{tmp_path}/global_step_2", "rank 1: OSError: [Errno 28]", key):
        run(saver.poll())
    assert names(tmp_path) == ["global_step_1", LATEST]
    run(saver.poll())  # there is nothing to ask for any more


def test_the_disk_is_asked_before_anything_is_written(tmp_path: Path) -> None:
    """Each role fits on it, both do not; the one before stays, and once there is room the run saves again."""
    with small_disk(tmp_path / "disk", mib=4) as run_dir:
        saver, actor, ref = make_saver(run_dir)
        save(saver, 1)
        actor.num_bytes = ref.num_bytes = 3 * MIB
        ref.has_moved = True
        needed, key = f"{6 / 1024:.3g} GiB", f"trainer.default_local_dir={run_dir}"
        with refuses(CheckpointError, f"{run_dir}/global_step_2", needed, key):
            run(saver.begin(run_state(2)))
        assert names(run_dir) == ["global_step_1", LATEST]
        assert find_checkpoint(run_dir, "auto", None) == run_dir / "global_step_1"
        assert (actor.begun, ref.begun) == (["actor"], []), "nobody has been asked to write"
        enlarge(run_dir, mib=8)
        save(saver, 2)
        assert names(run_dir) == ["global_step_1", "global_step_2", LATEST]


def test_what_was_begun_is_published_at_the_end(tmp_path: Path) -> None:
    """And the first error is the one that shows."""
    saver, actor, _ = make_saver(tmp_path)
    with saver.completing():
        run(saver.begin(run_state(1)))
    assert names(tmp_path) == ["global_step_1", LATEST]
    with pytest.raises(TrainingDiverged, match="nan"):
        saved_until(saver, 2, TrainingDiverged("nan"))
    assert "global_step_2" in names(tmp_path), "the weights before that step"
    actor.error = CheckpointError("rank 0: no space")
    with pytest.raises(TrainingDiverged, match="nan"):
        saved_until(saver, 3, TrainingDiverged("nan"))
    assert "global_step_3" not in names(tmp_path)


def test_a_worker_that_dies_stays_what_it_is_and_one_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    saver, actor, _ = make_saver(tmp_path)
    run(saver.begin(run_state(1)))
    actor.error = WorkerError("its process died", "actor", 0)
    with pytest.raises(WorkerError) as caught:
        run(saver.finish())
    assert (caught.value, names(tmp_path)) == (actor.error, [])
    actor.error, waits = None, actor.waits
    with refuses(WorkerError, "actor worker 0", "1800 s"):
        saved_until(saver, 1, WorkerError("no answer within 1800 s", "actor", 0))
    assert actor.waits == waits


def test_what_others_fail_at_meanwhile_costs_no_checkpoint(tmp_path: Path) -> None:
    """Groups are sampled and scored while one is written."""
    saver, actor, _ = make_saver(tmp_path)
    for step, error in enumerate([RewardError("service down"), WorkerError("no answer", "rollout", 1)], 1):
        with pytest.raises(type(error)):
            saved_until(saver, step, error)
        assert f"global_step_{step}" in names(tmp_path)
    actor.error = WorkerError("no answer", "actor", 1)
    actor.begin_save = lambda folder: actor.finished_save(wait=True)  # type: ignore[method-assign]
    with pytest.raises(WorkerError):
        run(saver.begin(run_state(3)))
    assert names(tmp_path) == ["global_step_1", "global_step_2", LATEST], "not all were asked for their part"


def test_the_interval_counts_from_the_last_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("grpo_dist.trainer.checkpoint.saver.time.monotonic", lambda: now)
    saver, _, _ = make_saver(tmp_path, "trainer.save_interval_minutes=2")
    never, _, _ = make_saver(tmp_path)
    now = 219.0
    assert not saver.is_due
    now = 220.0
    assert saver.is_due
    run(saver.begin(run_state(1)))
    assert saver.is_due is never.is_due is False


def test_a_checkpoint_knows_those_before_it_in_its_run(tmp_path: Path) -> None:
    """Also where the run goes on from one; not those of another run in the folder, or of steps that it has left."""

    first, second, third = (make_saver(tmp_path, "trainer.max_actor_ckpt_to_keep=null")[0] for _ in range(3))
    save(first, 1, 2, 3)
    assert list(own_checkpoints(tmp_path)) == [1, 2, 3]
    second.resumed_from(tmp_path / "global_step_2", read_state(tmp_path / "global_step_2"))
    save(second, 4)
    assert list(own_checkpoints(tmp_path)) == [1, 2, 4]
    save(third, 1)
    assert own_checkpoints(tmp_path) == {1: tmp_path / "global_step_1"}
