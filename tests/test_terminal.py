"""What reaches a terminal."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from grpo_dist.cli.entry import main
from grpo_dist.cli.generate import side_by_side
from grpo_dist.errors import DataError
from grpo_dist.terminal import as_typed, json_line, printable, show
from grpo_dist.tracking.base import format_samples
from grpo_dist.tracking.summary import Progress

EVIL = [
    *("\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\x08\x08", "\r", "\x7f"),
    *("\u2028", "\u202e", "\u2066", "\x00", "\ud800"),
]


@pytest.mark.parametrize("text", EVIL)
def test_control_characters_are_replaced(text: str) -> None:
    for shown in (printable(f"a{text}b"), *side_by_side([text], 80), *side_by_side([text, "b"], 80)):
        assert not set(shown) & set("\x1b\x9b\x08\r\x7f\x07\u2028\u202e\u2066\x00\ud800")
    assert printable(f"a{text}b")[:: len(printable(f"a{text}b")) - 1] == "ab"
    assert json.loads(json_line({"a": text})) == {"a": text}
    assert printable(json_line({"a": text})) == json_line({"a": text})
    assert json_line({"a": text}).count("\n") == 1


def test_text_of_people_stays_where_a_stream_has_its_letters() -> None:
    text = "tab\tand\nline, 中文\u3000空格, é, 👩\u200d🔬, \u00a0, שלום, ½"
    assert printable(text) == text
    assert json.loads(json_line(text)) == text
    assert "中文\u3000" in json_line(text)
    streams = [io.TextIOWrapper(io.BytesIO(), name) for name in ("latin-1", "ascii")]
    for stream in streams:
        show("½ é\x1b\n", stream)
    assert [stream.buffer.getvalue() for stream in streams] == [b"\xbd \xe9?\n", b"? ??\n"]  # type: ignore[attr-defined]


def test_messages_of_runs_and_errors_that_quote_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    Progress(1, 0, stream).message("the row says \x1b[2J")

    def refuse(arguments: list[str]) -> int:
        raise DataError("rows.jsonl, row 1: '\x1b[2J'")

    monkeypatch.setattr("grpo_dist.cli.help.main", refuse)
    assert main(["help"]) == 2
    sample = {"step": 1, "uid": "\x1b", "input": "\x1b", "output": "\x1b", "gts": "\x1b", "score": 1.0}
    assert "\x1b" not in stream.getvalue() + capsys.readouterr().err + format_samples([sample])


def test_a_program_is_called_by_its_name_or_else_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "of us" / "bin" / "grpo-dist"
    own.parent.mkdir(parents=True)
    own.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(own.with_name("python")))
    monkeypatch.setenv("PATH", "")
    assert as_typed("grpo-dist") == f"'{own}'"
    monkeypatch.chdir(tmp_path)
    assert as_typed("grpo-dist") == "'of us/bin/grpo-dist'"
    assert as_typed("tensorboard") == "tensorboard", "this environment has none"
    monkeypatch.setenv("PATH", str(own.parent))
    assert as_typed("grpo-dist") == "grpo-dist"
