from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.targets import TargetSettings
from grpo_dist.algorithms.validation import pred_ids
from grpo_dist.data import Prompt, TokenizedPrompt
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import BatchError, ConfigError, DataError, RewardError
from grpo_dist.plan.commands import load_config
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.rewards.contract import RewardResult, Sample
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.trainer.rollout.job import make_request
from grpo_dist.workers.reward import RewardWorker
from grpo_dist.workers.scorer import OverlongPenalty, RewardSettings, TeacherPrompts, on_agents, on_last_token
from tests.messages import refuses, says
from tests.workers.local_reward import RESPONSES, SCORER, TASK, Local, put, rows


# --- on_last_token -----------------------------------------------------------------------------------------------
def test_on_last_token() -> None:
    responses = Ragged.from_rows([[5, 6, 7], [], [8]], torch.int32)
    placed = on_last_token(torch.tensor([1.5, 9.0, -2.0]), responses)
    assert rows(placed) == [[0, 0, 1.5], [], [-2.0]]
    assert placed.values.dtype == torch.float32


def test_on_last_token_of_nothing() -> None:
    assert len(on_last_token(torch.empty(0), Ragged.from_rows([], torch.int32))) == 0


def test_on_the_last_token_that_trains() -> None:
    """Not on what an environment put in behind it; where nothing trains, on the last token."""
    responses = Ragged.from_rows([[5, 6, 7], [], [8, 9], [8, 9]], torch.int32)
    masks = Ragged.from_rows([[1, 0, 0], [], [0, 1], [0, 0]], torch.int8)
    placed = on_last_token(torch.tensor([1.5, 9.0, -2.0, 3.0]), responses, masks)
    assert rows(placed) == [[1.5, 0, 0], [], [0, -2.0], [0, 3.0]]


def test_each_agent_has_its_steps_rewards_or_the_episodes_on_its_last_token() -> None:
    """Agents 4 and 7; in the second episode 4 has rewards of its own; the third has sampled nothing."""
    nan = math.nan
    columns = {
        "agent_ids": Ragged.from_rows([[7, 0, 4, 7], [4, 7, 4], [0], []], torch.int32),
        "episode_step_rewards": Ragged.from_rows([[nan] * 4, [0.5, nan, 0.25], [nan], []], torch.float32),
    }
    data, penalties = DataProto.from_dict(columns), torch.tensor([-0.5, 0, -1, -1])
    rewards, mask = on_agents(torch.tensor([2.0, 3, 4, 5]), penalties, data["agent_ids"], data["episode_step_rewards"])
    assert rows(rewards) == [[0, 0, 1.5, 1.5], [0.5, 3, 0.25], [0], []]
    assert rows(mask) == [[0, 0, 1, 1], [1, 1, 1], [0], []]
    assert data["episode_step_rewards"].values.isnan().sum() == 6, "what was given stands as it is"


# --- score -------------------------------------------------------------------------------------------------------
@pytest.mark.ray
def test_scores_and_extra_values(worker: Local) -> None:
    """Word counts 2, 1, 1 (the end is a special token); w5 first earns 10 more."""
    handle, failures, printed = worker.score(put(RESPONSES), TASK)
    assert not failures
    assert printed == ([], 0)
    assert handle["score"].tolist() == [12, 1, 11]
    assert handle["reward_extra/hit"].tolist() == [1, 0, 1]
    assert handle["reward_extra/seen"].tolist() == [3, 3, 3]
    assert "reward_extra/text" not in handle.small
    assert rows(handle.fetch(("token_level_scores",))["token_level_scores"]) == [[0, 0, 12], [0, 1], [11]]


@pytest.mark.ray
def test_what_an_environment_put_in_is_read_and_earns_nothing(worker: Local) -> None:
    """All words count; the reward sits where the policy can be blamed for it, and the advantage is a mean over that."""
    scored, *_ = worker.score(put([[5, 6, 7], [6, 2]], [[1, 1, 0], [1, 1]]), TASK)
    assert scored["score"].tolist() == [13, 1]
    assert rows(scored.fetch(("token_level_scores",))["token_level_scores"]) == [[0, 13, 0], [0, 1]]
    columns = {
        "response_mask": Ragged.from_rows([[1, 1, 0], [1, 1]], torch.int8),
        "rollout_log_probs": Ragged.from_rows([[-1.0, -1.0, 0.0], [-1.0, -1.0]], torch.float32),
    }
    rest = DataProtoRef.put(DataProto.from_dict(columns, {"uid": ["a", "a"]}))
    batch = scored.union(replace(rest, small=rest.small | {"truncated": np.zeros(2)}))
    settings = TargetSettings("grpo", {"norm_adv_by_std_in_grpo": False}, old_log_probs_from="rollout")
    targets, _ = worker.compute_targets(batch, settings, 0.0, 0)
    assert rows(targets.fetch(("advantages",))["advantages"]) == [[6, 6, 0], [-6, -6]]
    assert targets["advantage_mean"].tolist() == [6, -6]


@pytest.mark.ray
def test_groups_with_different_extra_values_join(worker: Local) -> None:
    """Only responses that begin with w5 report `lucky`; the second group has none."""
    both = DataProtoRef.concat([worker.score(put(group), TASK)[0] for group in (RESPONSES, RESPONSES[1:2])])
    assert np.array_equal(both["reward_extra/lucky"], [1, np.nan, 1, np.nan], equal_nan=True)
    assert [len(row) for row in rows(both.fetch(("token_level_scores",))["token_level_scores"])] == [3, 2, 1, 2]


@pytest.mark.ray
def test_a_response_that_the_function_fails_on(worker: Local) -> None:
    """It earns `failure_score`, the others what they earn; why is told."""
    task = replace(TASK, messages=[{"role": "user", "content": "Two words?"}])
    handle, (failure,), _ = worker.score(put([[5, 2], [6, 13], [6, 2]]), task)
    assert handle["score"].tolist() == [11, -0.5, 1]
    assert np.array_equal(handle["reward_extra/hit"], [1, np.nan, 0], equal_nan=True)
    assert re.search(r"data_source='words' raised ValueError: unlucky(.|\n)*w6 w13", failure)
    says(failure, "prompt: 'Two words?'")
    with pytest.raises(BatchError, match=r"'responses' \(made by rollout\)"):
        worker.score(DataProtoRef(), TASK)


@pytest.mark.ray
def test_the_teachers_prompts_of_a_policy_that_teaches_itself(worker: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores 12, 1, 11: of the two with w5 first each is shown the other one; the text is the function's own."""
    forms = {"success_template": " w20 {text}", "feedback_template": " w21 {text}"}
    section = load_config([])[0].algorithm.self_distillation.replaced(success_threshold=11, **forms)
    monkeypatch.setattr(worker, "teacher_prompts", TeacherPrompts(section, worker.tokenizer, {}))
    task = replace(TASK, messages=[{"role": "user", "content": "w9"}])
    columns = ("teacher_prompts", "teacher_mask")
    read = worker.score(put(RESPONSES), task)[0].fetch(columns)
    assert rows(read["teacher_prompts"]) == [[9, 20, 5], [9, 20, 5], [9, 20, 5, 6]]
    assert rows(read["teacher_mask"]) == [[1, 1, 1], [1, 1], [1]]

    alone = section.replaced(success_threshold=None, feedback_name="text")
    monkeypatch.setattr(worker, "teacher_prompts", TeacherPrompts(alone, worker.tokenizer, {}))
    read = worker.score(put([[5, 6, 2], [2]]), task)[0].fetch(columns)
    assert rows(read["teacher_prompts"]) == [[9, 21, 5, 6], []], "nothing is said of an empty response"
    assert rows(read["teacher_mask"]) == [[1, 1, 1], [0]]

    of_row = alone.replaced(feedback_name="solution")
    monkeypatch.setattr(worker, "teacher_prompts", TeacherPrompts(of_row, worker.tokenizer, {}))
    with_solution = replace(task, extra_info={"index": 3, "solution": "w7"})
    read = worker.score(put([[5, 2]]), with_solution)[0].fetch(columns)
    assert rows(read["teacher_prompts"]) == [[9, 21, 7]]
    assert not set(columns) & set(worker.score(put([[5, 2]]), replace(with_solution, validation=True))[0].columns)


NAN = float("nan")


@pytest.mark.ray
def test_the_reward_of_an_episode_stands_in_place_of_the_functions(worker: Local) -> None:
    """The second response has brought none: the function scores it, and is not asked for the first, which has w13."""
    handle, failures, _ = worker.score(put([[5, 13, 2], [6, 2]], rewards=[0.25, NAN]), TASK)
    assert not failures
    assert handle["score"].tolist() == [0.25, 1]
    assert np.array_equal(handle["reward_extra/hit"], [np.nan, 0], equal_nan=True)
    assert rows(handle.fetch(("token_level_scores",))["token_level_scores"]) == [[0, 0, 0.25], [0, 1]]


@pytest.mark.ray
def test_the_functions_score_is_added_with_its_weight(worker: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 and 1 are the function's; one that it fails on has no more than the failure's score."""
    monkeypatch.setattr(worker, "function_weight", 0.5)
    handle, failures, _ = worker.score(put([[5, 6, 2], [6, 2], [13, 2]], rewards=[0.25, -1.0, 0.0]), TASK)
    assert handle["score"].tolist() == [6.25, -0.5, -0.25]
    assert len(failures) == 1
    assert handle["reward_extra/hit"].tolist()[:2] == [1, 0]


@pytest.mark.ray
def test_gigpo_tells_turns_apart_by_the_rewards_of_their_own(worker: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of rewards 1, 0 and 0, 1 behind the same words: as many for each episode, and 1/2 for the second turns."""
    for by_agent in (False, True):
        monkeypatch.setattr(worker, "by_turn", True)
        monkeypatch.setattr(worker, "by_agent", by_agent)
        tokens, masks, plain = [[5, 9, 6], [6, 9, 5]], [[1, 0, 1]] * 2, [-1.0, 0, -1.0]
        given = put(tokens, masks, rewards=[1.0, 1.0], steps=[[1.0, NAN, 0.0], [0.0, NAN, 1.0]])
        rest: dict[str, Any] = {"rollout_log_probs": Ragged.from_rows([plain] * 2, torch.float32)}
        rest["predecessors"] = Ragged.from_rows([[-1, 0, 1]] * 2, torch.int32)
        rest["agent_ids"] = Ragged.from_rows([[1, 0, 1]] * 2, torch.int32)
        given = given.union(DataProtoRef.put(DataProto.from_dict(rest, {"uid": ["a", "a"]})))
        scored, *_ = worker.score(given, TASK)
        batch = scored.union(replace(given, small=given.small | {"truncated": np.zeros(2)}))
        options = {"norm_adv_by_std_in_grpo": False}
        settings = TargetSettings("gigpo", options, old_log_probs_from="rollout", by_agent=by_agent)
        advantages = worker.compute_targets(batch, settings, 0.0, 0)[0].fetch(("advantages",))["advantages"]
        assert rows(advantages) == [[0, 0, -0.5], [0, 0, 0.5]]
    monkeypatch.setattr(worker, "by_agent", False)
    whole, *_ = worker.score(put([[5, 9, 2]], rewards=[3.0]), TASK)
    assert rows(whole.fetch(("token_level_scores",))["token_level_scores"]) == [[0, 0, 3]], "no turn has one of its own"


@pytest.mark.ray
def test_rewards_of_steps_stand_where_the_episode_gave_them(worker: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second response has one reward, which is a step's: the last token's."""
    monkeypatch.setattr(worker, "step_separator", " ")
    steps = [[0.5, NAN, -2.0], [NAN, NAN]]
    scored, *_ = worker.score(put([[5, 6, 2], [6, 2]], rewards=[-1.5, 3.0], steps=steps), TASK)
    assert scored["score"].tolist() == [-1.5, 3]
    found = scored.fetch(("token_level_scores", "step_mask"))
    assert rows(found["token_level_scores"]) == [[0.5, 0, -2], [0, 3]]
    assert rows(found["step_mask"]) == [[1, 0, 1], [0, 1]]


class Here:
    """Stands for the handle of a group, whose columns are in this process."""

    def __init__(self, responses: list[list[int]]) -> None:
        masks = [[1] * len(response) for response in responses]
        log_probs = [[-1.0] * len(response) for response in responses]
        columns = {
            "responses": Ragged.from_rows(responses, torch.int32),
            "response_mask": Ragged.from_rows(masks, torch.int8),
            "rollout_log_probs": Ragged.from_rows(log_probs, torch.float32),
        }
        self.data = DataProto.from_dict(columns, {"uid": ["a"] * len(responses)})
        self.columns = tuple(columns)
        self.small: dict[str, np.ndarray] = {"truncated": np.zeros(len(responses))}

    def fetch(self, columns: tuple[str, ...]) -> DataProto:
        return self.data.select(columns)


@pytest.mark.parametrize("failure_score", [None, 0.0, -0.5])
@pytest.mark.parametrize("separator", [None, " "])
def test_a_failed_response_has_the_score_that_was_set_or_none(
    random_models: dict[str, str], tmp_path: Path, failure_score: float | None, separator: str | None
) -> None:
    """Also where steps have scores, and for validation; the reason is a column."""
    (tmp_path / "scorer.py").write_text(SCORER)
    worker = RewardWorker()
    settings = RewardSettings(random_models["tied"], False, f"{tmp_path}/scorer.py", "compute_score", {"bonus": 10})
    worker.start(replace(settings, failure_score=failure_score, step_separator=separator))
    expected = [11, np.nan if failure_score is None else failure_score, 1]
    try:
        for validation in (False, True):
            group: Any = Here([[5, 2], [6, 13], [6, 2]])
            ([(label, failures)], *_), data = worker.score(group, [3], [replace(TASK, validation=validation)])
            np.testing.assert_array_equal(label.small["score"], np.array(expected, np.float32))
            sums = [float(row.sum()) for row in data["token_level_scores"].rows()]
            np.testing.assert_array_equal(sums, expected)
            assert "failed" in label.small if validation else "failed" not in label.small
            assert len(failures) == 1
            assert data["failure"].tolist() == ["", failures[0], ""]
            says(failures[0], "'words'", "ValueError: unlucky")
    finally:
        worker.scorer.stop()


def test_what_an_estimator_prints_comes_with_its_advantages(tmp_path: Path) -> None:
    """Of a group of -3, none, -1: mean -2. The reward of the one without a score is none either."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def centred(batch, config):\n"
        "    print('scores', batch.scores.tolist())\n"
        "    values = batch.on_tokens(batch.groups.normalise(batch.scores, by_std=False))\n"
        "    return values, values\n"
    )
    batch: Any = Here([[5, 2], [6], [7, 8]])
    scores = torch.tensor([-3, np.nan, -1])
    batch.data = batch.data.union(DataProto({"token_level_scores": on_last_token(scores, batch.data["responses"])}))
    batch.small["score"] = scores.numpy()
    settings = TargetSettings(f"{file}:centred", old_log_probs_from="rollout")
    worker = RewardWorker()
    (label, metrics, printed), data = worker.compute_targets(batch, settings, 0.0, 0)
    assert printed == (["scores [-3.0, -1.0]"], 0)
    assert worker.take_printed() == ([], 0)
    assert rows(data["advantages"]) == [[-1, -1], [0], [1, 1]]
    assert rows(data["response_mask"]) == [[1, 1], [0], [1, 1]]
    np.testing.assert_array_equal(label.small["reward"], [-3, np.nan, -1])
    assert label.small["advantage_mean"].tolist() == [-1, 0, 1]
    assert metrics["critic/advantages/mean"] == 0


@pytest.mark.ray
def test_start_names_what_is_wrong(random_models: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json"):
        RewardWorker().start(RewardSettings(str(tmp_path), False, None, "compute_score", {}))
    with pytest.raises(ConfigError, match=r"absent\.py"):
        RewardWorker().start(RewardSettings(random_models["tied"], False, f"{tmp_path}/absent.py", "f", {}))


def test_equal_answers_have_equal_numbers() -> None:
    ids = pred_ids(["7", None, "8", "7"])
    assert ids.dtype == np.float32
    assert np.array_equal(ids, [0, np.nan, 2, 0], equal_nan=True)


@pytest.mark.ray
def test_answers_travel_as_numbers_and_only_for_validation(
    local_ray: None, random_models: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "first.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 1, 'pred': solution_str.split()[0] if extra_info['index'] else None}\n"
    )
    worker = Local()
    worker.start(RewardSettings(random_models["tied"], False, str(tmp_path / "first.py"), "compute_score", {}))
    validation = replace(TASK, validation=True)
    assert worker.score(put(RESPONSES), validation)[0]["pred_id"].tolist() == [0, 1, 0]
    assert "pred_id" not in worker.score(put(RESPONSES), TASK)[0].small
    silent, *_ = worker.score(put(RESPONSES), replace(validation, extra_info={"index": 0}))
    assert "pred_id" not in silent.small, "no response has an answer"


STEPS = '''
def compute_score(data_source, solution_str, ground_truth, extra_info):
    """A step is a word, scored by its number."""
    words = solution_str.split()
    if not words:
        return 9.0
    return {"score": len(words), "step_scores": [float(word[1:]) for word in words][: 2 if "w9" in words else None]}
'''


@pytest.mark.ray
def test_step_scores_sit_on_the_last_token_of_their_step(
    local_ray: None, random_models: dict[str, str], tmp_path: Path
) -> None:
    """The end-of-sequence token belongs to the last step; a response without tokens has none."""
    (tmp_path / "steps.py").write_text(STEPS)
    worker = Local()
    settings = RewardSettings(random_models["tied"], False, str(tmp_path / "steps.py"), "compute_score", {})
    worker.start(replace(settings, step_separator=" "))
    data = worker.score(put([[5, 6, 7, 2], [], [7]]), TASK)[0].fetch(("token_level_scores", "step_mask"))
    assert rows(data["token_level_scores"]) == [[0, 5, 6, 7], [], [7]], (
        "a word ends where the space of the next one comes"
    )
    assert rows(data["step_mask"]) == [[0, 1, 1, 1], [], [1]]
    with pytest.raises(RewardError, match=r"2 step_scores .* 3 steps"):
        worker.score(put([[5, 6, 9]]), TASK)


LABELLED = '''
def compute_score(data_source, solution_str, ground_truth, extra_info):
    """A word is good from 6 on; the rule of the response is about its first word."""
    words = [int(word[1:]) for word in solution_str.split()]
    good = [float(word > 5) for word in words]
    return {"score": 0.0, "rule": sum(good[:1]), "rule.step_scores": good, "step_scores": [0.5] * len(words)}
'''


@pytest.mark.ray
def test_the_labels_of_a_reward_model(local_ray: None, random_models: dict[str, str], tmp_path: Path) -> None:
    """Of whole responses and of steps; validation needs none, and a value that is not there is an error."""
    (tmp_path / "rule.py").write_text(LABELLED)
    settings = RewardSettings(
        random_models["tied"], False, str(tmp_path / "rule.py"), "compute_score", {}, label="rule"
    )
    worker = Local()
    worker.start(settings)
    whole, *_ = worker.score(put(RESPONSES), TASK)
    assert rows(whole.fetch(("rule_labels",))["rule_labels"]) == [[0], [1], [0]]
    assert "rule_labels" not in worker.score(put(RESPONSES), replace(TASK, validation=True))[0].columns
    worker.step_separator = " "
    steps, *_ = worker.score(put(RESPONSES), TASK)
    assert rows(steps.fetch(("rule_labels",))["rule_labels"]) == [[0, 1], [1], [0]]
    for separator, name in ((None, "'other'"), (" ", "'other.step_scores'")):
        worker.step_separator, worker.label = separator, "other"
        with refuses(RewardError, "reward_model.retrain.label=other", name):
            worker.score(put(RESPONSES), TASK)


def test_the_function_gets_the_whole_row() -> None:
    """From the prompt by way of the request to each sample, with the reward model's numbers."""
    seen: list[Sample] = []
    worker = object.__new__(RewardWorker)
    worker.max_steps = 9
    worker.scorer = SimpleNamespace(score=lambda samples: seen.extend(samples) or [RewardResult(1.0, {})] * 2)
    asked = [{"role": "user", "content": "1+1?"}]
    prompt = Prompt(0, "d", asked, "2", {"unit": "m"}, "a.jsonl, line 1", {"level": 3}, is_text=True)
    request = make_request(
        "u", TokenizedPrompt(prompt, np.array([1], np.int32)), SamplingSettings(2, 1.0, 1.0, -1, 4, 0), step=3
    )
    task = replace(request.task, model_scores={"rm_score": np.array([0.5, 1.0])})
    worker._score_texts([("2", [7, 8]), ("3", [9])], task, [0, 1])
    assert seen == [
        Sample("2", "d", "2", {"unit": "m", "rm_score": 0.5}, asked, {"level": 3}, True, [7, 8], 3, 9),
        Sample("3", "d", "2", {"unit": "m", "rm_score": 1.0}, asked, {"level": 3}, True, [9], 3, 9),
    ]


def test_the_overlong_penalty_by_hand() -> None:
    """Longest 100, buffer 20, factor 0.5: nothing up to 80, half of it at 90, all at 100."""
    penalty = OverlongPenalty(100, 20, 0.5)
    assert penalty(torch.tensor([10, 80, 90, 100])).tolist() == [0, 0, -0.25, -0.5]


@pytest.mark.ray
def test_the_overlong_penalty_is_part_of_the_score(worker: Local) -> None:
    plain = worker.score(put(RESPONSES), TASK)[0]["score"]
    worker.overlong_penalty = OverlongPenalty(3, 2, 1.0)
    try:
        handle, *_ = worker.score(put(RESPONSES), TASK)
        validation, *_ = worker.score(put(RESPONSES), replace(TASK, validation=True))
    finally:
        worker.overlong_penalty = None
    assert (handle["score"] - plain).tolist() == [-1, -0.5, 0]
    assert handle["reward_extra/overlong_penalty"].tolist() == [-1, -0.5, 0]
    assert validation["score"].tolist() == plain.tolist()
    assert handle["unpenalised_score"].tolist() == plain.tolist()
    assert "unpenalised_score" not in validation.small
