"""After training: the commands that use a model, on a run of the main job."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.chaos.runs import STEPS, Outcome

pytestmark = pytest.mark.ray  # the run needs it

ACCURACY = "val-core/arithmetic/acc/mean@1"


def test_eval_gives_the_figures_that_the_run_gave(main_run: Outcome) -> None:
    """The run has validated its first and its last policy; the base model is its first."""
    command = [sys.executable, "-m", "grpo_dist.eval", str(main_run.run_dir), "--base", "--json"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    base, trained = json.loads(told.stdout)
    assert [row["model"] for row in (base, trained)] == ["base builtin:tiny-qwen3", f"run step {STEPS}"]
    measured = dict(main_run.curve(ACCURACY))
    assert base["acc mean@1"][0] == pytest.approx(measured[0], abs=1e-6)
    assert trained["acc mean@1"][0] == pytest.approx(measured[STEPS], abs=1e-6)
    assert base["prompts"] == 16
