"""The pump's time limits; every rollout in test_trainer.py and test_staleness.py goes through the rest of it."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import WorkerLost
from grpo_dist.trainer.pump import SCORER_RESTART_S, SCORER_START_S, RolloutPump
from grpo_dist.trainer.rollout_job import GroupRequest, RolloutJob
from grpo_dist.workers.group import Call
from grpo_dist.workers.reward import Task

N, TIMEOUT_S = 8, 30.0
# A function that hangs on every response of a group: each is killed, and the scorer started again for the next.
HANGS_ON_ALL_S = N * (TIMEOUT_S + SCORER_RESTART_S) + SCORER_START_S


class Late:
    """A group of workers that knows of one thing only."""

    def late(self, calls: list[Call], limit_s: float) -> WorkerLost:
        return WorkerLost("late")


@pytest.mark.parametrize(("seconds", "is_replaced"), [(HANGS_ON_ALL_S - 5, False), (HANGS_ON_ALL_S + 5, True)])
def test_a_process_whose_function_hangs_on_every_response_may_finish(seconds: float, is_replaced: bool) -> None:
    replaced = []
    rollout = SimpleNamespace(check_deadlines=lambda: None, take_lost=list)
    reward = SimpleNamespace(starting=[], replace=lambda call, error: replaced.append(call))
    pump = RolloutPump(rollout, reward, {}, reward_timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
    request = GroupRequest("a", np.array([1]), SamplingSettings(N, 1.0, 1.0, -1, 8, None), Task("", "", {}))
    call = Call("ref", Late(), 0, "score", time.monotonic() - seconds)  # type: ignore[arg-type]
    pump._scoring[call] = RolloutJob([request], {}), 0
    pump._check_deadlines()
    assert bool(replaced) == is_replaced
    assert (call in pump._scoring) != is_replaced
