"""The ratios of records, what is a regression, and what is said where there is nothing to compare."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import head, long_responses, record, regressions, rollout, update
from benchmarks.regressions import BETTER, GONE, NEW, WORSE, compare, expected, has_failed, report
from tests.messages import says

HEAD = {"machine": {"cores": 2, "load": [0.1], "torch": "2.13"}, "commit": "0123456789abcdef", "dirty": False}


@pytest.mark.parametrize(
    ("flags", "has_bf16", "kind"), [((), False, "AVX2"), ((), True, "AVX2_BF16"), (("amx_bf16",), True, "AVX2_AMX")]
)
def test_the_kind_of_processor(monkeypatch, flags, has_bf16, kind) -> None:
    monkeypatch.setattr(record.torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(record.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(record, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(record, "has_bf16", lambda: has_bf16)
    assert record.capability() == kind


def test_of_every_ratio_higher_is_better() -> None:
    heads = [{"head": head.PLAIN, "peak_mib": 1200.0, "seconds": 3.0}]
    heads += [{"head": head.CHUNKED, "peak_mib": 400.0, "seconds": 2.0}]
    assert head.ratios(heads) == {"head/time of plain logits": 1.5, "head/memory of plain logits": 3.0}
    assert head.ratios([]) == {}
    result = {"efficiency": [{"model": "m", "ratio": 0.25, "ratio to them": 0.3}], "head": heads}
    wanted = {"update/m, of a product's rate": 0.25, "update/m, of its shapes' rate": 0.3}
    assert wanted.items() <= update.ratios(result).items()
    rows = {
        "throughput": [{"model": "m", "of vllm": 0.6, "of hf": 1.1}],
        "weight_sync": [{"model": "m", "transport": "broadcast", "of a copy": 0.02}],
        "control_plane": [{"response tokens": 32, "samples a loop": 40.0}],
    }
    assert list(rollout.ratios(rows).values()) == [0.6, 1.1, 0.02, 40.0]


def test_the_growth_of_long_responses_by_hand(tmp_path: Path) -> None:
    """Four times the tokens and twice the memory: the square root, and half of what linear growth would need."""
    rows = [{"tokens": 1024, "peak MiB": 10.0}, {"tokens": 4096, "peak MiB": 20.0}]
    assert long_responses.growth(rows, "peak MiB") == [pytest.approx(0.5)]
    assert long_responses.ratios({"update": rows}) == {"long/update, linear memory of 4096 tokens": 2.0}
    config = Path(long_responses.model_with_positions(tmp_path / "model", 5000), "config.json")
    assert json.loads(config.read_text())["max_position_embeddings"] == 5000


@pytest.mark.parametrize(
    ("now", "verdict", "failed"),
    [
        ({"a": 0.7}, WORSE, True),
        ({"a": float("nan")}, WORSE, True),
        ({}, GONE, True),
        ({"a": 5.0}, BETTER, False),
        ({"a": 1.0}, "", False),
        ({"a": 1.0, "b": 0.01}, NEW, False),
    ],
)
def test_only_what_is_worse_or_gone_fails(now: dict[str, float], verdict: str, failed: bool) -> None:
    rows = compare(now, {"a": 1.0})
    assert (rows[-1][""], has_failed(rows)) == (verdict, failed)
    a_fifth = compare({"a": 0.79, "b": 0.81, "c": 80.0, "d": 2.5}, {"a": 1.0, "b": 1.0, "c": 100.0, "d": 2.0})
    changes = [(row["change"], row[""]) for row in a_fifth]
    assert changes == [("-21%", WORSE), ("-19%", ""), ("-20%", ""), ("+25%", BETTER)]


def test_a_part_is_compared_with_its_own_ratios_on_its_kind_of_processor() -> None:
    baselines = {"AVX2": {"ratios": {"head/time": 1.0, "update/x": 0.2}}, "AVX512": {"ratios": {"head/time": 3.0}}}
    assert expected("AVX2", baselines, ["head"]) == {"head/time": 1.0}
    assert expected("AVX512", baselines, ["head", "update"]) == {"head/time": 3.0}
    assert expected("AVX512_BF16", baselines, ["head"]) == {}
    text = report("AVX512", HEAD, {"head/time": 0.1}, {"AVX2": HEAD | {"ratios": {"head/time": 1.0}}}, ["head"])
    says(text, "AVX512", "AVX2", "make bench-baseline")
    assert WORSE not in text


def run(monkeypatch: pytest.MonkeyPatch, now: dict[str, float], *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["regressions", *arguments])
    monkeypatch.setattr(regressions, "measure", lambda parts: now)
    monkeypatch.setattr(record, "capability", lambda: "AVX2")
    regressions.main()


def test_the_command_writes_its_kinds_part_and_fails_for_a_regression(tmp_path, monkeypatch, capsys) -> None:
    file = tmp_path / "baseline.json"
    monkeypatch.setattr(regressions, "BASELINE", file)
    run(monkeypatch, {"head/time": 0.01})
    assert not file.exists(), "no baseline at all"
    other: dict[str, Any] = {"AVX512": HEAD | {"ratios": {"head/time": 9.0}}}
    file.write_text(json.dumps(other))
    run(monkeypatch, {"head/time": 1.0}, "--write")
    written = json.loads(file.read_text())
    assert written["AVX512"] == other["AVX512"]
    assert written["AVX2"]["ratios"] == {"head/time": 1.0}
    assert {"machine", "commit", "dirty"} < written["AVX2"].keys()
    assert {"processor", "capability", "cores", "threads", "load", "torch"} <= written["AVX2"]["machine"].keys()
    run(monkeypatch, {"head/time": 0.9})
    assert "REGRESSION" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1"):
        run(monkeypatch, {"head/time": 0.5})
    assert "REGRESSION" in capsys.readouterr().out
    assert json.loads(file.read_text()) == written


@pytest.mark.parametrize("arguments", [("--write", "head"), ("heads",)])
def test_wrong_arguments_are_refused_before_anything_is_measured(monkeypatch, arguments) -> None:
    monkeypatch.setattr(regressions, "measure", lambda parts: pytest.fail("measured"))
    monkeypatch.setattr(sys, "argv", ["regressions", *arguments])
    with pytest.raises(SystemExit, match="2"):
        regressions.main()


def test_the_committed_baselines_hold_ratios_of_the_parts() -> None:
    for kind, baseline in json.loads(regressions.BASELINE.read_text()).items():
        assert {name.partition("/")[0] for name in baseline["ratios"]} == set(regressions.PARTS), kind
        assert all(value > 0 for value in baseline["ratios"].values()), kind
