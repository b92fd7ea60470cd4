"""The form that all records share, and the ratios that the benchmarks put into it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import head, long_responses, record, rollout, update


def test_a_record_says_where_it_is_from_and_holds_tables_and_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "-m", "benchmarks.update", "--output", "a b.json"])
    file = tmp_path / "new" / "record.json"
    record.write(file, record.begun() | {"table": [{"x": 1}]}, {"update/x": 2.5})
    written = json.loads(file.read_text())
    assert set(written) == {"machine", "commit", "dirty", "command", "table", "ratios"}
    assert written["command"] == "python -m benchmarks.update --output 'a b.json'"
    assert written["ratios"] == {"update/x": 2.5}
    assert {"processor", "capability", "cores", "threads", "load", "torch"} <= written["machine"].keys()


def test_commit_and_changes_are_gits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()

    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    found = record.begun()
    assert (found["commit"], found["dirty"]) == (None, None)  # no checkout
    git("init", "--quiet")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "--quiet", "-m", "one")
    found = record.begun()
    assert (found["commit"], found["dirty"]) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "file").write_text("two")
    assert record.begun()["dirty"] is True


@pytest.mark.parametrize(
    ("flags", "has_bf16", "kind"), [((), False, "AVX2"), ((), True, "AVX2_BF16"), (("amx_bf16",), True, "AVX2_AMX")]
)
def test_the_kind_of_processor(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], has_bf16: bool, kind: str
) -> None:
    monkeypatch.setattr(record.torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(record.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(record, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(record, "has_bf16", lambda: has_bf16)
    assert record.capability() == kind


def test_of_every_ratio_higher_is_better() -> None:
    heads = [
        {"head": head.PLAIN, "peak_mib": 1200.0, "seconds": 3.0},
        {"head": head.CHUNKED, "peak_mib": 400.0, "seconds": 2.0},
    ]
    assert head.ratios(heads) == {"head/time of plain logits": 1.5, "head/memory of plain logits": 3.0}
    assert head.ratios([]) == {}
    result = {"efficiency": [{"model": "m", "ratio": 0.25, "ratio to them": 0.3}], "head": heads}
    assert update.ratios(result)["update/m, of a product's rate"] == 0.25
    assert update.ratios(result)["update/m, of its shapes' rate"] == 0.3
    rows = {
        "throughput": [{"model": "m", "of vllm": 0.6, "of hf": 1.1}],
        "weight_sync": [{"model": "m", "transport": "broadcast", "of a copy": 0.02}],
        "control_plane": [{"response tokens": 32, "samples a loop": 40.0}],
    }
    assert list(rollout.ratios(rows).values()) == [0.6, 1.1, 0.02, 40.0]
    assert {name.partition("/")[0] for name in rollout.ratios(rows)} == {"rollout", "weight_sync", "control_plane"}


def test_the_growth_of_long_responses_by_hand(tmp_path: Path) -> None:
    """Four times the tokens and twice the memory: the square root, and half of what linear growth would need."""
    rows = [{"tokens": 1024, "peak MiB": 10.0}, {"tokens": 4096, "peak MiB": 20.0}]
    assert long_responses.growth(rows, "peak MiB") == [pytest.approx(0.5)]
    assert long_responses.ratios({"update": rows}) == {"long/update, linear memory of 4096 tokens": 2.0}
    config = Path(long_responses.model_with_positions(tmp_path / "model", 5000), "config.json")
    assert json.loads(config.read_text())["max_position_embeddings"] == 5000
