"""Runs whose episodes bring their rewards, fail now and then, or branch: from the command to the files they leave."""

import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from grpo_dist.cli.replay import UPDATE_METRICS, first_difference, reupdate
from grpo_dist.protocol.parquet import read_parquet
from grpo_dist.runs import read_recorded
from tests.e2e.runs import AGENT, PLAIN, command, rollouts, sized, steps, train, write_rows
from tests.messages import says

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

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


def play(folder: Path, arguments: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    (folder / "game.py").write_text(GAME)
    run = [
        f"actor_rollout_ref.rollout.name={ROOT}/tests/engines/fakes.py:FakeRolloutEngine",
        "trainer.health.agreement.action=off",  # that engine's log-probs are made up
        *(f"{AGENT}.default_agent_loop={folder}/game.py:Game", f"{AGENT}.agent_kwargs={arguments}"),
        *(*PLAIN, *sized(4, n=2), "data.shuffle=false", "trainer.total_training_steps=3"),
        write_rows(folder / "rows.jsonl", [{"prompt": f"game {i}", "extra_info": {"index": i}} for i in range(16)]),
    ]
    return subprocess.run(command(folder, *run, *overrides), capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.deep
def test_failed_episodes_cost_what_they_must_and_no_more(tmp_path: Path) -> None:
    """Of groups of 3, 2 must be left. Of step 1 row 1 fails, row 4 takes its place, and row 2 trains without one."""
    sizes = ["actor_rollout_ref.rollout.n=3", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    done = play(tmp_path, "{broken: [1, 6], flaky: [3], lame: [2]}", *sizes, "algorithm.min_group_size=2")
    assert done.returncode == 0, done.stderr[-3000:]
    says(done.stdout + done.stderr, "OSError", "game.py")
    rows = steps(tmp_path)
    # rows 3 and 2 have 3 failed attempts each; two episodes of rows 1 and 6 have 3 each, and the third up to 2
    assert 12 <= rows[0]["agent/failures/error"] <= 14
    assert 6 <= rows[1]["agent/failures/error"] <= 8
    assert [row["agent/dropped_groups"] for row in rows[:2]] == [1.0, 1.0]
    assert [row.get("agent/missing_episodes", 0) for row in rows] == [1.0, 0, 0]
    assert rows[0]["critic/score/mean"] == (0 + 2 + 3 * (0 + 1 + 2)) / 11
    assert rows[0]["reward_extra/moves/mean"] == 3
    trained = [Counter(row["uid"].split("-", 1)[1] for row in rollouts(tmp_path, step)) for step in (1, 2, 3)]
    assert trained[0] == {"prompt0": 3, "prompt2": 2, "prompt3": 3, "prompt4-try2": 3}
    assert [sorted(int(uid.split("-")[0].removeprefix("prompt")) for uid in step) for step in trained[1:]] == [
        [5, 7, 8, 9],
        [10, 11, 12, 13],
    ]
    assert rollouts(tmp_path, 1)[0]["parts"][1] == ["environment", " over"]
    recorded = read_recorded(tmp_path, 1)
    had = {name: recorded.metrics[name] for name in UPDATE_METRICS if name in recorded.metrics}
    assert first_difference(had, reupdate(recorded)[1], 1e-4) is None


STEPS = 10
TEAM = """
import asyncio
import re

from openai import AsyncOpenAI

from grpo_dist.agents import AgentLoop


class Team(AgentLoop):
    gives_reward = True

    async def run(self, episode):
        sums, right = episode.row.extra_info["sums"], {}

        async def ask(messages, total, agent="planner"):
            its = client.with_options(base_url=endpoint.of_agent(agent).base_url)
            reply = await its.chat.completions.create(model="policy", messages=messages, max_tokens=40)
            text = reply.choices[0].message.content
            right.setdefault(agent, []).append(re.findall(r"[0-9]+", text)[-1:] == [str(total)])
            return [*messages, {"role": "assistant", "content": text}]

        def asked(i):
            return [{"role": "user", "content": "{}+{}=?".format(*sums[i])}]

        async with episode.endpoint() as endpoint:
            client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.token, max_retries=0)
            said = await ask(list(episode.row.messages), sum(sums[0]))
            await asyncio.gather(*(ask(asked(i), sum(sums[i]), f"helper{i}") for i in (1, 2, 3)))
            await ask(said + asked(4), sum(sums[4]))
            await ask(asked(5), sum(sums[5]))  # what was said is forgotten
        episode.reward = sum(map(sum, right.values())) / 6
        for name, answers in right.items():
            episode.add_step_reward(sum(answers) / len(answers), agent_name=name)
"""


@pytest.mark.long
@pytest.mark.parametrize(("credit", "estimator"), [("episode", "gigpo"), ("agent", "grpo")])
def test_an_agent_with_sub_agents_learns_by_all_that_it_samples(tmp_path: Path, credit: str, estimator: str) -> None:
    (tmp_path / "team.py").write_text(TEAM)
    drawn = np.random.default_rng(0).integers(100, 500, (600, 6, 2)).tolist()
    rows = [{"prompt": "{}+{}=?".format(*sums[0]), "extra_info": {"sums": sums}} for sums in drawn]
    metrics = train(
        tmp_path,
        *(f"algorithm.adv_estimator={estimator}", f"algorithm.credit={credit}"),
        *(f"{AGENT}.default_agent_loop={tmp_path}/team.py:Team", write_rows(tmp_path / "rows.jsonl", rows)),
        *(*PLAIN, *sized(16), f"trainer.total_training_steps={STEPS}"),
        *("data.max_prompt_length=64", "data.max_response_length=400"),
    )
    assert {row["agent/delivered_tokens"] for row in metrics} == {1.0}
    scores = [row["critic/score/mean"] for row in metrics]
    assert np.mean(scores[-2:]) > np.mean(scores[:2]) + 0.15, scores
    data = read_parquet(tmp_path / "rollouts" / f"{STEPS}.parquet", ["responses", "predecessors", "num_turns"])
    assert set(data["num_turns"].tolist()) == {6}
    for follows in data["predecessors"].rows():
        branches = (follows.numpy() != np.arange(-1, len(follows) - 1)).sum()
        assert branches >= 3, "the sub-agents and the last call"
