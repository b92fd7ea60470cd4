"""Dynamic sampling and greedy baselines, on a pump that answers at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_dist.config.load import load_config
from grpo_dist.data.sampler import PromptSampler
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import DataError, GrpoDistError, RewardError
from grpo_dist.trainer.finished_groups import Group
from grpo_dist.trainer.rollout_job import GroupRequest, RolloutJob
from grpo_dist.trainer.sampling import TrainingSampler, informative
from grpo_dist.workers.batch_ref import DataProtoRef

N = 4


class InstantPump:
    """Scores prompt i of the data set with `scores[i]`; a greedy response scores 9."""

    def __init__(self, scores: dict[int, list[float]]) -> None:
        self.scores, self.requests, self.late = scores, [], ()

    def submit(
        self, requests: list[GroupRequest], *, givers: tuple[str, ...], there: dict[int, Group] | None = None
    ) -> RolloutJob:
        there = there or {}
        self.requests += [request for i, request in enumerate(requests) if i not in there]
        job = RolloutJob(requests, {}, timings={"gen": 1.0})
        for i, request in enumerate(requests):
            greedy = request.sampling.temperature == 0
            scores = [9.0] if greedy else self.scores[request.task.extra_info["index"]]
            job.groups[i] = DataProtoRef(small={"uid": np.array([request.uid] * len(scores))}, num_rows=len(scores))
            small = {"score": np.array(scores), "reward_extra/acc": np.array(scores) > 0}
            job.scores[i] = DataProtoRef(small=small, num_rows=len(scores))
        for i, (group, scores) in there.items():
            job.groups[i], job.scores[i] = group, scores
        for i in self.late:
            del job.scores[i]
        return job

    def wait(self, done: Callable[[], bool], give_way: object = None) -> None:
        while not done():
            self.on_progress()

    def cancel(self, job: RolloutJob, groups: set[int]) -> None:
        job.cancelled |= groups - job.scores.keys()


def make_sampler(scores: dict[int, list[float]], *overrides: str) -> TrainingSampler:
    """2 prompts a step, in order."""
    config, _ = load_config(
        [
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            f"actor_rollout_ref.rollout.n={N}",
            *overrides,
        ]
    )
    prompts = [
        SimpleNamespace(
            token_ids=np.array([i]),
            prompt=SimpleNamespace(index=i, data_source="d", ground_truth="", extra_info={"index": i}, messages=[]),
        )
        for i in scores
    ]
    order = PromptSampler(len(prompts), 2, shuffle=False, seed=0)
    sampling = SamplingSettings(N, 1.0, 1.0, -1, 8, 0)
    return TrainingSampler(config, InstantPump(scores), prompts, order, sampling)  # type: ignore[arg-type]


MIXED, EQUAL = [1.0, 0, 0, 0], [1.0, 1, 1, 1]
FILTER = "algorithm.filter_groups.enable=true"


def test_without_filtering_one_batch_is_sampled() -> None:
    result = make_sampler({0: MIXED, 1: EQUAL}).rollout(1)
    assert [request.uid for request in result.requests] == ["step1-prompt0", "step1-prompt1"]
    assert result.batch["score"].tolist() == MIXED + EQUAL
    assert result.metrics == {}


def test_groups_that_teach_nothing_are_replaced() -> None:
    """Prompts 0, 1: one is equal. 2, 3: both differ, of which one fills the batch and one is too many."""
    sampler = make_sampler({0: EQUAL, 1: MIXED, 2: MIXED, 3: MIXED}, FILTER)
    result = sampler.rollout(1)
    assert [request.uid for request in result.requests] == ["step1-prompt1", "step1-prompt2-try2"]
    assert result.batch["score"].tolist() == MIXED + MIXED
    assert result.metrics == {"train/num_gen_batches": 2, "train/filtered_groups": 1 / 4}
    assert result.timings == {"gen": 2.0}
    seeds = [request.sampling.seed for request in sampler.pump.requests]
    assert len(set(seeds)) == 4


def test_a_prompt_that_comes_again_within_a_step_is_sampled_anew() -> None:
    sampler = make_sampler({0: EQUAL, 1: MIXED}, FILTER)
    result = sampler.rollout(1)
    assert [request.uid for request in result.requests] == ["step1-prompt1", "step1-prompt1-try2"]
    seeds = [request.sampling.seed for request in result.requests]
    assert seeds[0] != seeds[1]


def test_the_search_for_groups_has_an_end() -> None:
    sampler = make_sampler(
        {0: EQUAL, 1: MIXED, 2: EQUAL, 3: EQUAL}, FILTER, "algorithm.filter_groups.max_num_gen_batches=2"
    )
    with pytest.raises(GrpoDistError, match=r"max_num_gen_batches=2: of 4 groups for step 1 only 1 of the 2 needed"):
        sampler.rollout(1)


class RecordingOrder:
    """Batches in order; remembers what it is told."""

    def __init__(self) -> None:
        self.batches, self.told = iter([[1, 0], [3, 2]]), []

    def next_batch(self) -> list[int]:
        return next(self.batches)

    def update(self, scores_by_index: dict) -> None:
        self.told.append({index: scores.tolist() for index, scores in scores_by_index.items()})


def test_the_order_is_told_the_scores_of_every_group_dropped_or_not() -> None:
    sampler = make_sampler({0: EQUAL, 1: MIXED, 2: MIXED, 3: EQUAL}, FILTER)
    sampler.order = RecordingOrder()  # type: ignore[assignment]
    result = sampler.rollout(1)
    assert [request.uid for request in result.requests] == ["step1-prompt1", "step1-prompt2-try2"]
    assert sampler.order.told == [{1: MIXED, 0: EQUAL}, {3: EQUAL, 2: MIXED}]


def test_remax_samples_every_prompt_once_more_greedily() -> None:
    sampler = make_sampler({0: MIXED, 1: EQUAL}, "algorithm.adv_estimator=remax")
    result = sampler.rollout(1)
    assert result.batch["reward_baseline"].tolist() == [9.0] * 2 * N
    assert len(result.batch) == 2 * N
    greedy = sampler.pump.requests[2:]
    assert [(r.sampling.n, r.sampling.temperature, r.needs_log_probs) for r in greedy] == [(1, 0.0, False)] * 2


def test_the_metric_may_be_an_extra_value() -> None:
    group = DataProtoRef(small={"score": np.array([1.0, 2.0]), "reward_extra/acc": np.array([1.0, 1.0])}, num_rows=2)
    assert informative(group, "score")
    assert not informative(group, "acc")
    with pytest.raises(RewardError, match=r"metric=accuracy: the reward function returns score, acc"):
        informative(group, "accuracy")


def test_smaller_batches_are_sampled_until_there_are_enough() -> None:
    """One at a time for a batch of two."""
    sampler = make_sampler({0: MIXED, 1: EQUAL}, "data.gen_batch_size=1")
    sampler.order = PromptSampler(2, 1, shuffle=False, seed=0)
    result = sampler.rollout(1)
    assert [request.uid for request in result.requests] == ["step1-prompt0", "step1-prompt1-try2"]


def test_steps_are_opened_in_order_and_each_prompt_is_drawn_once() -> None:
    sampler = make_sampler(dict.fromkeys(range(6), MIXED))
    sampler.open_steps(1, 3)
    assert [sampler.open[step].drawn for step in (1, 2, 3)] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    sampler.open_steps(1, 3)
    assert len(sampler.pump.requests) == 6, "open steps are not sampled again"
    results = [sampler.rollout(step) for step in (1, 2, 3)]
    assert list(sampler.open) == [1, 2, 3], "they have not trained yet"
    for step in (1, 2, 3):
        sampler.close(step)
    uids = [request.uid for result in results for request in result.requests]
    assert uids == [f"step{1 + i // 2}-prompt{i}" for i in range(6)]
    assert sampler.open == {}


def test_the_ledger_brings_back_what_was_drawn_and_has_not_trained() -> None:
    before = make_sampler(dict.fromkeys(range(8), MIXED))
    before.open_steps(1, 3)
    before.rollout(1)
    before.close(1)
    ledger = json.loads(json.dumps(before.state_dict()))
    assert ledger == {
        "open": {"2": [[2, 3]], "3": [[4, 5]]},
        "backlog": [],
        "num_learned": {"2": 1, "3": 1},
        "batch_sizes": [2, None, 0],
    }
    after = make_sampler(dict.fromkeys(range(8), MIXED))
    after.order.load_state_dict(before.order.state_dict())
    after.load_state_dict(ledger)
    after.open_steps(2, 4)
    resumed = [request for step in (2, 3, 4) for request in after.rollout(step).requests]
    assert [request.uid for request in resumed] == [f"step{2 + i // 2}-prompt{2 + i}" for i in range(6)]
    assert [r.sampling.seed for r in resumed[:4]] == [r.sampling.seed for r in before.pump.requests[2:]]


def resumed_sampler(before: TrainingSampler, scores: dict[int, list[float]], *overrides: str) -> TrainingSampler:
    """A sampler that goes on where `before` is."""
    ledger, order = json.loads(json.dumps([before.state_dict(), before.order.state_dict()]))
    after = make_sampler(scores, *overrides)
    after.order.load_state_dict(order)
    after.load_state_dict(ledger)
    return after


def test_finished_groups_of_open_steps_are_not_sampled_again() -> None:
    scores = dict.fromkeys(range(8), MIXED)
    before = make_sampler(scores)
    before.open_steps(1, 3)
    before.rollout(1)
    before.close(1)
    before.pump.late = (1,)  # of step 4 only prompt 6 is there
    before.open_steps(4, 4)
    finished = before.finished_groups()
    assert [each.name for each in finished] == ["step2-try1", "step3-try1", "step4-try1"]
    assert list(finished[2].groups) == ["step4-prompt6"]
    after = resumed_sampler(before, scores)
    after.restored = {uid: (group, score) for each in finished for uid, (group, score) in each.groups.items()}
    kept = after.restored["step3-prompt5"]
    results = [after.rollout(step) for step in (2, 3, 4)]
    assert [request.uid for request in after.pump.requests] == ["step4-prompt7"]
    assert after.restored == {}
    uids = [request.uid for result in results for request in result.requests]
    assert uids == [f"step{1 + i // 2}-prompt{i}" for i in range(2, 8)]
    assert kept[0].small["uid"].tolist() == results[1].batch["uid"][N:].tolist()


def test_a_batch_that_is_there_and_has_not_trained_is_in_the_ledger() -> None:
    """A run that ends between sampling and training: the same prompts come again, and nothing is sampled anew."""
    scores = dict.fromkeys(range(8), MIXED)
    before = make_sampler(scores)
    sampled = before.rollout(1)
    finished = before.finished_groups()
    after = resumed_sampler(before, scores)
    after.restored = {uid: pair for each in finished for uid, pair in each.groups.items()}
    assert [r.uid for r in after.rollout(1).requests] == [r.uid for r in sampled.requests]
    assert after.pump.requests == []
    after.close(1)
    assert [r.uid for r in after.rollout(2).requests] == ["step2-prompt2", "step2-prompt3"]


def test_other_batch_sizes_lose_no_drawn_prompt() -> None:
    """Steps 2 and 3 were open with two prompts each; then batches are of three."""
    scores = dict.fromkeys(range(9), MIXED)
    before = make_sampler(scores)
    before.open_steps(1, 3)
    before.rollout(1)
    before.close(1)
    size = ("data.train_batch_size=3", "actor_rollout_ref.actor.ppo_mini_batch_size=3")
    after = resumed_sampler(before, scores, *size)
    assert (after.open, after.backlog) == ({}, [2, 3, 4, 5])
    trained = [[r.task.extra_info["index"] for r in after.rollout(step).requests] for step in (2, 3)]
    assert trained == [[2, 3, 4], [5, 6, 7]]


def test_an_order_learns_from_each_batch_once() -> None:
    """Step 2's batch was complete and told when the run stopped; its groups come again."""
    scores = dict.fromkeys(range(8), MIXED)
    before = make_sampler(scores)
    before.open_steps(1, 2)
    before.rollout(1)
    before.close(1)
    assert before.state_dict()["num_learned"] == {"2": 1}
    after = resumed_sampler(before, scores)
    after.order = RecordingOrder()  # type: ignore[assignment]
    after.rollout(2)
    assert after.order.told == []
    assert after.rollout(3) is not None
    assert len(after.order.told) == 1


def test_the_slowest_of_an_over_sampled_batch_are_ended_and_come_first_in_the_next() -> None:
    sampler = make_sampler(dict.fromkeys(range(8), MIXED), "actor_rollout_ref.rollout.over_sample_rate=0.5")
    sampler.pump.late = (1,)
    result = sampler.rollout(1)
    assert [request.uid for request in result.requests] == ["step1-prompt0", "step1-prompt2"]
    assert result.metrics == {"train/aborted_groups": 1}
    assert sampler.backlog == [1, 3], "1 was ended, 3 was drawn with the others"
    sampler.pump.late = ()
    assert [request.uid for request in sampler.rollout(2).requests] == ["step2-prompt1", "step2-prompt3"]
    assert sampler.backlog == [4, 5], "4 was ready too, and one too many"


def test_over_sampling_is_in_the_ledger_once() -> None:
    """Prompt 1 was ended in step 1 and waits; the checkpoint has it in one place."""
    sampler = make_sampler(dict.fromkeys(range(8), MIXED), "actor_rollout_ref.rollout.over_sample_rate=0.5")
    sampler.pump.late = (1,)
    sampler.open_steps(1, 1)
    sampler.pump.on_progress()
    ledger = sampler.state_dict()
    assert (ledger["open"], ledger["backlog"]) == ({"1": [[0, 2]]}, [1, 3])


def test_an_over_sampled_batch_never_has_a_prompt_twice() -> None:
    """4 prompts, 2 + 1 a batch, drawn two at a time: after an epoch the backlog has prompts that come again."""
    sampler = make_sampler(dict.fromkeys(range(4), MIXED), "actor_rollout_ref.rollout.over_sample_rate=0.5")
    for step in range(1, 9):
        sampler.open_steps(step, step)
        assert len(set(sampler.open[step].drawn[0])) == 3
        sampler.rollout(step)
    too_few = make_sampler(dict.fromkeys(range(2), MIXED), "actor_rollout_ref.rollout.over_sample_rate=0.5")
    with pytest.raises(DataError, match=r"a batch samples 3 different prompts, and the order .* gives only 2"):
        too_few.rollout(1)


def test_over_sampling_takes_a_prompt_only_with_its_greedy_baseline() -> None:
    """Of 3 prompts the second one's baseline (the fifth request) is late."""
    overrides = ("actor_rollout_ref.rollout.over_sample_rate=0.5", "algorithm.adv_estimator=remax")
    sampler = make_sampler(dict.fromkeys(range(8), MIXED), *overrides)
    sampler.pump.late = (4,)
    result = sampler.rollout(1)
    assert [request.uid for request in result.requests] == ["step1-prompt0", "step1-prompt2"]
    assert result.metrics == {"train/aborted_groups": 1}
