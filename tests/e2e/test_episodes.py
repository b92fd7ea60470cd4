"""Runs whose episodes bring their rewards, and fail now and then, from the command to the files that they leave."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from grpo_dist.cli.replay import UPDATE_METRICS, first_difference, reupdate
from grpo_dist.runs import read_recorded
from grpo_dist.tracking.jsonl import read_metrics
from tests.messages import says

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.deep]

ROOT = Path(__file__).parents[2]
GAME = """
from grpo_dist.agents import AgentLoop


class Game(AgentLoop):
    gives_reward = True

    def __init__(self, broken=(), flaky=(), lame=()):
        self.broken, self.flaky, self.lame = broken, flaky, lame

    async def run(self, episode):
        turn = await episode.generate(max_tokens=3)
        index = episode.row.extra_info["index"]
        is_lame = index in self.lame and episode.index == 1
        if is_lame or index in self.broken or (index in self.flaky and not episode.attempt):
            raise OSError(f"no server for {index}")
        episode.append(" over")
        episode.reward, episode.metrics = float(episode.index), {"moves": 3}
"""
FAST = [
    f"actor_rollout_ref.rollout.name={ROOT}/tests/engines/fakes.py:FakeRolloutEngine",
    "actor_rollout_ref.rollout.n=2",
    "data.train_batch_size=4",
    "data.shuffle=false",
    "data.val_files=null",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.total_training_steps=3",
    "trainer.save_freq=-1",
    "trainer.export_hf_model=false",
    "trainer.health.agreement.action=off",  # that engine's log-probs are made up
    "ray_kwargs.ray_init.address=local",
]


def play(folder: Path, arguments: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    (folder / "game.py").write_text(GAME)
    lines = [json.dumps({"prompt": f"game {i}", "extra_info": {"index": i}}) + "\n" for i in range(16)]
    (folder / "rows.jsonl").write_text("".join(lines))
    agent = "actor_rollout_ref.rollout.agent"
    loop = [f"{agent}.default_agent_loop={folder}/game.py:Game", f"{agent}.agent_kwargs={arguments}"]
    data = [f"data.train_files={folder}/rows.jsonl"]
    run = [
        sys.executable,
        "-m",
        "grpo_dist.main",
        f"trainer.default_local_dir={folder}",
        *FAST,
        *loop,
        *data,
        *overrides,
    ]
    return subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)


def test_failed_episodes_cost_what_they_must_and_no_more(tmp_path: Path) -> None:
    """Rows without ground truth and data source, groups of 3 of which 2 must be left. Of the 4 prompts of step 1 one
    fails, and row 4 takes its place; row 2 trains with episodes 0 and 2, and row 3 with all, at their second attempt.
    What a run has recorded of such a step can be computed again.
    """
    sizes = [
        "actor_rollout_ref.rollout.n=3",
        "algorithm.min_group_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]
    done = play(tmp_path, "{broken: [1, 6], flaky: [3], lame: [2]}", *sizes)
    assert done.returncode == 0, done.stderr[-3000:]
    says(done.stdout + done.stderr, "OSError", "game.py")
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["step"]]
    # rows 3 and 2 have 3 failed attempts each; two episodes of rows 1 and 6 have 3 each, and the third up to 2
    assert 12 <= rows[0]["agent/failures/error"] <= 14
    assert 6 <= rows[1]["agent/failures/error"] <= 8
    assert [row["agent/dropped_groups"] for row in rows[:2]] == [1.0, 1.0]
    assert [row.get("agent/missing_episodes", 0) for row in rows] == [1.0, 0, 0]
    assert rows[0]["critic/score/mean"] == (0 + 2 + 3 * (0 + 1 + 2)) / 11
    assert rows[0]["reward_extra/moves/mean"] == 3
    trained = [
        [json.loads(line) for line in (tmp_path / "rollouts" / f"{step}.jsonl").read_text().splitlines()]
        for step in (1, 2, 3)
    ]
    assert [sorted({int(row["uid"].split("prompt")[1].split("-")[0]) for row in step}) for step in trained] == [
        [0, 2, 3, 4],
        [5, 7, 8, 9],
        [10, 11, 12, 13],
    ]
    assert trained[0][0]["parts"][1] == ["environment", " over"]
    assert sorted(Counter(row["uid"] for row in trained[0]).items()) == [
        ("step1-prompt0", 3), ("step1-prompt2", 2), ("step1-prompt3", 3), ("step1-prompt4-try2", 3)
    ]  # fmt: skip
    recorded = read_recorded(tmp_path, 1)
    had = {name: recorded.metrics[name] for name in UPDATE_METRICS if name in recorded.metrics}
    assert first_difference(had, reupdate(recorded)[1], 1e-4) is None


def test_too_many_failures_end_the_run_with_the_first_ones_reason(tmp_path: Path) -> None:
    key = "actor_rollout_ref.rollout.agent.max_failure_rate"
    done = play(tmp_path, "{broken: [2]}", f"{key}=0")
    assert done.returncode == 1
    says(done.stderr, f"{key}=0", "OSError", "game.py", "Game")
