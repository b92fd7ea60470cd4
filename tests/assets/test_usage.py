"""How a model is to be asked, beside the model."""

from __future__ import annotations

from pathlib import Path

from grpo_dist.assets.usage import FILE, Usage, read_usage
from grpo_dist.errors import DataError
from tests.messages import refuses


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_usage(tmp_path) == Usage()
    usage = Usage(3, "Be brief.", {"enable_thinking": False}, {"stop": ["end"]}, "ab", "cd", "bf16")
    usage.write(tmp_path)
    usage.write(tmp_path)
    assert read_usage(tmp_path) == usage
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_what_no_run_writes_is_refused(tmp_path: Path) -> None:
    for text in ('{"steps": 3}', "[]", "{"):
        (tmp_path / FILE).write_text(text)
        with refuses(DataError, tmp_path / FILE):
            read_usage(tmp_path)
