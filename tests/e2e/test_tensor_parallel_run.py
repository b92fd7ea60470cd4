"""The main job with an engine of two processes, one of which is killed twice: it learns what it does with one."""

from __future__ import annotations

import time
from dataclasses import asdict

import psutil
import pytest

from tests.chaos.driver import PROCESSES, Fault
from tests.chaos.runs import STEPS, Outcome, train
from tests.observed import alive_as, command_line

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1500)]

FAULTS = [Fault("engine", "generating", "SIGKILL", 3), Fault("engine", "syncing", "SIGKILL", 5)]


@pytest.fixture(scope="module")
def split_run(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("split")
    return train(folder / "run", FAULTS, "actor_rollout_ref.rollout.tensor_model_parallel_size=2")


def test_an_engine_that_loses_a_process_is_replaced(split_run: Outcome) -> None:
    assert [hit["fault"] for hit in split_run.hits] == [asdict(fault) for fault in FAULTS], split_run.log[-6000:]
    assert [hit["during"] for hit in split_run.hits] == ["generating", "syncing"], "none came too late"
    assert split_run.lives == 1, "the run itself goes on"
    rows = split_run.metrics()
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert rows[-1]["training/worker_restarts"] == len(FAULTS)
    assert split_run.log.count("replaced a worker") == len(FAULTS)


def test_nothing_of_its_engines_is_left(split_run: Outcome) -> None:
    since = time.time() - split_run.seconds - 60
    engines = [each for each in psutil.process_iter() if command_line(each).startswith(PROCESSES["engine"])]
    assert [alive_as(each) for each in engines if alive_as(each) and each.create_time() > since] == []


def test_it_learns_what_it_learns_with_one_process(main_run: Outcome, split_run: Outcome) -> None:
    """Two processes add up their halves of a sum in another order, so a token may turn over where the draw falls
    between two. That is rare, and changes what is sampled after it: compared are the first step token by token, the
    whole run by its rewards, and each step with its trainer.
    """
    one, two = main_run.samples(1), split_run.samples(1)
    same = [a["output"] == b["output"] for a, b in zip(one, two, strict=True)]
    assert sum(same) >= 0.9 * len(same), "the same weights, the same seeds"
    rewards = [[score for _, score in run.rewards()] for run in (main_run, split_run)]
    assert sum(rewards[1]) == pytest.approx(sum(rewards[0]), abs=0.1 * STEPS)
    assert sum(rewards[1][-3:]) > sum(rewards[1][:3]), "it learns"
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in split_run.metrics()[1:])
