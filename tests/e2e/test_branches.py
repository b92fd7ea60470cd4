"""An agent with three sub-agents and a shortened history trains the built-in model: every token that it samples."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from grpo_dist.protocol import DataProto
from grpo_dist.protocol.parquet import read_parquet
from grpo_dist.tracking.jsonl import read_metrics

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 10
LOOP = """
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


@pytest.mark.parametrize(("credit", "estimator"), [("episode", "gigpo"), ("agent", "grpo")])
def test_an_agent_with_sub_agents_learns_and_all_that_it_samples_trains(
    tmp_path: Path, credit: str, estimator: str
) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(600):
        sums = rng.integers(100, 500, (6, 2)).tolist()
        rows.append({"prompt": "{}+{}=?".format(*sums[0]), "extra_info": {"sums": sums}})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "team.py").write_text(LOOP)
    agent = "actor_rollout_ref.rollout.agent"
    command = [sys.executable, "-m", "grpo_dist.main", f"algorithm.adv_estimator={estimator}"]
    command += [f"{agent}.default_agent_loop={tmp_path}/team.py:Team", f"data.train_files={tmp_path}/rows.jsonl"]
    command += [f"algorithm.credit={credit}", "data.val_files=null", f"trainer.default_local_dir={tmp_path}"]
    command += [f"trainer.total_training_steps={STEPS}", "trainer.save_freq=-1", "trainer.export_hf_model=false"]
    command += ["data.max_prompt_length=64", "data.max_response_length=400", "ray_kwargs.ray_init.address=local"]
    command += ["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["step"]]
    assert {row["agent/delivered_tokens"] for row in metrics} == {1.0}
    scores = [row["critic/score/mean"] for row in metrics]
    assert np.mean(scores[-2:]) > np.mean(scores[:2]) + 0.15, scores
    data: DataProto = read_parquet(
        tmp_path / "rollouts" / f"{STEPS}.parquet", ["responses", "predecessors", "num_turns"]
    )
    assert set(data["num_turns"].tolist()) == {6}
    for follows in data["predecessors"].rows():
        branches = (follows.numpy() != np.arange(-1, len(follows) - 1)).sum()
        assert branches >= 3, "the sub-agents and the last call"
