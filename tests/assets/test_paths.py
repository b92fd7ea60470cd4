"""Paths that cannot be looked at are not there; nothing raises."""

from pathlib import Path

import pytest

from grpo_dist.assets.paths import expanded, is_file, is_folder


def test_files_folders_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert is_file(tmp_path / "file")
    assert is_file("~/file")
    assert not is_folder("~/file")
    assert is_folder(str(tmp_path))
    assert not is_file(tmp_path)
    assert expanded("~/file") == tmp_path / "file"
    assert expanded("file") == Path("file")


@pytest.mark.parametrize("path", ["x" * 5000, "a\x00b", "\ud800", "~no_such_user_here/x", "/" * 5000 + "gone"])
def test_what_cannot_be_looked_at(path: str) -> None:
    assert not is_file(path)
    assert not is_folder(path)


def test_a_folder_that_may_not_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.stat", refuse)
    assert not is_file("/root/x")
    assert not is_folder("/root")
