from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import AgentError
from grpo_dist.protocol.fields import FIELDS
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.workers.rollout import RolloutWorker, group_batch
from grpo_dist.workers.scorer import Task
from tests.messages import says
from tests.processes import spawned
from tests.worker_settings import agent, engine_settings

PROMPT = np.array([4, 5, 6], np.int32)
RESPONSES = [Response([8, 2], [-0.5, -1.5], False, [7, 7]), Response([9, 0, 7], [-1.0, -2.0, -3.0], True, [7, 8, 8])]


def test_group_batch() -> None:
    """Every token trains, also the end and the padding id; types are those of the contract."""
    data = group_batch("p3", PROMPT, RESPONSES)
    found = {name: data[name] for name in data.columns()}
    assert {name: [row.tolist() for row in each.rows()] for name, each in found.items() if hasattr(each, "rows")} == {
        "prompts": [[4, 5, 6], [4, 5, 6]],
        "responses": [[8, 2], [9, 0, 7]],
        "response_mask": [[1, 1], [1, 1, 1]],
        "rollout_log_probs": [[-0.5, -1.5], [-1, -2, -3]],
        "weight_versions": [[7, 7], [7, 8, 8]],
    }
    assert {name: each.tolist() for name, each in found.items() if not hasattr(each, "rows")} == {
        "prompt_length": [3, 3],
        "response_length": [2, 3],
        "truncated": [0, 1],
        "num_turns": [1, 1],
        "weight_version": [7, 7],
        "last_weight_version": [7, 8],
        "uid": ["p3", "p3"],
    }
    for name, column in data.batch.items():
        dtype = column.dtype if isinstance(column, torch.Tensor) else column.values.dtype
        assert str(dtype) == f"torch.{FIELDS[name].dtype}", name
    assert len(group_batch("p3", PROMPT, [])) == 0


def test_recorded_experts_travel_with_the_tokens() -> None:
    """Of a group's prompt those of the first response; tokens that nothing follows are not missed."""
    first, second = (np.full((length, 2, 1), number, np.uint8) for length, number in ((5, 1), (4, 2)))
    first[-1] = second[-1] = second[-2] = 255
    put_in = replace(RESPONSES[1], mask=[1, 1, 0])
    responses = [replace(RESPONSES[0], routes=first), replace(put_in, routes=second)]
    data = group_batch("p3", PROMPT, responses)
    assert [row[:, 0, 0].tolist() for row in data["prompt_routes"].rows()] == [[1, 1, 1]] * 2
    assert [row[:, 0, 0].tolist() for row in data["routes"].rows()] == [[1, 255], [2, 255, 255]]
    assert data["unknown_routes"].tolist() == [0, 0]
    branches = replace(put_in, routes=second, mask=[1, 1, 1], predecessors=[-1, 0, 1])
    assert group_batch("p3", PROMPT, [branches])["unknown_routes"].tolist() == [3]
    assert "routes" not in group_batch("p3", PROMPT, RESPONSES).columns()


def test_what_an_environment_put_in_does_not_train() -> None:
    """Nor did any weights sample it."""
    episode = Response([8, 40, 41, 2], [-0.5, 0, 0, -1], False, [7, -1, -1, 8], mask=[1, 0, 0, 1], num_turns=2)
    data = group_batch("p3", PROMPT, [episode, RESPONSES[0]])
    assert [row.tolist() for row in data["response_mask"].rows()] == [[1, 0, 0, 1], [1, 1]]
    assert [row.tolist() for row in data["weight_versions"].rows()] == [[7, -1, -1, 8], [7, 7]]
    assert (data["weight_version"].tolist(), data["last_weight_version"].tolist()) == ([7, 7], [8, 7])
    assert data["response_length"].tolist() == [4, 2]
    assert data["num_turns"].tolist() == [2, 1]


# --- episodes on a real engine ------------------------------
LOOP = """
import asyncio

from grpo_dist.agents import AgentLoop


class Echo(AgentLoop):
    def __init__(self, words, wait=0.0):
        self.words, self.wait = words, wait

    async def run(self, episode):
        assert episode.row.messages[0]["content"] == "hello" and episode.row.extra_info.get("index") == 3
        assert episode.index != episode.row.extra_info.get("never")
        assert not hasattr(episode.row, "ground_truth")
        await episode.generate(max_tokens=3)
        await asyncio.sleep(self.wait)
        if episode.index == 1:
            episode.reward, episode.metrics = 0.5, {"moves": 2}
            episode.add_step_reward(0.25)
        episode.append(self.words)
        await episode.generate(max_tokens=4)
"""
SAMPLING = SamplingSettings(3, 1.0, 1.0, -1, 20, 11, ignore_eos=True)
TASK = Task("words", "secret", {"index": 3}, [{"role": "user", "content": "hello"}])


@pytest.fixture(scope="module")
def agents(local_ray: None, random_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two workers with agent loops: rank 0 answers at once, rank 1 waits for very long."""
    file = tmp_path_factory.mktemp("loop") / "echo.py"
    file.write_text(LOOP)
    loops = [agent(f"{file}:Echo", {"words": "w40 w41", "wait": wait}) for wait in (0.0, 500.0)]
    more = {"seed": 1, "needs_tokenizer": True, "min_group_size": 2}
    settings = [engine_settings(random_models["untied"], agent=loop, **more) for loop in loops]
    with spawned("rollout", RolloutWorker, [(), ()], env={"OMP_NUM_THREADS": "1"}) as group:
        group.gather([group.submit(rank, "start", "start", each) for rank, each in enumerate(settings)])
        yield group
        group.call_all("shutdown", "shutdown")


def episodes(
    group: WorkerGroup, uid: str, prompt: tuple[int, ...] = (4, 5, 6), task: Task = TASK, rank: int = 0
) -> Any:
    return group.submit(rank, "generate", "generate", uid, np.array(prompt, np.int32), SAMPLING, task)


@pytest.mark.ray
def test_episodes_are_the_same_whatever_else_is_sampled(agents: WorkerGroup) -> None:
    (label, *_), first = agents.gather([episodes(agents, "a")])[0]
    together = agents.gather([episodes(agents, f"b{i}", (4 + i, 5, 6)) for i in range(4)])
    again = together[0][1]
    assert label.small["num_turns"].tolist() == [2, 2, 2]
    for name, told in (("episode_reward", 0.5), ("reward_extra/moves", 2.0)):
        assert np.array_equal(label.small[name], [np.nan, told, np.nan], equal_nan=True), name
    steps = [row.isnan().tolist() for row in first["episode_step_rewards"].rows()]
    assert steps == [[True] * 9, [True, True, False, *[True] * 6], [True] * 9]
    for row, mask in zip(first["responses"].rows(), first["response_mask"].rows(), strict=True):
        assert row[3:5].tolist() == [40, 41]
        assert mask.tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 1]
    for name in ("responses", "rollout_log_probs"):
        assert torch.equal(first[name].values, again[name].values), name
    assert len({tuple(row.tolist()) for row in first["responses"].rows()}) == 3


@pytest.mark.deep
@pytest.mark.ray
def test_the_first_turns_are_those_of_one_request_for_the_group(agents: WorkerGroup, rollouts: WorkerGroup) -> None:
    one_request = rollouts.submit(1, "generate", "generate", "g", PROMPT, SAMPLING)
    (_, whole), (_, data) = agents.gather([one_request, episodes(agents, "c")])
    for name in ("responses", "rollout_log_probs"):
        for row, turn in zip(whole[name].rows(), data[name].rows(), strict=True):
            torch.testing.assert_close(turn[:3], row[:3])


@pytest.mark.deep
@pytest.mark.ray
def test_an_aborted_group_ends_while_its_tool_works(agents: WorkerGroup) -> None:
    call = episodes(agents, "slow", rank=1)
    time.sleep(1)
    agents.call(1, "abort", "abort", ["slow", "unknown"])
    (label, _, failed), data = agents.gather([call])[0]
    assert (label, failed, data) == (None, [], None)


@pytest.mark.ray
def test_a_failing_loop_reaches_the_driver_as_what_it_is(agents: WorkerGroup) -> None:
    """A group of training may lack an episode of which all attempts fail; validation needs all of them."""
    every, one = replace(TASK, extra_info={}), replace(TASK, extra_info={"index": 3, "never": 2})
    tasks = {"d": every, "e": one, "v": replace(one, validation=True)}
    found = agents.gather([episodes(agents, uid, task=task) for uid, task in tasks.items()])
    ((label, _, failed), data), ((partial, _, missing), some), ((validated, _, _), none) = found
    assert (label, data, validated, none) == (None, None, None, None)
    assert (type(failed[-1]), failed[-1].kind, failed[-1].was_last) == (AgentError, "error", True)
    says(str(failed[-1]), "echo.py:Echo", "run()", "AssertionError")
    assert sum(error.was_last for error in failed) == 2, "of 3 episodes one may be missing"
    assert partial.small["uid"].tolist() == ["e"] * 2 == list(some["uid"])
    assert [(error.kind, error.was_last) for error in missing] == [("error", False), ("error", False), ("error", True)]
