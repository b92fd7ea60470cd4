"""Dynamic sampling and greedy baselines, on a pump that answers at once."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from grpo_dist.data.sampler import PassRateCurriculum, PromptSampler
from grpo_dist.errors import DataError, DataLost, GrpoDistError
from grpo_dist.runtime.event_loop import run
from grpo_dist.trainer.rollout.job import RolloutJob
from grpo_dist.trainer.rollout.sampling import OpenStep
from tests.messages import refuses
from tests.trainer.instant_pump import EQUAL, FILTER, MIXED, N, RecordingOrder, make_sampler, open_steps

OVER = "actor_rollout_ref.rollout.over_sample_rate=0.5"


def uids_of(result: Any) -> list[str]:
    """The groups that train."""
    return [request.uid for request in result.requests]


def filtered(num_batches: int, share: float, num_groups: int) -> dict[str, float]:
    """The metrics of filtering, of responses of 3 tokens."""
    return {
        "train/num_gen_batches": num_batches,
        "train/filtered_groups": share,
        "train/sampled_tokens": num_groups * N * 3,
    }


def test_without_filtering_one_batch_is_sampled() -> None:
    result = run(make_sampler({0: MIXED, 1: EQUAL}).rollout(1))
    assert uids_of(result) == ["step1-prompt0", "step1-prompt1"]
    assert result.batch["score"].tolist() == MIXED + EQUAL
    assert result.metrics == {}


@pytest.mark.parametrize("told", [True, False], ids=["by the data", "by the machine"])
def test_what_a_lost_machine_had_is_sampled_again_as_it_was(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What still runs ends first: its engines would take the same names for the same groups."""
    sampler, ended = make_sampler({0: MIXED, 1: EQUAL, 2: MIXED, 3: MIXED}), list[RolloutJob]()

    async def finished(job: RolloutJob) -> None:
        if not ended:
            sampler.pump.machines_lost = 1  # type: ignore[misc]
            if told:
                raise DataLost("a group is gone")

    async def has_ended(job: RolloutJob) -> None:
        ended.append(job)

    monkeypatch.setattr(RolloutJob, "finished", finished)
    monkeypatch.setattr(RolloutJob, "ended", has_ended)
    result = run(sampler.rollout(1))
    first, second = (sampler.pump.requests[:2], sampler.pump.requests[2:])
    assert [(each.uid, each.sampling) for each in first] == [(each.uid, each.sampling) for each in second]
    assert result.batch["score"].tolist() == MIXED + EQUAL
    assert (len(ended), result.num_responses) == (1, 2 * N)
    assert list(sampler.order.next_batch()) == [2, 3], "no prompt is skipped"


def test_with_spare_prompts_others_might_be_chosen_so_lost_data_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def finished(job: RolloutJob) -> None:
        raise DataLost("a group is gone")

    monkeypatch.setattr(RolloutJob, "finished", finished)
    sampler = make_sampler({i: MIXED for i in range(6)}, OVER)
    with pytest.raises(DataLost):
        run(sampler.rollout(1))


def test_groups_that_teach_nothing_are_replaced() -> None:
    """Prompts 0, 1: one is equal. 2, 3: both differ, of which one fills the batch and one is too many."""
    sampler = make_sampler({0: EQUAL, 1: MIXED, 2: MIXED, 3: MIXED}, FILTER)
    order = sampler.order = RecordingOrder([0, 1], [2, 3])  # type: ignore[assignment]
    result = run(sampler.rollout(1))
    assert uids_of(result) == ["step1-prompt1", "step1-prompt2-try2"]
    assert order.told == [{0: EQUAL, 1: MIXED}, {2: MIXED, 3: MIXED}], "of every group, dropped or not"
    assert result.batch["score"].tolist() == MIXED + MIXED
    assert result.metrics == filtered(2, 1 / 4, 4)
    assert result.timings == {"gen": 2.0}
    assert len({request.sampling.seed for request in sampler.pump.requests}) == 4
    again = run(make_sampler({0: EQUAL, 1: MIXED}, FILTER).rollout(1))
    assert uids_of(again) == ["step1-prompt1", "step1-prompt1-try2"], "it comes again within the step"
    assert len({request.sampling.seed for request in again.requests}) == 2


def test_the_search_for_groups_has_an_end() -> None:
    key = "algorithm.filter_groups.max_num_gen_batches=2"
    with refuses(GrpoDistError, key, "4 groups", "step 1", "1 of the 2", "score"):
        run(make_sampler({0: EQUAL, 1: MIXED, 2: EQUAL, 3: EQUAL}, FILTER, key).rollout(1))


def test_dropped_groups_are_let_go_when_their_batch_of_prompts_is_complete() -> None:
    """Prompts 0, 1 | 2, 3 | 4, 5: three groups are equal, and prompt 5 is one too many."""
    scores = {0: EQUAL, 1: MIXED, 2: EQUAL, 3: EQUAL, 4: MIXED, 5: MIXED}
    sampler = make_sampler(scores, FILTER)
    job = sampler._send_batch(1, OpenStep())
    assert sampler.pump.held() == ["step1-prompt0", "step1-prompt1"], "it may be needed by a pass over the whole batch"
    del job
    sampler = make_sampler(scores, FILTER)
    open_steps(sampler, 1, 1)
    trains = ["step1-prompt1", "step1-prompt4-try3"]
    assert sampler.pump.held() == trains, "the step is open"
    assert [uid for each in sampler.finished_groups() for uid in each.groups] == trains
    result = run(sampler.rollout(1))
    assert uids_of(result) == trains
    assert result.batch["uid"].tolist() == [trains[0]] * N + [trains[1]] * N
    assert (result.num_responses, result.timings) == (6 * N, {"gen": 3.0})
    assert result.metrics == filtered(3, 3 / 6, 6)
    sampler.close(1)
    del result
    assert sampler.pump.held() == []


def test_when_an_order_is_asked_and_told_where_the_run_samples_ahead() -> None:
    """As `trainer.max_staleness=2` opens steps: the batch of step s when step s - 3 has trained."""
    sampler = make_sampler(dict.fromkeys(range(10), MIXED))
    order = sampler.order = RecordingOrder([0, 1], [2, 3], [4, 5], [6, 7], [8, 9])  # type: ignore[assignment]
    second_is_done = asyncio.Event()

    async def steps() -> None:
        sampler.open_steps(1, 1)
        sampler.open_steps(2, 2)
        sampler.open[2].jobs[0].flows[0] = asyncio.create_task(second_is_done.wait())  # type: ignore[arg-type]
        sampler.open_steps(3, 3)
        assert order.calls == ["ask [0, 1]", "ask [2, 3]", "ask [4, 5]"]
        await sampler.rollout(1)
        await sampler.rollout(3)
        assert order.calls[3:] == ["tell [0, 1]", "tell [4, 5]"], "step 3 was done before step 2"
        sampler.close(1)
        sampler.open_steps(4, 4)
        await sampler.rollout(4)
        assert order.calls[5:] == ["ask [6, 7]", "tell [6, 7]"], "and nothing of step 2"
        second_is_done.set()
        await sampler.rollout(2)
        assert order.calls[7:] == ["tell [2, 3]"]

    run(steps())


def test_remax_samples_every_prompt_once_more_greedily() -> None:
    sampler = make_sampler({0: MIXED, 1: EQUAL}, "algorithm.adv_estimator=remax")
    result = run(sampler.rollout(1))
    assert result.batch["reward_baseline"].tolist() == [9.0] * 2 * N
    assert len(result.batch) == 2 * N
    greedy = sampler.pump.requests[2:]
    assert [(r.sampling.n, r.sampling.temperature, r.needs_log_probs) for r in greedy] == [(1, 0.0, False)] * 2
    sampler = make_sampler({i: MIXED for i in range(4)}, "algorithm.adv_estimator=remax")
    sampler.pump.failing = {("greedy", 0): "error"}
    result = run(sampler.rollout(1))
    assert uids_of(result) == ["step1-prompt1", "step1-prompt2-try2"], "a group whose greedy episode failed is replaced"


def test_an_order_is_told_of_the_responses_that_have_a_score() -> None:
    sampler = make_sampler({0: [1.0, np.nan, 0, 1], 1: [np.nan] * N})
    order = sampler.order = RecordingOrder([0, 1])  # type: ignore[assignment]
    run(sampler.rollout(1))
    assert order.told == [{0: [1, 0, 1]}]
    sampler = make_sampler({0: [1.0, np.nan, 0, 1], 1: [np.nan] * N})
    curriculum = sampler.order = PassRateCurriculum(sampler.prompts, 2, 0, exploration=0.0, decay=1.0)  # type: ignore[arg-type]
    run(sampler.rollout(1))
    a, b = curriculum.posterior
    assert (a.tolist(), b.tolist()) == ([2.5, 0.5], [1.5, 0.5])


def test_an_order_is_told_scores_without_the_penalty_for_long_responses() -> None:
    """All right, though two are a little too long: else the prompt would not count as solved."""
    sampler = make_sampler({0: [1.0, 0.5, 1, 0.5], 1: [0.0, -1, 0, -1]})
    submit, order = sampler.pump.submit, RecordingOrder([0, 1])

    def penalised(requests: list, **options: Any) -> Any:
        job = submit(requests, **options)
        for i, score in ((0, 1.0), (1, 0.0)):
            job.scores[i].small["unpenalised_score"] = np.full(N, score)
        return job

    sampler.pump.submit, sampler.order = penalised, order  # type: ignore[assignment]
    run(sampler.rollout(1))
    assert order.told == [{0: [1] * N, 1: [0] * N}]


def test_groups_whose_episodes_failed_are_replaced_one_for_one() -> None:
    """Prompt 1 fails; of the next batch in the order one prompt takes its place, and the other is for the next step."""
    sampler = make_sampler({i: MIXED for i in range(4)})
    sampler.pump.failing = {1: "timeout"}
    result = run(sampler.rollout(1))
    assert uids_of(result) == ["step1-prompt0", "step1-prompt2-try2"]
    assert [error.kind for error in result.failed] == ["timeout"]
    # a group of four of three that were sampled
    lost = {"agent/dropped_groups": 1.0, "agent/wasted_episodes": 4 / 12}
    assert result.metrics == {"agent/failures/timeout": 1.0, **lost}
    assert sampler.state_dict()["open"] == {"1": [[0], [2]]}
    sampler.close(1)
    assert uids_of(run(sampler.rollout(2))) == ["step2-prompt3", "step2-prompt0"]


def test_with_over_sampling_failed_prompts_are_not_tried_again_and_no_other_is_lost() -> None:
    """2 train and 1 is spare; of 0, 1, 2 two fail. One is missing: 3 and 4 are sampled, 3 trains, 4 comes again."""
    sampler = make_sampler({i: MIXED for i in range(8)}, OVER)
    sampler.pump.failing = {0: "error", 2: "error"}
    result = run(sampler.rollout(1))
    assert uids_of(result) == ["step1-prompt1", "step1-prompt3-try2"]
    assert sampler.backlog[0] == 4


def test_a_batch_of_which_every_response_failed_is_dropped() -> None:
    """The reward function has returned nothing, so nothing says that it never returns `fluency`."""
    sampler = make_sampler({0: MIXED, 1: MIXED, 2: MIXED, 3: MIXED}, FILTER, "algorithm.filter_groups.metric=acc")
    submit, jobs = sampler.pump.submit, []

    def fail_at_first(requests: list, **options: Any) -> Any:
        job = submit(requests, **options)
        if not jobs:
            job.unscored = dict.fromkeys(range(2), ["it failed"] * N)
            for scores in job.scores.values():
                del scores.small["reward_extra/acc"]
        jobs.append(job)
        return job

    sampler.pump.submit = fail_at_first
    result = run(sampler.rollout(1))
    assert uids_of(result) == ["step1-prompt2-try2", "step1-prompt3-try2"]


def test_dapo_filters_by_right_and_wrong_not_by_the_punished_score() -> None:
    """Prompts 0 and 1: all right, of which some are too long. 2 and 3: mixed, and one response could not be scored."""
    right, mixed = [1.0, 0.5, 1.0, 0.2], [1.0, -0.5, 0.0, 0.0]
    sampler = make_sampler({0: right, 1: right, 2: mixed, 3: mixed}, "+recipe=dapo")
    accuracies = {0: [1.0] * 4, 1: [1.0] * 4, 2: [1.0, 0.0, np.nan, 0.0], 3: [np.nan, 0.0, 1.0, 1.0]}
    sampler.pump.accuracies = accuracies
    result = run(sampler.rollout(1))
    assert uids_of(result) == ["step1-prompt2-try2", "step1-prompt3-try2"]
    assert result.metrics == filtered(2, 1 / 2, 4)


def test_smaller_batches_are_sampled_until_there_are_enough() -> None:
    """One at a time for a batch of two."""
    sampler = make_sampler({0: MIXED, 1: EQUAL, 2: MIXED}, FILTER, "data.gen_batch_size=1")
    sampler.order = PromptSampler(3, 1, shuffle=False, seed=0)
    result = run(sampler.rollout(1))
    assert uids_of(result) == ["step1-prompt0", "step1-prompt2-try3"]


def test_steps_are_opened_in_order_and_each_prompt_is_drawn_once() -> None:
    sampler = make_sampler(dict.fromkeys(range(6), MIXED))
    open_steps(sampler, 1, 3)
    assert [sampler.open[step].drawn for step in (1, 2, 3)] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    open_steps(sampler, 1, 3)
    assert len(sampler.pump.requests) == 6, "open steps are not sampled again"
    results = [run(sampler.rollout(step)) for step in (1, 2, 3)]
    assert list(sampler.open) == [1, 2, 3], "they have not trained yet"
    for step in (1, 2, 3):
        sampler.close(step)
    uids = [request.uid for result in results for request in result.requests]
    assert uids == [f"step{1 + i // 2}-prompt{i}" for i in range(6)]
    assert sampler.open == {}


def test_the_slowest_of_an_over_sampled_batch_are_ended_and_come_first_in_the_next() -> None:
    sampler = make_sampler(dict.fromkeys(range(8), MIXED), OVER)
    sampler.pump.late = (1,)
    result = run(sampler.rollout(1))
    assert uids_of(result) == ["step1-prompt0", "step1-prompt2"]
    assert result.metrics == {"train/aborted_groups": 1}
    assert sampler.backlog == [1, 3], "1 was ended, 3 was drawn with the others"
    assert sampler.pump.held() == ["step1-prompt0", "step1-prompt2"], "3 was there, and will be sampled again"
    sampler.pump.late = ()
    assert uids_of(run(sampler.rollout(2))) == ["step2-prompt1", "step2-prompt3"]
    assert sampler.backlog == [4, 5], "4 was ready too, and one too many"


def test_an_over_sampled_batch_never_has_a_prompt_twice() -> None:
    """4 prompts, 2 + 1 a batch, drawn two at a time: after an epoch the backlog has prompts that come again."""
    sampler = make_sampler(dict.fromkeys(range(4), MIXED), OVER)
    for step in range(1, 9):
        open_steps(sampler, step, step)
        assert len(set(sampler.open[step].drawn[0])) == 3
        run(sampler.rollout(step))
    too_few = make_sampler(dict.fromkeys(range(2), MIXED), OVER)
    with refuses(DataError, "actor_rollout_ref.rollout.over_sample_rate", 3, 2, "data.train_batch_size"):
        run(too_few.rollout(1))


def test_over_sampling_takes_a_prompt_only_with_its_greedy_baseline() -> None:
    """Of 3 prompts the second one's baseline (the fifth request) is late."""
    overrides = (OVER, "algorithm.adv_estimator=remax")
    sampler = make_sampler(dict.fromkeys(range(8), MIXED), *overrides)
    sampler.pump.late = (4,)
    result = run(sampler.rollout(1))
    uids = ["step1-prompt0", "step1-prompt2"]
    assert uids_of(result) == uids
    assert result.metrics == {"train/aborted_groups": 1}
    assert sampler.pump.held() == [*uids, *(f"{uid}-greedy" for uid in uids)], "a checkpoint needs these baselines"
