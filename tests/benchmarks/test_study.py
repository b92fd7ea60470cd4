"""Studies, the staleness map, the curriculum: what is read off, which runs are made, and that each of them is one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import curriculum, staleness, study
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


def test_what_is_read_off() -> None:
    curve = RESULTS[0]["curve"]
    assert [study.at(curve, "pass@1", "tokens", x) for x in (20, 30, 40)] == pytest.approx([0.2, 0.3, 0.4])
    assert study.at(curve, "pass@1", "steps", 2.5) == pytest.approx(0.25)
    assert math.isnan(study.at(curve, "pass@1", "tokens", 41)), "the run ended before"
    assert study.at(curve[:1], "pass@1", "tokens", 20) == 0.2, "one validation, right there"
    metrics = {"prompt_length/mean": 10.0, "response_length/mean": 30.0, "perf/total_num_tokens": 400.0}
    assert study.sampled(metrics) == 300
    assert study.sampled(metrics | {"train/sampled_tokens": 500.0}) == 500
    named = {"val-core/x/acc/mean@2": 0.5, "val-core/y/acc/mean@2": 1.0, "val-aux/x/acc/best@2/mean": 0.75}
    assert study.measured(named, {"one": "val-*/mean@2", "two": "val-*/best@2/mean"}) == {"one": 0.75, "two": 0.75}
    assert study.measured(metrics, SMALL["measures"]) == {}


def test_what_separates() -> None:
    """At 30 tokens a has 0.3 and 0.5, b 0.5 and 0.7: 0.2 more with either seed."""
    a, b = study.summary(SMALL, RESULTS, "tokens", 30.0)
    assert (a["seeds"], a["pass@1"], b["pass@1"]) == (2, pytest.approx(0.4), pytest.approx(0.6))
    assert (a["pass@1 low"], a["pass@1 high"]) == (pytest.approx(0.3), pytest.approx(0.5))
    assert (b["pass@1 less a"], b["pass@1 separates"]) == (pytest.approx(0.2), "yes")
    assert (b["pass@1 +-"], b["steps"]) == (pytest.approx(0.0), pytest.approx(3.0))
    for first, second in ((0.2, 0.7), (0.4, 0.51)):  # the last: 0.1 and 0.01 more, but two seeds do not tell
        others = [result("b", seed, (30, value), (50, value)) for seed, value in ((1, first), (2, second))]
        assert study.summary(SMALL, [*RESULTS[:2], *others], "tokens", 30.0)[1]["pass@1 separates"] == "no"


def test_runs_that_are_there_are_not_made_again_and_one_that_fails_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, fails, picture = [], {("b", 1)}, tmp_path / "study.png"

    def in_a_process(arguments: Any, cell: study.Cell, budget: Any) -> dict[str, Any] | None:
        made.append(cell[1:])
        return None if cell[1:] in fails else next(r for r in RESULTS if (r["arm"], r["seed"]) == cell[1:])

    monkeypatch.setattr(study, "_in_a_process", in_a_process)
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(SMALL))
    (tmp_path / "runs.jsonl").write_text(json.dumps(RESULTS[0]) + "\n")
    command = ["study", str(tmp_path / "study.yaml"), str(tmp_path / "runs.jsonl"), "--picture", str(picture)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit, match=r"\('sums', 'b', 1\)"):
        study.main()
    assert sorted(made) == [("a", 2), ("b", 1), ("b", 2)]
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 3
    for expected in ([("b", 1)], []):
        made.clear()
        fails.clear()
        study.main()
        assert made == expected
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_arm_is_a_run(path: Path) -> None:
    found = yaml.safe_load(path.read_text())
    assert set(found["budget"]) <= set(study.UNITS)
    study.check(found)
    with refuses(SystemExit, "odd", "algorithm.gama"):
        study.check({**found, "arms": {**found["arms"], "odd": {"algorithm.gama": 0.5}}})


# --- the staleness map, and the curriculum ---------------------------------------------------------------------------
def test_intervals_and_cells_of_the_map_by_hand(tmp_path: Path) -> None:
    """3 seeds with 0.1, 0.2, 0.3: deviation 0.1, so 4.30 * 0.1 / sqrt(3). One seed has no interval."""
    rest = {"accuracy": 0.5, "staleness": 1.5, "minutes": 1.0}
    cells = [("TIS", 4, 1, 0.1), ("TIS", 4, 2, 0.2), ("TIS", 4, 3, 0.3), ("none", 64, 1, 0.25)]
    results = [dict(zip(("choice", "max_staleness", "seed", "reward"), cell, strict=True)) | rest for cell in cells]
    first, second = table = staleness.summary(results)
    assert (first["choice"], first["max_staleness"], first["seeds"], first["reward"]) == ("none", 64, 1, 0.25)
    assert math.isnan(first["+-"])
    assert (second["reward"], second["+-"]) == (pytest.approx(0.2), pytest.approx(0.2483, abs=1e-4))
    staleness.draw(table, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_ratios_of_the_curriculum_by_hand() -> None:
    """The same prompts by either choice: the other one needs half of the tokens with every seed."""
    runs = [
        {"choice": choice, "steps": 2 * i, "equal": 0.5, "tokens": share * i}
        for i in (1, 2, 3)
        for choice, share in (("uniform", 10.0), ("curriculum", 5.0))
    ]
    found = [(row["choice"], row["tokens"], row["ratio"], row["+- ratio"]) for row in curriculum.summary(runs)]
    assert found == [("uniform", 20, 1, 0), ("curriculum", 10, 0.5, 0)]
