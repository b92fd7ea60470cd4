"""Studies: what is read off at the budget, intervals, which runs are made, and that every arm is a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import study
from tests.messages import refuses

STUDIES = sorted((Path(study.__file__).parent / "studies").glob("*.yaml"))
SMALL: dict[str, Any] = {
    "budget": {"tokens": 30},
    "seeds": [1, 2],
    "measures": {"pass@1": "val-*/mean@2"},
    "tasks": {"sums": {}},
    "arms": {"a": {}, "b": {}},
}


def result(arm: str, seed: int, *points: tuple[float, float]) -> dict[str, Any]:
    curve = [{"tokens": tokens, "steps": tokens / 10, "seconds": 1.0, "pass@1": value} for tokens, value in points]
    return {"task": "sums", "arm": arm, "seed": seed, "minutes": 1.0, "curve": curve}


RESULTS = [
    result("a", 1, (20, 0.2), (40, 0.4)),
    result("a", 2, (20, 0.4), (40, 0.6)),
    result("b", 1, (30, 0.5), (50, 0.9)),
    result("b", 2, (10, 0.5), (50, 0.9)),
]


def test_a_measure_is_read_off_between_validations() -> None:
    curve = RESULTS[0]["curve"]
    assert [study.at(curve, "pass@1", "tokens", x) for x in (20, 30, 40)] == pytest.approx([0.2, 0.3, 0.4])
    assert study.at(curve, "pass@1", "steps", 2.5) == pytest.approx(0.25)
    assert math.isnan(study.at(curve, "pass@1", "tokens", 41)), "the run ended before"
    assert study.at(curve[:1], "pass@1", "tokens", 20) == 0.2, "one validation, right there"


def test_what_separates() -> None:
    """At 30 tokens a has 0.3 and 0.5, b 0.5 and 0.7: 0.2 more with either seed."""
    a, b = study.summary(SMALL, RESULTS, "tokens", 30.0)
    assert (a["seeds"], a["pass@1"], b["pass@1"]) == (2, pytest.approx(0.4), pytest.approx(0.6))
    assert (a["pass@1 low"], a["pass@1 high"]) == (pytest.approx(0.3), pytest.approx(0.5))
    assert (b["pass@1 less a"], b["pass@1 separates"]) == (pytest.approx(0.2), "yes")
    assert (b["pass@1 +-"], b["steps"]) == (pytest.approx(0.0), pytest.approx(3.0))
    other = [*RESULTS[:2], result("b", 1, (30, 0.2), (50, 0.2)), result("b", 2, (30, 0.7), (50, 0.7))]
    assert study.summary(SMALL, other, "tokens", 30.0)[1]["pass@1 separates"] == "no"
    alike = [*RESULTS[:2], result("b", 1, (30, 0.4), (50, 0.4)), result("b", 2, (30, 0.51), (50, 0.51))]
    told = study.summary(SMALL, alike, "tokens", 30.0)[1]["pass@1 separates"]
    assert told == "no", "0.1 and 0.01 more: of one sign, but two seeds do not tell"


def test_tokens_that_were_thrown_away_count() -> None:
    metrics = {"prompt_length/mean": 10.0, "response_length/mean": 30.0, "perf/total_num_tokens": 400.0}
    assert study.sampled(metrics) == 300
    assert study.sampled(metrics | {"train/sampled_tokens": 500.0}) == 500
    named = {"val-core/x/acc/mean@2": 0.5, "val-core/y/acc/mean@2": 1.0, "val-aux/x/acc/best@2/mean": 0.75}
    assert study.measured(named, {"one": "val-*/mean@2", "two": "val-*/best@2/mean"}) == {"one": 0.75, "two": 0.75}
    assert study.measured(metrics, SMALL["measures"]) == {}


def test_runs_that_are_there_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def in_a_process(arguments: Any, cell: study.Cell, budget: Any) -> dict[str, Any]:
        made.append(cell)
        return next(r for r in RESULTS if (r["arm"], r["seed"]) == cell[1:])

    monkeypatch.setattr(study, "_in_a_process", in_a_process)
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(SMALL))
    (tmp_path / "runs.jsonl").write_text(json.dumps(RESULTS[0]) + "\n")
    picture = tmp_path / "study.png"
    arguments = ["study", str(tmp_path / "study.yaml"), str(tmp_path / "runs.jsonl"), "--picture", str(picture)]
    monkeypatch.setattr("sys.argv", arguments)
    study.main()
    assert sorted(made) == [("sums", "a", 2), ("sums", "b", 1), ("sums", "b", 2)]
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    made.clear()
    study.main()
    assert made == []


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_arm_is_a_run(path: Path) -> None:
    found = yaml.safe_load(path.read_text())
    assert set(found["budget"]) <= set(study.UNITS)
    study.check(found)
    with refuses(SystemExit, "odd", "algorithm.gama"):
        study.check({**found, "arms": {**found["arms"], "odd": {"algorithm.gama": 0.5}}})


def test_code_of_an_arm_is_tried_before_the_first_run(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text("def mine(batch, config):\n    return batch.on_tokens(batch.scores)\n")
    arms = {"wrong": {"algorithm.adv_estimator": f"{code}:mine"}}
    with refuses(SystemExit, "wrong", "algorithm.adv_estimator", "(advantages, returns)"):
        study.check({**SMALL, "arms": arms})
    with refuses(SystemExit, "misspelled", "mien", "'mine'"):
        study.check({**SMALL, "arms": {"misspelled": {"algorithm.adv_estimator": f"{code}:mien"}}})


def test_a_run_that_fails_is_told_and_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_a_process(arguments: Any, cell: study.Cell, budget: Any) -> dict[str, Any] | None:
        return None if cell[1:] == ("b", 1) else next(r for r in RESULTS if (r["arm"], r["seed"]) == cell[1:])

    monkeypatch.setattr(study, "_in_a_process", in_a_process)
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(SMALL))
    monkeypatch.setattr("sys.argv", ["study", str(tmp_path / "study.yaml"), str(tmp_path / "runs.jsonl")])
    with pytest.raises(SystemExit, match=r"\('sums', 'b', 1\)"):
        study.main()
    made = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [(r["arm"], r["seed"]) for r in made] == [("a", 1), ("a", 2), ("b", 2)]
