from pathlib import Path

import pytest

from grpo_dist.errors import CheckpointError
from grpo_dist.trainer.checkpoint import LATEST, RunState, find_checkpoint, read_state, save_checkpoint


def state(step: int) -> RunState:
    return RunState(step, step, {"epoch": 0, "position": step}, "model")


def write(folder: str) -> None:
    Path(folder).mkdir()
    (Path(folder) / "shard").write_text("weights")


def test_round_trip_and_keep(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        save_checkpoint(tmp_path, state(step), {"actor": write}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step_10", "global_step_4", LATEST]
    found = find_checkpoint(tmp_path, "auto", None)
    assert found == tmp_path / "global_step_10"
    assert read_state(found) == state(10)
    assert (found / "actor/shard").read_text() == "weights"


def test_keep_all(tmp_path: Path) -> None:
    for step in range(1, 5):
        save_checkpoint(tmp_path, state(step), {"actor": write}, keep=None)
    assert len(list(tmp_path.glob("global_step_*"))) == 4


def test_a_failed_save_leaves_the_last_one_whole(tmp_path: Path) -> None:
    def disk_full(folder: str) -> None:
        write(folder)
        raise OSError(28, "No space left on device")

    save_checkpoint(tmp_path, state(1), {"actor": write}, keep=None)
    with pytest.raises(CheckpointError, match="No space left"):
        save_checkpoint(tmp_path, state(2), {"actor": disk_full}, keep=None)
    assert find_checkpoint(tmp_path, "auto", None) == tmp_path / "global_step_1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step_1", LATEST]


def test_a_save_killed_midway_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "global_step_3.tmp/actor").mkdir(parents=True)
    assert find_checkpoint(tmp_path, "auto", None) is None
    save_checkpoint(tmp_path, state(3), {"actor": write}, keep=1)
    assert read_state(tmp_path / "global_step_3") == state(3)
    assert not (tmp_path / "global_step_3.tmp").exists()


def test_resume_modes(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path, "auto", None) is None
    save_checkpoint(tmp_path, state(1), {"actor": write}, keep=None)
    assert find_checkpoint(tmp_path, "disable", None) is None
    assert find_checkpoint(tmp_path, "resume_path", str(tmp_path / "global_step_1")) == tmp_path / "global_step_1"
    with pytest.raises(CheckpointError, match=r"trainer\.resume_from_path=.*nowhere.*is not a checkpoint"):
        find_checkpoint(tmp_path, "resume_path", str(tmp_path / "nowhere"))
    (tmp_path / LATEST).write_text("7")
    with pytest.raises(CheckpointError, match="global_step_7 is not a checkpoint"):
        find_checkpoint(tmp_path, "auto", None)


def test_damaged_state_is_named(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, state(1), {"actor": write}, keep=None)
    (folder / "state.json").write_text('{"step": 1')
    with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
        read_state(folder)
