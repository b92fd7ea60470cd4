"""What a run that is taken up again knows of the steps that were open: prompts, finished groups, what was told."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_dist.errors import AgentError
from grpo_dist.runtime.event_loop import blocking, run
from grpo_dist.trainer.rollout.pump import RolloutPump
from grpo_dist.trainer.rollout.sampling import TrainingSampler
from tests.trainer.instant_pump import (
    EQUAL,
    FILTER,
    MIXED,
    N,
    RecordingOrder,
    make_sampler,
    open_steps,
    resumed_sampler,
)


def after_step_1(scores: dict[int, list[float]], last: int) -> TrainingSampler:
    """A sampler that had opened the steps up to `last` when step 1 ended."""
    sampler = make_sampler(scores)
    open_steps(sampler, 1, last)
    run(sampler.rollout(1))
    sampler.close(1)
    return sampler


@blocking
async def open_unfinished(sampler: TrainingSampler, step: int, late: int) -> None:
    """Open a step of which one group never comes."""
    sampler.pump.late = (late,)  # type: ignore[attr-defined]
    sampler.open_steps(step, step)
    forever: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    sampler.open[step].jobs[0].flows[late] = asyncio.ensure_future(asyncio.wait_for(forever, None))
    await asyncio.sleep(0)


def test_what_a_filter_dropped_is_not_sampled_again_after_a_resume() -> None:
    """Prompts 0, 1 | 2, 3 | 4, 5: three groups are equal, and prompt 5 is one too many."""
    scores = {0: EQUAL, 1: MIXED, 2: EQUAL, 3: EQUAL, 4: MIXED, 5: MIXED}
    before = make_sampler(scores, FILTER)
    sampled = run(before.rollout(1))
    ledger = before.state_dict()
    assert ledger["open"] == {"1": [[1], [], [4]]}
    assert (ledger["num_filtered"], ledger["num_surplus"]) == ({"1": 3}, {"1": 1})
    after = resumed_sampler(before, scores, FILTER, with_groups=True)
    after.order.update = lambda scores: pytest.fail("it was told")  # type: ignore[method-assign]
    result = run(after.rollout(1))
    assert after.pump.requests == []
    assert [request.uid for request in result.requests] == [request.uid for request in sampled.requests]
    assert result.metrics == sampled.metrics


def test_batches_that_a_checkpoint_holds_follow_one_another_without_a_worker() -> None:
    """Of three batches of prompts one has no group left; nothing is in flight that would wake the pump between them."""
    scores = {0: EQUAL, 1: MIXED, 2: EQUAL, 3: EQUAL, 4: MIXED, 5: EQUAL}
    before = make_sampler(scores, FILTER)
    sampled = run(before.rollout(1))
    after = resumed_sampler(before, scores, FILTER, with_groups=True)
    # any question to engines or reward processes would fail
    nobody: Any = SimpleNamespace(restarts=SimpleNamespace(machines_lost=0))
    after.pump = RolloutPump(nobody, nobody, {}, reward_timeout_s=1.0)
    assert [request.uid for request in run(after.rollout(1)).requests] == [request.uid for request in sampled.requests]


def test_the_ledger_brings_back_what_was_drawn_and_has_not_trained() -> None:
    before = after_step_1(dict.fromkeys(range(8), MIXED), 3)
    ledger = json.loads(json.dumps(before.state_dict()))
    assert ledger == {
        "open": {"2": [[2, 3]], "3": [[4, 5]]},
        "backlog": [],
        "num_learned": {"2": 1, "3": 1},
        "num_filtered": {"2": 0, "3": 0},
        "num_surplus": {"2": 0, "3": 0},
        "num_dropped_tokens": {"2": 0, "3": 0},
        "learned": [],
        "batch_sizes": [2, None, 0],
        "failed": {},
        "num_episodes": [0, 0],
    }
    after = make_sampler(dict.fromkeys(range(8), MIXED))
    after.order.load_state_dict(before.order.state_dict())
    after.load_state_dict(ledger)
    open_steps(after, 2, 4)
    resumed = [request for step in (2, 3, 4) for request in run(after.rollout(step)).requests]
    assert [request.uid for request in resumed] == [f"step{2 + i // 2}-prompt{2 + i}" for i in range(6)]
    assert [r.sampling.seed for r in resumed[:4]] == [r.sampling.seed for r in before.pump.requests[2:]]


@pytest.mark.parametrize("short", [MIXED, MIXED[:2]], ids=["whole groups", "one that lacks two episodes"])
def test_finished_groups_of_open_steps_are_not_sampled_again(short: list[float]) -> None:
    scores = dict.fromkeys(range(8), MIXED) | {4: short}
    before = after_step_1(scores, 3)
    open_unfinished(before, 4, 1)  # of step 4 only prompt 6 is there
    finished = before.finished_groups()
    assert [each.name for each in finished] == ["step2-try1", "step3-try1", "step4-try1"]
    assert list(finished[2].groups) == ["step4-prompt6"]
    after = resumed_sampler(before, scores, with_groups=True)
    kept = after.restored["step3-prompt5"]
    results = [run(after.rollout(step)) for step in (2, 3, 4)]
    assert [request.uid for request in after.pump.requests] == ["step4-prompt7"]
    assert after.restored == {}
    uids = [request.uid for result in results for request in result.requests]
    assert uids == [f"step{1 + i // 2}-prompt{i}" for i in range(2, 8)]
    assert kept[0].small["uid"].tolist() == results[1].batch["uid"][len(short) :].tolist()
    assert [len(result.batch) for result in results] == [2 * N, len(short) + N, 2 * N]
    assert finished[1].describe()["rows"]["step3-prompt4"] == len(short), "as a checkpoint describes it"


def test_a_batch_that_is_there_and_has_not_trained_is_in_the_ledger() -> None:
    """A run that ends between sampling and training: the same prompts come again, and nothing is sampled anew."""
    scores = dict.fromkeys(range(8), MIXED)
    before = make_sampler(scores)
    sampled = run(before.rollout(1))
    after = resumed_sampler(before, scores, with_groups=True)
    assert [r.uid for r in run(after.rollout(1)).requests] == [r.uid for r in sampled.requests]
    assert after.pump.requests == []
    after.close(1)
    assert [r.uid for r in run(after.rollout(2)).requests] == ["step2-prompt2", "step2-prompt3"]


def test_what_failed_of_finished_groups_is_told_after_a_resume_too() -> None:
    """Of step 2 the pump has begun 2 * N episodes; one group is there, with two failed attempts, the other is not."""
    scores = dict.fromkeys(range(4), MIXED)
    before = after_step_1(scores, 1)
    open_unfinished(before, 2, 1)
    (job,) = before.open[2].jobs
    job.failed_attempts[0] = [AgentError("slow", "timeout"), AgentError("gone", "error", was_last=True)]
    job.failed_attempts[1] = [AgentError("gone", "error", was_last=True)]
    job.unscored = {0: ["it raised"]}
    before.pump.num_episodes, before.pump.num_failed_episodes = 4 * N, 5
    assert before.state_dict()["num_episodes"] == [3 * N, 4], "those of the other group begin anew"
    after = resumed_sampler(before, scores, with_groups=True)
    result = run(after.rollout(2))
    assert (after.pump.num_episodes, after.pump.num_failed_episodes) == (3 * N, 4)
    assert result.failures == ["it raised"]
    named = ("agent/failures/timeout", "agent/failures/error", "agent/missing_episodes", "agent/wasted_episodes")
    assert [result.metrics.get(name) for name in named] == [1, 1, 1, 2 / (2 * N + 1)]
    after.close(2)
    assert after.state_dict()["failed"] == {}


def test_other_batch_sizes_lose_no_drawn_prompt() -> None:
    """Steps 2 and 3 were open with two prompts each; then batches are of three."""
    scores = dict.fromkeys(range(9), MIXED)
    before = after_step_1(scores, 3)
    size = ("data.train_batch_size=3", "actor_rollout_ref.actor.ppo_mini_batch_size=3")
    after = resumed_sampler(before, scores, *size)
    assert (after.open, after.backlog) == ({}, [2, 3, 4, 5])
    trained = [[r.task.extra_info["index"] for r in run(after.rollout(step)).requests] for step in (2, 3)]
    assert trained == [[2, 3, 4], [5, 6, 7]]


def test_an_order_learns_from_each_batch_once_with_other_batch_sizes_too() -> None:
    """Batches of two: step 2 with prompts 2 and 3 was told, step 3 with 4 and 5 was not. Then batches are of three."""
    scores = dict.fromkeys(range(9), MIXED)
    before = after_step_1(scores, 2)
    open_unfinished(before, 3, 1)
    size = ("data.train_batch_size=3", "actor_rollout_ref.actor.ppo_mini_batch_size=3")
    after = resumed_sampler(before, scores, *size)
    open_unfinished(after, 3, 1)
    assert (after.open[3].drawn, after.backlog) == ([[2, 3, 4]], [5])
    again = resumed_sampler(after, scores, *size)  # stopped once more before that batch was done
    again.order = RecordingOrder([6, 7, 8], [2, 3, 4])  # type: ignore[assignment]
    for step in (3, 4, 5):
        run(again.rollout(step))
        again.close(step)
    told = [list(each) for each in again.order.told]
    assert told == [[4], [5, 6, 7], [8, 2, 3]], "2 and 3 again once the order has chosen them again"


def test_over_sampling_is_in_the_ledger_once() -> None:
    """Prompt 1 was ended in step 1 and waits; the checkpoint has it in one place."""
    sampler = make_sampler(dict.fromkeys(range(8), MIXED), "actor_rollout_ref.rollout.over_sample_rate=0.5")
    sampler.pump.late = (1,)
    open_steps(sampler, 1, 1)
    ledger = sampler.state_dict()
    assert (ledger["open"], ledger["backlog"]) == ({"1": [[0, 2]]}, [1, 3])
