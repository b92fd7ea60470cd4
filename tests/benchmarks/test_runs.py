"""Benchmarks that start a run: each works on a small one, and its summary is worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import against_trl, episodes
from benchmarks.against_trl import OURS, THEIRS, Run, accuracy, builtin, phases, ratios, read_metrics, steps, trl_work
from benchmarks.checkpoint_ranks import measure, write_model
from benchmarks.checkpoints import QWEN3
from benchmarks.record import table
from tests.messages import refuses


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
    assert figures["raised"] > 0
    assert figures["timed out"] > 0
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
    assert (found["seconds a step"], found["median"], found["episodes/s"], found["dropped groups"]) == (
        5.0,
        6.0,
        0.8,
        2,
    )
    assert (found["raised"], found["timed out"], found["lost"]) == (0, 6, 0)


@pytest.mark.parametrize(
    ("trained", "dropped", "told"),
    [
        ({1: [0, 2], 2: [3, 5], 3: [7, 6]}, {1: 1}, "[1, 4]"),  # did not train, and one was dropped
        ({1: [0, 1], 2: [2, 3], 3: [3, 4]}, {}, "[3]"),  # trained twice
        ({1: [0, 1], 2: [2, 3]}, {}, "[1, 2]"),  # the steps that there are
        ({1: [0, 1], 2: [2], 3: [3, 4]}, {}, "step 2"),
    ],
)
def test_what_is_not_accounted_for_is_found(
    tmp_path: Path, trained: dict[int, list[int]], dropped: dict[int, int], told: str
) -> None:
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
    ours = [read_metrics(lines([99.0, 1.0, 2.0])), read_metrics(lines([99.0, 3.0, 4.0]))]
    runs = {"fp32": {OURS: ours, THEIRS: [Run([4.0, 6.0], {"0": 0.25}), Run([5.0, 5.0], {"0": 0.25})]}}
    first, second = steps(runs)
    assert (first["system"], first["best s"], first["median s"], first["steps"]) == (OURS, 1.0, 2.5, 4)
    assert (second["system"], second["best s"], second["median s"]) == (THEIRS, 4.0, 5.0)
    assert ratios("builtin", runs) == {"against_trl/builtin fp32, best": 4.0, "against_trl/builtin fp32, median": 2.0}
    assert phases(runs) == [{"type": "fp32", **dict.fromkeys(against_trl.PHASES, 0.625), "step": 2.5}]
    assert accuracy(runs)[1] == {"type": "fp32", "system": OURS, "seed": 2, "step 0": 0.25, "step 3": 0.75}
