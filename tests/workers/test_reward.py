"""The pool of reward processes, on some that are none; see also tests/runtime/test_pool.py.

tests/chaos has real ones that die.
"""

from __future__ import annotations

import asyncio

import torch

from grpo_dist.algorithms.settings import TargetSettings
from grpo_dist.errors import RewardError, WorkerLost
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.runtime.nodes import RestartBudget
from grpo_dist.workers.reward import RewardPool
from grpo_dist.workers.scorer import Task
from tests.messages import refuses
from tests.runtime.fakes import FakeNodes, Held, settle

TASK = Task("", "", {})


def group() -> DataProtoRef:
    column = Ragged.from_rows([[5], [6]], torch.int32)
    return DataProtoRef.put(DataProto.from_dict({"responses": column, "response_mask": column}))


async def test_whole_batches_are_asked_again_and_the_functions_own_mistake_is_shown_at_once(store_here: None) -> None:
    workers = Held("reward", 1)
    pool = RewardPool(workers, RestartBudget(1, FakeNodes()))
    scoring = asyncio.create_task(pool.score(group(), TASK, 240.0))
    await settle()
    workers.open("score")[0][1].set_exception(RewardError("own.py, line 7: mistake"))
    with refuses(RewardError, "own.py, line 7"):
        await scoring
    assert (pool.restarts.failures, workers.lives) == ([], [0])

    columns = ["uid", "token_level_scores", "response_mask", "rollout_log_probs", "old_log_probs"]
    columns += ["prompts", "responses", "score", "failure", "said"]
    batch = DataProtoRef.put(DataProto.from_dict({name: torch.zeros(2) for name in columns}))
    making = asyncio.create_task(pool.compute_targets(batch, TargetSettings("grpo"), 0.0, 0))
    writing = pool.write_samples(batch, "7.jsonl", 7, {})
    await settle()
    workers.open("compute_targets")[0][1].set_exception(WorkerLost("gone", "reward", 0))
    await settle()
    workers.open("start")[0][1].set_result(None)
    await settle()
    workers.open("compute_targets")[0][1].set_result((Label((), {}, 2), {"loss": 1.0}, (["a line"], 0)))
    workers.open("write_samples")[0][1].set_result(None)
    await writing
    assert (await making)[1] == {"loss": 1.0}
    assert pool.printed.take() == ["the advantage or KL estimator printed:\n  a line"]
    assert [method for method, _ in workers.order].count("write_samples") == 2
    assert workers.lives == [1]
