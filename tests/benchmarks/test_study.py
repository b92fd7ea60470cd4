"""Studies, the staleness map, the curriculum: what is read off, which runs are made, and that each of them is one."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import against_trl, curriculum, episodes, staleness, study
from benchmarks.against_trl import OURS, THEIRS, Run, accuracy, builtin, phases, ratios, read_metrics, steps, trl_work
from benchmarks.checkpoint_ranks import measure, write_model
from benchmarks.checkpoints import QWEN3
from benchmarks.record import table
from tests.messages import refuses
from tests.tiers import first

STUDIES = sorted((Path(study.__file__).parent / "studies").glob("*.yaml"))
SMALL: dict[str, Any] = {"budget": {"tokens": 30}, "seeds": [1, 2], "measures": {"pass@1": "val-*/mean@2"}}
SMALL |= {"tasks": {"sums": {}}, "arms": {"a": {}, "b": {}}}


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
    arms = [{seed: RESULTS[2 * i + seed - 1]["curve"] for seed in (1, 2)} for i in (1, 0)]
    assert study.paired(*arms, "pass@1", "steps", 4.0) == pytest.approx(1.0), "0.3 and 0.1 more: 0.02, of 0 and 0.02"
    assert (b["pass@1 +-"], b["steps"]) == (pytest.approx(0.0), pytest.approx(3.0))
    for one, two in ((0.2, 0.7), (0.4, 0.51)):  # the last: 0.1 and 0.01 more, but two seeds do not tell
        others = [result("b", seed, (30, value), (50, value)) for seed, value in ((1, one), (2, two))]
        assert study.summary(SMALL, [*RESULTS[:2], *others], "tokens", 30.0)[1]["pass@1 separates"] == "no"


def test_runs_that_are_there_are_not_made_again_and_one_that_fails_is(tmp_path, monkeypatch) -> None:
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


@pytest.mark.parametrize("path", first(STUDIES, STUDIES[0]), ids=lambda path: path.stem)
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
    none, tis = table = staleness.summary(results)
    assert (none["choice"], none["max_staleness"], none["seeds"], none["reward"]) == ("none", 64, 1, 0.25)
    assert math.isnan(none["+-"])
    assert (tis["reward"], tis["+-"]) == (pytest.approx(0.2), pytest.approx(0.2483, abs=1e-4))
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


# --- benchmarks that start a run: each works on a small one, and its summary is worked out by hand --------------------
@pytest.mark.long
def test_a_small_model_is_saved_and_loaded_on_every_number_of_ranks(tmp_path: Path) -> None:
    write_model(tmp_path / "model", QWEN3 | {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 4096})
    weights = (tmp_path / "model" / "model.safetensors").stat().st_size
    saves, loads = measure(tmp_path, count=2, rounds=1)
    assert [row["save"] for row in saves] == ["in the background", "waited for"]
    for row in saves:
        assert 0 < row["blocked"] <= row["whole"]
        assert row["MB"] * 1e6 == pytest.approx(3 * weights, rel=0.05)
        assert 0 < row["before"] <= row["peak"]
    assert [row["ranks"] for row in loads] == [2, 1]
    assert all(row["verify"] > 0 and row["load"] > 0 for row in loads)
    assert "waited for" in table("saves", saves)


# --- many episodes at once, by agents that raise, hang and die --------------------------------------------------------
@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["url", "play"])
def test_a_run_outlives_its_agents(way: str, tmp_path: Path) -> None:
    """200 episodes; the server is killed in the middle of the first step, and comes back after two seconds."""
    sizes = {"steps": 3, "groups": 25, "n": 8}
    episodes.play(tmp_path, way, failing=True, **sizes)
    figures = episodes.summary(tmp_path, **sizes)  # raises where a prompt is not accounted for
    assert min(figures["raised"], figures["timed out"]) > 0
    assert (figures["lost"] > 0) == (way == "url"), "attempts that were under way when the server died"


def files(folder: Path, trained: dict[int, list[int]], dropped: dict[int, int]) -> None:
    """Of a run whose groups have two episodes: by step, the prompts that trained, and how many were dropped."""
    (folder / "rollouts").mkdir()
    rows = []
    for step, prompts in trained.items():
        uids = [f"step{step}-prompt{index}-try2" for index in prompts for _ in range(2)]
        (folder / "rollouts" / f"{step}.jsonl").write_text("".join(json.dumps({"uid": uid}) + "\n" for uid in uids))
        more = {"agent/dropped_groups": float(dropped[step]), "agent/failures/timeout": 3.0} if step in dropped else {}
        rows.append({"step": step, "timing_s/step": step * 2.0, **more})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_figures_of_a_run(tmp_path: Path) -> None:
    """Prompts 1 and 4 were dropped. Steps 2 and 3 took 4 and 6 seconds for 4 episodes each."""
    files(tmp_path, {1: [0, 2], 2: [3, 5], 3: [7, 6]}, {1: 1, 2: 1})
    found = episodes.summary(tmp_path, steps=3, groups=2, n=2)
    wanted = {"seconds a step": 5.0, "median": 6.0, "episodes/s": 0.8, "dropped groups": 2}
    wanted |= {"raised": 0, "timed out": 6, "lost": 0}
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("trained", "dropped", "told"),
    [
        ({1: [0, 2], 2: [3, 5], 3: [7, 6]}, {1: 1}, "[1, 4]"),  # did not train, and one was dropped
        ({1: [0, 1], 2: [2, 3], 3: [3, 4]}, {}, "[3]"),  # trained twice
        ({1: [0, 1], 2: [2, 3]}, {}, "[1, 2]"),  # the steps that there are
        ({1: [0, 1], 2: [2], 3: [3, 4]}, {}, "step 2"),
    ],
)
def test_what_is_not_accounted_for_is_found(tmp_path, trained, dropped, told) -> None:
    files(tmp_path, trained, dropped)
    with refuses(RuntimeError, told):
        episodes.summary(tmp_path, steps=3, groups=2, n=2)


# --- against TRL -----------------------------------------------------------------------------------------------------
def test_trl_gets_the_numbers_of_our_config() -> None:
    work = builtin()
    found = trl_work(work, [*work.overrides, "actor_rollout_ref.actor.optim.lr=3e-4", "trainer.seed=7"], bf16=True)
    wanted = {"prompts": 32, "n": 8, "response_tokens": 64, "steps": 15, "validate_every": 5, "seed": 7}
    wanted |= {"lr": 3e-4, "kl_loss_coef": 1e-3, "bf16": True, "micro_batch": 32 * 8}
    assert {key: found[key] for key in wanted} == wanted
    assert (len(found["train"]), len(found["validation"])) == (8000, 200)


def lines(seconds: list[float]) -> str:
    rows: list[dict[str, float]] = [{"step": 0, against_trl.ACCURACY: 0.25}]
    rows += [
        {"step": step, "timing_s/step": each, **{f"timing_s/{name}": each / 4 for name in against_trl.PHASES}}
        for step, each in enumerate(seconds, 1)
    ]
    rows[-1][against_trl.ACCURACY] = 0.75
    return "\n".join(map(json.dumps, rows))


def test_the_first_step_is_left_out_and_rounds_are_taken_together() -> None:
    rounds = [read_metrics(lines([99.0, *seconds])) for seconds in ((1.0, 2.0), (3.0, 4.0))]
    runs = {"fp32": {OURS: rounds, THEIRS: [Run([4.0, 6.0], {"0": 0.25}), Run([5.0, 5.0], {"0": 0.25})]}}
    ours, theirs = steps(runs)
    assert (ours["system"], ours["best s"], ours["median s"], ours["steps"]) == (OURS, 1.0, 2.5, 4)
    assert (theirs["system"], theirs["best s"], theirs["median s"]) == (THEIRS, 4.0, 5.0)
    assert ratios("builtin", runs) == {"against_trl/builtin fp32, best": 4.0, "against_trl/builtin fp32, median": 2.0}
    assert phases(runs) == [{"type": "fp32", **dict.fromkeys(against_trl.PHASES, 0.625), "step": 2.5}]
    assert accuracy(runs)[1] == {"type": "fp32", "system": OURS, "seed": 2, "step 0": 0.25, "step 3": 0.75}
