"""Files of `--output`: what is refused before the work, and how they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist.cli.arguments import check_output, write_output
from grpo_dist.errors import ConfigError
from tests.messages import says


@pytest.mark.parametrize(
    ("name", "replaces", "part"),
    [("no/where.json", True, "no"), ("there.json", False, "there.json"), ("folder", True, "folder")],
)
def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, name: str, replaces: bool, part: str) -> None:
    (tmp_path / "there.json").write_text("old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError) as caught:
        check_output(str(tmp_path / name), replaces=replaces)
    says(str(caught.value), "--output", str(tmp_path / part))


def test_a_file_that_can_be_written_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there.json").write_text("old")
    check_output(str(tmp_path / "there.json"), replaces=True)
    check_output(str(tmp_path / "new.json"))
    monkeypatch.setenv("HOME", str(tmp_path))
    check_output("~/new.json")
    check_output(None)


def test_a_file_is_written_whole_or_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "there.json"
    write_output(path, "old")
    write_output(path, "new")
    assert path.read_text() == "new"

    def full(self: Path, *args: object, **kwargs: object) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError) as caught:
        write_output(path, "newer")
    says(str(caught.value), f"--output {path}")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
