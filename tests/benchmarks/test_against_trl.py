"""That TRL is told our config's numbers, and the tables of both sides."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import against_trl
from benchmarks.against_trl import OURS, THEIRS, Run, accuracy, builtin, phases, ratios, read_metrics, steps, trl_work
from benchmarks.trl_reward import right_sum


def test_trl_gets_the_numbers_of_our_config() -> None:
    work = builtin()
    overrides = [*work.overrides, "actor_rollout_ref.actor.optim.lr=3e-4", "trainer.seed=7"]
    found = trl_work(work, overrides, bf16=True)
    assert {key: found[key] for key in ("prompts", "n", "response_tokens", "steps", "validate_every", "seed")} == {
        "prompts": 32,
        "n": 8,
        "response_tokens": 64,
        "steps": 15,
        "validate_every": 5,
        "seed": 7,
    }
    assert (found["lr"], found["kl_loss_coef"], found["bf16"]) == (3e-4, 1e-3, True)
    assert found["micro_batch"] == found["prompts"] * found["n"]
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


@pytest.mark.parametrize("dtype", ["bf16", "fp32,fp64"])
def test_types_that_cannot_be_compared_are_refused(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against_trl, "has_bf16", lambda: False)
    monkeypatch.setattr(sys, "argv", ["against_trl", "builtin", "--dtype", dtype])
    with pytest.raises(SystemExit) as caught:
        against_trl.main()
    assert caught.value.code == 2


def test_the_reward_of_both_sides_judges_the_last_number() -> None:
    texts = ["#### 1\n#### 12", "#### 12 #### 1", "12", "#### -12"]
    completions = [[{"content": text}] for text in texts]
    assert right_sum(completions, ["12"] * 4) == [1.0, 0.0, 0.0, 0.0]
