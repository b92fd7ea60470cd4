"""Dynamic sampling and greedy baselines, on a pump that answers at once."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, patch

import numpy as np
import pytest

from grpo_dist.data.sampler import PassRateCurriculum, PromptSampler
from grpo_dist.errors import AgentError, DataError, DataLost, GrpoDistError, RewardError
from grpo_dist.runtime.event_loop import blocking, run
from grpo_dist.trainer.rollout.job import RolloutJob
from grpo_dist.trainer.rollout.pump import RolloutPump
from grpo_dist.trainer.rollout.sampling import OpenStep, TrainingSampler
from tests.messages import refuses
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

NONE = [float("nan")] * N
OVER = "actor_rollout_ref.rollout.over_sample_rate=0.5"


def uids_of(result: Any) -> list[str]:
    """The groups that train."""
    return [request.uid for request in result.requests]


def filtered(num_batches: int, share: float, num_groups: int) -> dict[str, float]:
    """The metrics of filtering, of responses of 3 tokens."""
    names = (f"train/{name}" for name in ("num_gen_batches", "filtered_groups", "sampled_tokens"))
    return dict(zip(names, (num_batches, share, num_groups * N * 3), strict=True))


@pytest.mark.parametrize("told", [True, False], ids=["by the data", "by the machine"])
def test_what_a_lost_machine_had_is_sampled_again_as_it_was(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What still runs ends first: its engines would take the same names for the same groups."""
    sampler, ended = make_sampler([MIXED, EQUAL, MIXED, MIXED]), AsyncMock()

    async def finished(job: RolloutJob) -> None:
        if not ended.called:
            sampler.pump.machines_lost = 1  # type: ignore[misc]
            if told:
                raise DataLost("a group is gone")

    monkeypatch.setattr(RolloutJob, "finished", finished)
    monkeypatch.setattr(RolloutJob, "ended", ended)
    result = run(sampler.rollout(1))
    first, second = (sampler.pump.requests[:2], sampler.pump.requests[2:])
    assert [(each.uid, each.sampling) for each in first] == [(each.uid, each.sampling) for each in second]
    assert result.batch["score"].tolist() == MIXED + EQUAL
    assert (ended.call_count, result.num_responses) == (1, 2 * N)
    assert list(sampler.order.next_batch()) == [2, 3], "no prompt is skipped"


def test_with_spare_prompts_others_might_be_chosen_so_lost_data_are_told() -> None:
    with patch.object(RolloutJob, "finished", side_effect=DataLost("a group is gone")), pytest.raises(DataLost):
        run(make_sampler([MIXED] * 6, OVER).rollout(1))


def test_a_first_step_that_no_function_judges_ends_the_run() -> None:
    """Of a later one, or of some groups, it may be so."""
    with refuses(RewardError, "custom_reward_function.path", "None", "step 1"):
        run(make_sampler([NONE, NONE]).rollout(1))
    assert np.isnan(run(make_sampler([NONE, MIXED]).rollout(1)).batch["score"]).sum() == N
    assert np.isnan(run(make_sampler([NONE, NONE]).rollout(2)).batch["score"]).all()


def test_groups_that_teach_nothing_are_replaced() -> None:
    """Prompts 0, 1: one is equal. 2, 3: both differ, of which one fills the batch and one is too many."""
    sampler = make_sampler([EQUAL, MIXED, MIXED, MIXED], FILTER)
    order = sampler.order = RecordingOrder([0, 1], [2, 3])  # type: ignore[assignment]
    result = run(sampler.rollout(1))
    assert uids_of(result) == ["step1-prompt1", "step1-prompt2-try2"]
    assert order.told == [{0: EQUAL, 1: MIXED}, {2: MIXED, 3: MIXED}], "of every group, dropped or not"
    assert result.batch["score"].tolist() == MIXED + MIXED
    assert result.metrics == filtered(2, 1 / 4, 4)
    assert result.timings == {"gen": 2.0}
    assert len({request.sampling.seed for request in sampler.pump.requests}) == 4
    again = run(make_sampler([EQUAL, MIXED], FILTER).rollout(1))
    assert uids_of(again) == ["step1-prompt1", "step1-prompt1-try2"], "it comes again within the step"
    assert len({request.sampling.seed for request in again.requests}) == 2
    one_by_one = make_sampler([MIXED, EQUAL, MIXED], FILTER, "data.gen_batch_size=1")
    one_by_one.order = PromptSampler(3, 1, shuffle=False, seed=0)
    assert uids_of(run(one_by_one.rollout(1))) == ["step1-prompt0", "step1-prompt2-try3"]
    key = "algorithm.filter_groups.max_num_gen_batches=2"
    with refuses(GrpoDistError, key, "4 groups", "step 1", "1 of the 2", "score"):
        run(make_sampler([EQUAL, MIXED, EQUAL, EQUAL], FILTER, key).rollout(1))


def test_dropped_groups_are_let_go_when_their_batch_of_prompts_is_complete() -> None:
    """Prompts 0, 1 | 2, 3 | 4, 5: three groups are equal, and prompt 5 is one too many."""
    scores = [EQUAL, MIXED, EQUAL, EQUAL, MIXED, MIXED]
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


async def test_when_an_order_is_asked_and_told_where_the_run_samples_ahead() -> None:
    """As `trainer.max_staleness=2` opens steps: the batch of step s when step s - 3 has trained."""
    sampler, second_is_done = make_sampler([MIXED] * 10), asyncio.Event()
    order = sampler.order = RecordingOrder([0, 1], [2, 3], [4, 5], [6, 7], [8, 9])  # type: ignore[assignment]
    sampler.open_steps(1, 2)
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


def test_remax_samples_every_prompt_once_more_greedily() -> None:
    sampler = make_sampler([MIXED, EQUAL], "algorithm.adv_estimator=remax")
    assert run(sampler.rollout(1)).batch["reward_baseline"].tolist() == [9.0] * 2 * N
    greedy = sampler.pump.requests[2:]
    assert [(r.sampling.n, r.sampling.temperature, r.needs_log_probs) for r in greedy] == [(1, 0.0, False)] * 2
    sampler = make_sampler([MIXED] * 4, "algorithm.adv_estimator=remax")
    sampler.pump.failing = {("greedy", 0): "error"}
    result = run(sampler.rollout(1))
    assert uids_of(result) == ["step1-prompt1", "step1-prompt2-try2"], "a group whose greedy episode failed is replaced"


def test_an_order_is_told_of_the_responses_that_have_a_score() -> None:
    scores = [[1.0, np.nan, 0, 1], NONE]
    sampler = make_sampler(scores)
    order = sampler.order = RecordingOrder([0, 1])  # type: ignore[assignment]
    run(sampler.rollout(1))
    assert order.told == [{0: [1, 0, 1]}]
    sampler = make_sampler(scores)
    curriculum = sampler.order = PassRateCurriculum(sampler.prompts, 2, 0, exploration=0.0, decay=1.0)  # type: ignore[arg-type]
    run(sampler.rollout(1))
    assert [part.tolist() for part in curriculum.posterior] == [[2.5, 0.5], [1.5, 0.5]]


def test_an_order_is_told_scores_without_the_penalty_for_long_responses() -> None:
    """All right, though two are a little too long: else the prompt would not count as solved."""
    sampler = make_sampler([[1.0, 0.5, 1, 0.5], [0.0, -1, 0, -1]])

    def penalised(job: RolloutJob) -> None:
        for i, score in ((0, 1.0), (1, 0.0)):
            job.scores[i].small["unpenalised_score"] = np.full(N, score)

    sampler.pump.change = penalised
    order = sampler.order = RecordingOrder([0, 1])  # type: ignore[assignment]
    run(sampler.rollout(1))
    assert order.told == [{0: [1] * N, 1: [0] * N}]


def test_groups_whose_episodes_failed_are_replaced_one_for_one() -> None:
    """Prompt 1 fails; of the next batch in the order one prompt takes its place, and the other is for the next step."""
    sampler = make_sampler([MIXED] * 4)
    sampler.pump.failing = {1: "timeout"}
    result = run(sampler.rollout(1))
    assert uids_of(result) == ["step1-prompt0", "step1-prompt2-try2"]
    assert [error.kind for error in result.failed] == ["timeout"]
    lost = {"agent/dropped_groups": 1.0, "agent/wasted_episodes": 4 / 12}  # one group of three, of four episodes each
    assert result.metrics == {"agent/failures/timeout": 1.0, **lost}
    assert sampler.state_dict()["open"] == {"1": [[0], [2]]}
    sampler.close(1)
    assert uids_of(run(sampler.rollout(2))) == ["step2-prompt3", "step2-prompt0"]


def test_with_over_sampling_failed_prompts_are_not_tried_again_and_no_other_is_lost() -> None:
    """2 train and 1 is spare; of 0, 1, 2 two fail. One is missing: 3 and 4 are sampled, 3 trains, 4 comes again."""
    sampler = make_sampler([MIXED] * 8, OVER)
    sampler.pump.failing = {0: "error", 2: "error"}
    result = run(sampler.rollout(1))
    assert uids_of(result) == ["step1-prompt1", "step1-prompt3-try2"]
    assert sampler.backlog[0] == 4


def test_a_batch_of_which_every_response_failed_is_dropped() -> None:
    """The reward function has returned nothing, so nothing says that it never returns `acc`."""
    sampler = make_sampler([MIXED] * 4, FILTER, "algorithm.filter_groups.metric=acc")

    def fail_at_first(job: RolloutJob) -> None:
        if "try" not in job.requests[0].uid:
            job.unscored = dict.fromkeys(range(2), ["it failed"] * N)
            for scores in job.scores.values():
                del scores.small["reward_extra/acc"]

    sampler.pump.change = fail_at_first
    assert uids_of(run(sampler.rollout(1))) == ["step1-prompt2-try2", "step1-prompt3-try2"]


def test_the_slowest_of_an_over_sampled_batch_are_ended_and_come_first_in_the_next() -> None:
    sampler = make_sampler([MIXED] * 8, OVER)
    sampler.pump.late = (1,)
    result, uids = run(sampler.rollout(1)), ["step1-prompt0", "step1-prompt2"]
    assert (uids_of(result), result.metrics) == (uids, {"train/aborted_groups": 1})
    ledger = sampler.state_dict()
    assert (ledger["open"], ledger["backlog"]) == ({"1": [[0, 2]]}, [1, 3]), "1 was ended, 3 was drawn with the others"
    assert sampler.pump.held() == uids, "3 was there, and will be sampled again"
    sampler.pump.late = ()
    assert uids_of(run(sampler.rollout(2))) == ["step2-prompt1", "step2-prompt3"]
    assert sampler.backlog == [4, 5], "4 was ready too, and one too many"


def test_no_prompt_is_lost_or_trains_twice_where_steps_that_are_ahead_leave_some() -> None:
    """Steps 1 and 2 were drawn before one of them was done: what they leave comes first in step 3."""
    sampler = make_sampler([MIXED] * 12, OVER)
    sampler.pump.late = (1,)
    open_steps(sampler, 1, 2)
    trained = [uids_of(run(sampler.rollout(step))) for step in (1, 2)]
    assert trained == [["step1-prompt0", "step1-prompt2"], ["step2-prompt3", "step2-prompt5"]]
    sampler.pump.late = ()
    assert uids_of(run(sampler.rollout(3))) == ["step3-prompt4", "step3-prompt1"]
    assert sampler.backlog == [6, 7], "drawn with them"


def test_an_over_sampled_batch_never_has_a_prompt_twice() -> None:
    """4 prompts, 2 + 1 a batch, drawn two at a time: after an epoch the backlog has prompts that come again."""
    sampler = make_sampler([MIXED] * 4, OVER)
    for step in range(1, 9):
        open_steps(sampler, step, step)
        assert len(set(sampler.open[step].drawn[0])) == 3
        run(sampler.rollout(step))
    with refuses(DataError, "actor_rollout_ref.rollout.over_sample_rate", 3, 2, "data.train_batch_size"):
        run(make_sampler([MIXED] * 2, OVER).rollout(1))


def test_over_sampling_takes_a_prompt_only_with_its_greedy_baseline() -> None:
    """Of 3 prompts the second one's baseline (the fifth request) is late."""
    sampler = make_sampler([MIXED] * 8, OVER, "algorithm.adv_estimator=remax")
    sampler.pump.late = (4,)
    result, uids = run(sampler.rollout(1)), ["step1-prompt0", "step1-prompt2"]
    assert (uids_of(result), result.metrics) == (uids, {"train/aborted_groups": 1})
    assert sampler.pump.held() == [*uids, *(f"{uid}-greedy" for uid in uids)], "a checkpoint needs these baselines"


# --- what a run that is taken up again knows of the steps that were open: prompts, finished groups, what was told
def after_step_1(scores: list[list[float]], last: int) -> TrainingSampler:
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


@pytest.mark.parametrize(("last", "dropped", "surplus"), [(MIXED, 3, 1), (EQUAL, 4, 0)])
def test_what_a_filter_dropped_is_not_sampled_again_after_a_resume(last: list, dropped: int, surplus: int) -> None:
    """Of prompts 0, 1 | 2, 3 | 4, 5 the second batch has no group left; nothing is in flight that would wake the pump,
    and any question to engines or reward processes would fail.
    """
    scores = [EQUAL, MIXED, EQUAL, EQUAL, MIXED, last]
    before = make_sampler(scores, FILTER)
    sampled = run(before.rollout(1))
    ledger = before.state_dict()
    assert ledger["open"] == {"1": [[1], [], [4]]}
    assert (ledger["num_filtered"], ledger["num_surplus"]) == ({"1": dropped}, {"1": surplus})
    after = resumed_sampler(before, scores, FILTER, with_groups=True)
    after.order.update = lambda scores: pytest.fail("it was told")  # type: ignore[method-assign]
    nobody: Any = SimpleNamespace(restarts=SimpleNamespace(machines_lost=0))
    after.pump = RolloutPump(nobody, nobody, {}, reward_timeout_s=1.0)
    result = run(after.rollout(1))
    assert (uids_of(result), result.metrics) == (uids_of(sampled), sampled.metrics)


def test_the_ledger_brings_back_what_was_drawn_and_has_not_trained() -> None:
    before = after_step_1([MIXED] * 8, 3)
    counts = {"num_learned": {"2": 1, "3": 1}}
    counts |= {name: {"2": 0, "3": 0} for name in ("num_filtered", "num_surplus", "num_dropped_tokens")}
    rest = {"backlog": [], "learned": [], "batch_sizes": [2, None, 0], "failed": {}, "num_episodes": [0, 0]}
    assert before.state_dict() == {"open": {"2": [[2, 3]], "3": [[4, 5]]}, **counts, **rest}
    after = resumed_sampler(before, [MIXED] * 8)
    open_steps(after, 2, 4)
    resumed = [request for step in (2, 3, 4) for request in run(after.rollout(step)).requests]
    assert [request.uid for request in resumed] == [f"step{2 + i // 2}-prompt{2 + i}" for i in range(6)]
    assert [r.sampling.seed for r in resumed[:4]] == [r.sampling.seed for r in before.pump.requests[2:]]


@pytest.mark.parametrize("short", [MIXED, MIXED[:2]], ids=["whole groups", "one that lacks two episodes"])
def test_finished_groups_of_open_steps_are_not_sampled_again(short: list[float]) -> None:
    scores = [*[MIXED] * 4, short, *[MIXED] * 3]
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
    uids = [uid for result in results for uid in uids_of(result)]
    assert uids == [f"step{1 + i // 2}-prompt{i}" for i in range(2, 8)]
    assert kept[0].small["uid"].tolist() == results[1].batch["uid"][len(short) :].tolist()
    assert [len(result.batch) for result in results] == [2 * N, len(short) + N, 2 * N]
    assert finished[1].describe()["rows"]["step3-prompt4"] == len(short), "as a checkpoint describes it"


def test_what_failed_of_finished_groups_is_told_after_a_resume_too() -> None:
    """Of step 2 the pump has begun 2 * N episodes; one group is there, with two failed attempts, the other is not."""
    scores = [MIXED] * 4
    before = after_step_1(scores, 1)
    open_unfinished(before, 2, 1)
    (job,) = before.open[2].jobs
    gone, job.unscored = AgentError("gone", "error", was_last=True), {0: ["it raised"]}
    job.failed_attempts |= {0: [AgentError("slow", "timeout"), gone], 1: [gone]}
    before.pump.num_episodes, before.pump.num_failed_episodes = 4 * N, 5
    assert before.state_dict()["num_episodes"] == [3 * N, 4], "those of the other group begin anew"
    after = resumed_sampler(before, scores, with_groups=True)
    result = run(after.rollout(2))
    assert (after.pump.num_episodes, after.pump.num_failed_episodes) == (3 * N, 4)
    assert result.failures == ["it raised"]
    named = ("failures/timeout", "failures/error", "missing_episodes", "wasted_episodes")
    assert [result.metrics.get(f"agent/{name}") for name in named] == [1, 1, 1, 2 / (2 * N + 1)]
    after.close(2)
    assert after.state_dict()["failed"] == {}


def test_an_order_learns_from_each_batch_once_with_other_batch_sizes_too() -> None:
    """Batches of two: step 2 with prompts 2 and 3 was told, step 3 with 4 and 5 was not. Then batches are of three."""
    scores = [MIXED] * 9
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
