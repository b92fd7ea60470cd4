"""Checkpoints on disk: published whole or not at all, found whole or not at all, kept as asked for."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from grpo_dist.engines.train.durable_files import FileDigest
from grpo_dist.errors import CheckpointError
from grpo_dist.trainer.checkpoint import folder as module
from grpo_dist.trainer.checkpoint.folder import (
    LATEST,
    RunState,
    begin_checkpoint,
    best_checkpoint,
    checkpoints,
    clear_leftovers,
    find_checkpoint,
    prune_checkpoints,
    publish_checkpoint,
    read_state,
)
from grpo_dist.trainer.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from tests.messages import refuses, says
from tests.tiers import covering
from tests.trainer.checkpoints import names, run_state, save

FILES = ["actor/__0_0.distcp", "actor/.metadata", "state.json", "config.yaml", "manifest.json"]


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def emptied(path: Path) -> None:
    path.write_bytes(b"")


DAMAGE: list[Callable[[Path], None]] = [truncated, flipped, emptied, Path.unlink]


def steps(run_dir: Path) -> list[int]:
    """Of the checkpoints, by their age."""
    return [int(path.name.rpartition("_")[2]) for path in checkpoints(run_dir)]


def found(run_dir: Path) -> Path | None:
    return find_checkpoint(run_dir, "auto", None)


def test_round_trip(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        save(tmp_path, 1, 2, 3, 4)
    finally:
        os.umask(before)
    assert steps(tmp_path) == [1, 2, 3, 4], "all are kept"
    assert (tmp_path / "global_step_1").stat().st_mode & 0o777 == 0o700, "only the user may look into it"
    folder = save(tmp_path, 2, 4, 10, keep=2)
    assert names(tmp_path) == ["global_step_10", "global_step_4", LATEST]
    assert found(tmp_path) == folder == tmp_path / "global_step_10"
    assert read_state(folder) == run_state(10)
    assert RunState(1, 1, {}).ledger == {"open": {}, "backlog": []}, "a state without newer fields"
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == sorted(FILES)
    assert (folder / "actor/__0_0.distcp").read_text() == "weights" * 100
    manifest = read_manifest(folder)
    assert (manifest["step"], sorted(manifest["files"])) == (10, sorted(set(FILES) - {"manifest.json"}))


@pytest.mark.parametrize(("harm", "name"), covering(DAMAGE, FILES))
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(
    tmp_path: Path, name: str, harm: Callable[[Path], None], caplog: Any
) -> None:
    save(tmp_path, 1, 2)
    harm(tmp_path / "global_step_2" / name)
    assert found(tmp_path) == tmp_path / "global_step_1"
    says(caplog.text, f"{tmp_path}/global_step_2: {name}")
    with refuses(CheckpointError, "trainer.resume_from_path=", "global_step_2", name):
        find_checkpoint(tmp_path, "resume_path", str(tmp_path / "global_step_2"))
    harm(tmp_path / "global_step_1" / name)
    with refuses(CheckpointError, *(f"global_step_{step}: {name}" for step in (1, 2)), "trainer.resume_mode=disable"):
        found(tmp_path)


def test_a_state_that_does_not_mean_anything_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its contents are what was written, but they were written by something else."""
    folder = save(tmp_path, 1, 2)
    (folder / "state.json").write_text('{"step": 2}')
    (folder / MANIFEST).unlink()
    write_manifest(folder, 2, {})  # one that fits again
    assert found(tmp_path) == tmp_path / "global_step_1"
    says(caplog.text, "global_step_2/state.json", "damaged")


@pytest.mark.parametrize(
    ("pointer", "said"), [(None, ["missing"]), ("", ["''"]), ("two\n", ["'two'"]), ("7", ["global_step_7", "missing"])]
)
def test_without_a_pointer_the_newest_whole_one_is_found(
    tmp_path: Path, pointer: str | None, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    flipped(save(tmp_path, 1, 2, 3) / "actor/__0_0.distcp")
    if pointer is None:
        (tmp_path / LATEST).unlink()
    else:
        (tmp_path / LATEST).write_text(pointer)
    assert found(tmp_path) == tmp_path / "global_step_2"
    says(caplog.text, LATEST, *said, "global_step_3: actor/__0_0.distcp", "damaged")


def test_resume_modes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert found(tmp_path / "new") is found(tmp_path) is None
    assert save(tmp_path, 1, 2) == found(tmp_path)
    (tmp_path / LATEST).write_text("1\n")  # by hand
    first = tmp_path / "global_step_1"
    assert found(tmp_path) == find_checkpoint(tmp_path, "resume_path", str(first)) == first
    assert caplog.text == "", "a whole one says nothing"
    assert find_checkpoint(tmp_path, "disable", None) is None
    with refuses(CheckpointError, f"trainer.resume_from_path={tmp_path}/nowhere", "folder"):
        find_checkpoint(tmp_path, "resume_path", str(tmp_path / "nowhere"))
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / LATEST).write_text("7")
    with refuses(CheckpointError, "global_step_7", "missing"):  # a pointer alone is no fresh run
        found(tmp_path / "lost")


# --- writing ---------------------------------------------------------------------------------------------------------
def test_the_one_of_an_earlier_life_stays_until_its_successor_is_there(tmp_path: Path) -> None:
    weights, rename = save(tmp_path, 3, text="first") / "actor/__0_0.distcp", Path.rename

    def fails_to_publish(self: Path, target: Path) -> Path:
        if self.name == "global_step_3.tmp":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    with patch.object(Path, "rename", fails_to_publish), refuses(CheckpointError, "Input/output error"):
        save(tmp_path, 3, text="second")
    assert "first" in weights.read_text()
    save(tmp_path, 3, text="third")
    assert "third" in weights.read_text()
    assert names(tmp_path) == ["global_step_3", LATEST]


def test_leftovers_of_a_killed_run_are_cleared(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "global_step_1").rename(tmp_path / "global_step_1.old")  # stood aside when the run was killed
    for name in ("global_step_1.tmp/actor", "global_step_5.tmp", "global_step_4.removed", "global_step_2.old"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "huggingface.tmp").mkdir()
    assert found(tmp_path) == tmp_path / "global_step_2"
    clear_leftovers(tmp_path)
    assert names(tmp_path) == ["global_step_1", "global_step_2", "huggingface.tmp", LATEST]
    assert find_checkpoint(tmp_path, "resume_path", str(tmp_path / "global_step_1")) is not None
    clear_leftovers(tmp_path / "nowhere")
    (tmp_path / "global_step_2").rename(tmp_path / "global_step_2.old")
    (tmp_path / "global_step_2").symlink_to(tmp_path / "nowhere")
    clear_leftovers(tmp_path)
    assert found(tmp_path) == tmp_path / "global_step_2", "it comes back over a link that leads nowhere"


def test_a_file_that_a_worker_wrote_and_the_driver_does_not_see_is_an_error(tmp_path: Path) -> None:
    temporary = begin_checkpoint(tmp_path, 1)
    with refuses(CheckpointError, "actor/__3_0.distcp", "driver"):
        publish_checkpoint(temporary, run_state(1), "", {"actor/__3_0.distcp": FileDigest(1, "")})


def test_a_disk_that_is_full_or_turns_read_only_costs_only_the_new_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    key, read_only = f"trainer.default_local_dir={tmp_path}", OSError(errno.EROFS, "Read-only file system")
    told = ["Read-only", key]
    with patch.object(Path, "mkdir", side_effect=read_only):
        with refuses(CheckpointError, "write", "global_step_2.tmp", *told):
            save(tmp_path, 2)
    with patch.object(module, "flush_tree", side_effect=read_only):
        with refuses(CheckpointError, f"{tmp_path}/global_step_2", "disk space", "writable", *told):
            save(tmp_path, 2)
    assert names(tmp_path) == ["global_step_1", LATEST]
    assert found(tmp_path) == tmp_path / "global_step_1"
    (tmp_path / "global_step_2.tmp").mkdir()
    with patch.object(module, "delete", side_effect=read_only):
        with refuses(CheckpointError, key, tmp_path / "global_step_2.tmp"):
            clear_leftovers(tmp_path)


# --- keeping ---------------------------------------------------------------------------------------------------------
def test_the_best_is_kept_besides_the_newest(tmp_path: Path) -> None:
    """By a look at the disk: each save here knows nothing of those before."""
    kept = []
    values = ({"acc": 0.2}, {"acc": 0.9}, {"acc": 0.4}, {"acc": float("nan")}, {}, {"acc": 0.9})
    for step, metrics in enumerate(values, 1):
        save(tmp_path, step, keep=2, best="acc", **metrics)
        kept.append(steps(tmp_path))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6]]
    assert best_checkpoint(checkpoints(tmp_path), "acc") == tmp_path / "global_step_2", "the first with that value"
    assert best_checkpoint(checkpoints(tmp_path), "other") is None


def test_newest_means_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that starts anew in its folder, or whose clock is set back, must not lose its new ones to the old ones."""
    save(tmp_path, 50, 100, 2, 4, keep=2)
    assert steps(tmp_path) == [2, 4]
    monkeypatch.setattr("grpo_dist.trainer.checkpoint.manifest.time.time", lambda: 1e9)
    for step in (5, 6):
        assert save(tmp_path, step, keep=2) == found(tmp_path)
    assert steps(tmp_path) == [5, 6]


def test_a_damaged_one_is_not_replaced_by_a_later_step_of_a_life_that_was_given_up(tmp_path: Path) -> None:
    """Steps 3 and 4 were left behind when the pointer was set to 1; step 2 is the new life's."""
    truncated(save(tmp_path, 1, 3, 4, 2) / "actor/__0_0.distcp")
    assert found(tmp_path) == tmp_path / "global_step_1"


def test_a_damaged_checkpoint_does_not_count_and_is_left_to_a_person(tmp_path: Path) -> None:
    truncated(save(tmp_path, 1, 2, 3) / "actor/__0_0.distcp")
    assert prune_checkpoints(tmp_path, 1) == [tmp_path / "global_step_2"]
    assert names(tmp_path) == ["global_step_2", "global_step_3", LATEST]


def a_link(path: Path) -> Path:
    """A checkpoint that was moved to a larger disk, with a link in its place; returns where it is now."""
    elsewhere = path.parent.parent / "larger disk" / path.name
    elsewhere.parent.mkdir(exist_ok=True)
    path.rename(elsewhere) if path.exists() else elsewhere.mkdir()
    path.symlink_to(elsewhere)
    return elsewhere


def a_link_that_leads_nowhere(path: Path) -> Path:
    elsewhere = a_link(path)
    shutil.rmtree(elsewhere)
    return elsewhere.parent


def a_file(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.touch()
    return path.parent


@pytest.mark.parametrize("put", [a_link, a_link_that_leads_nowhere, a_file])
def test_what_is_in_the_place_of_a_checkpoint_hinders_nothing(tmp_path: Path, put: Callable[[Path], Path]) -> None:
    """Links are removed and what they lead to stays."""
    run_dir = tmp_path / "run"
    save(run_dir, 1, 2, 3)
    stays = [put(run_dir / "global_step_1")]
    assert [path.name for path in prune_checkpoints(run_dir, 2)] == ["global_step_2", "global_step_3"]
    clear_leftovers(run_dir)
    stays += [put(run_dir / f"global_step_{name}") for name in ("2.removed", "2.tmp", "3.old")]
    clear_leftovers(run_dir)
    assert [path.name for path in run_dir.iterdir() if path.suffix in (".removed", ".tmp", ".old")] == []
    stays += [put(run_dir / f"global_step_4{suffix}") for suffix in ("", ".tmp", ".old", ".removed")]
    assert save(run_dir, 4) == found(run_dir)
    assert all(path.exists() for path in stays)
    assert save(run_dir, 5, keep=1) == found(run_dir)


@pytest.mark.deep
def test_a_kill_at_any_moment_loses_no_checkpoint(tmp_path: Path) -> None:
    """kill -9 while a checkpoint is written; the process itself looks at what is left after each kill."""
    rounds, module = 50, "tests.trainer.save_until_killed"
    command = [sys.executable, "-W", "ignore", "-m", module, str(tmp_path), str(rounds)]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=root, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["newest"] > rounds // 5, "they did get somewhere"
    assert result["midway"] > rounds // 5, "and many were killed while they wrote"
