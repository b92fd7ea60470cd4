import errno
import hashlib
import os
from pathlib import Path

import pytest

from grpo_dist.engines.train.durable_files import (
    FileDigest,
    digest_file,
    flush_path,
    flush_tree,
    free_bytes,
    publish_modes,
    require_room,
    write_durably,
)
from tests.disks import MIB, small_disk
from tests.messages import refuses


def test_a_digest_is_that_of_the_contents(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1_000_003)
    expected = FileDigest(1_000_003, hashlib.blake2b(b"x" * 1_000_003, digest_size=32).hexdigest())
    assert digest_file(path) == expected
    path.write_bytes(b"x" * 1_000_002 + b"y")
    assert digest_file(path).num_bytes == expected.num_bytes
    assert digest_file(path).blake2b != expected.blake2b
    with pytest.raises(FileNotFoundError):
        digest_file(tmp_path / "nowhere")


def test_every_file_and_folder_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    (tmp_path / "a/b").mkdir(parents=True)
    write_durably(tmp_path / "a/b/file", "text")
    assert flushed == [str(tmp_path / "a/b/file")]
    assert (tmp_path / "a/b/file").read_text() == "text"
    flushed.clear()
    flush_tree(tmp_path)
    assert sorted(flushed) == [str(tmp_path / part) for part in ("", "a", "a/b", "a/b/file")]
    flush_path(tmp_path / "a")
    assert flushed[-1] == str(tmp_path / "a")


def test_room_is_that_of_the_disk_also_for_a_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative folder is on the disk of the working directory."""
    with small_disk(tmp_path / "disk", mib=8) as disk:
        assert free_bytes(disk) == 8 * MIB
        (disk / "file").write_bytes(bytes(3 * MIB))
        monkeypatch.chdir(disk)
        for folder in (disk, disk / "run" / "huggingface", Path("outputs/run")):
            assert free_bytes(folder) == 5 * MIB
            require_room(folder, 5 * MIB)
            with refuses(OSError, f"[Errno {errno.ENOSPC}]", f"{6 / 1024:.3g} GiB", f"{5 / 1024:.3g} GiB"):
                require_room(folder, 6 * MIB)
        assert sorted(path.name for path in disk.iterdir()) == ["file"]
        monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_private_files_get_the_mode_of_new_ones(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        (tmp_path / "sub").mkdir()
        files = [tmp_path / "model.safetensors", tmp_path / "sub" / "part"]
        for file in files:
            file.touch(mode=0o600)
        publish_modes(tmp_path)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~umask}
    assert (tmp_path / "sub").stat().st_mode & 0o777 == 0o777 & ~umask
    assert len(list(tmp_path.rglob("*"))) == 3
