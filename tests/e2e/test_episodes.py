"""Runs whose episodes bring their rewards, and fail now and then, from the command to the files that they leave."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.tracking.jsonl import read_metrics
from tests.messages import says

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
GAME = """
from grpo_dist.agents import AgentLoop


class Game(AgentLoop):
    gives_reward = True

    def __init__(self, broken=(), flaky=()):
        self.broken, self.flaky = broken, flaky

    async def run(self, episode):
        turn = await episode.generate(max_tokens=3)
        index = episode.row.extra_info["index"]
        if index in self.broken or (index in self.flaky and not episode.first_failure):
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


def test_failed_episodes_cost_their_groups_and_no_more(tmp_path: Path) -> None:
    """Rows without ground truth and data source. Of the 4 prompts of step 1 one fails, and row 4 takes its place."""
    done = play(tmp_path, "{broken: [1, 6], flaky: [3]}")
    assert done.returncode == 0, done.stderr[-3000:]
    says(done.stdout + done.stderr, "OSError", "game.py")
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["step"]]
    assert [row["agent/failures/error"] for row in rows[:2]] == [3.0, 1.0]  # row 3's two episodes, and 1's or 6's
    assert [row["agent/dropped_groups"] for row in rows[:2]] == [1.0, 1.0]
    assert rows[0]["critic/score/mean"] == 0.5
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


def test_too_many_failures_end_the_run_with_the_first_ones_reason(tmp_path: Path) -> None:
    key = "actor_rollout_ref.rollout.agent.max_failure_rate"
    done = play(tmp_path, "{broken: [2]}", f"{key}=0")
    assert done.returncode == 1
    says(done.stderr, f"{key}=0", "OSError", "game.py", "Game")
