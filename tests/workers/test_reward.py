"""What a reward worker does: scores, advantages and losses' other targets, and records of what was sampled."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.advantage import STD_EPS
from grpo_dist.algorithms.settings import TargetSettings
from grpo_dist.data import Prompt, TokenizedPrompt
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import BatchError, ConfigError, DiskError, RewardError
from grpo_dist.plan.commands import load_config
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.parquet import read_parquet
from grpo_dist.protocol.sequences import PREDECESSORS
from grpo_dist.rewards.contract import RewardResult, Sample
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.trainer.rollout.job import make_request
from grpo_dist.workers.records import _write_rows
from grpo_dist.workers.reward import RewardWorker
from grpo_dist.workers.scorer import OverlongPenalty, TeacherPrompts, on_agents, on_last_token
from tests.messages import refuses, says
from tests.records import json_lines
from tests.workers.local_reward import RESPONSES, TASK, Local, column, local, put, rows

pytestmark = pytest.mark.usefixtures("store_here")
NAN = math.nan
GRPO = {"norm_adv_by_std_in_grpo": False}


# --- where scores stand ------------------------------
def test_a_score_stands_on_the_last_token_that_trains() -> None:
    """Not on what an environment put in behind it; where nothing trains, on the last token."""
    responses = Ragged.from_rows([[5, 6, 7], [], [8, 9], [8, 9]], torch.int32)
    scores = torch.tensor([1.5, 9.0, -2.0, 3.0])
    placed = on_last_token(scores, responses)
    assert rows(placed) == [[0, 0, 1.5], [], [0, -2.0], [0, 3.0]]
    assert placed.values.dtype == torch.float32
    masks = Ragged.from_rows([[1, 0, 0], [], [0, 1], [0, 0]], torch.int8)
    assert rows(on_last_token(scores, responses, masks)) == [[1.5, 0, 0], [], [0, -2.0], [0, 3.0]]
    assert len(on_last_token(torch.empty(0), Ragged.from_rows([], torch.int32))) == 0


def test_each_agent_has_its_steps_rewards_or_the_episodes_on_its_last_token() -> None:
    """Agents 4 and 7; in the second episode 4 has rewards of its own; the third has sampled nothing."""
    agents = Ragged.from_rows([[7, 0, 4, 7], [4, 7, 4], [0], []], torch.int32)
    given = Ragged.from_rows([[NAN] * 4, [0.5, NAN, 0.25], [NAN], []], torch.float32)
    rewards, mask = on_agents(torch.tensor([2.0, 3, 4, 5]), torch.tensor([-0.5, 0, -1, -1]), agents, given)
    assert rows(rewards) == [[0, 0, 1.5, 1.5], [0.5, 3, 0.25], [0], []]
    assert rows(mask) == [[0, 0, 1, 1], [1, 1, 1], [0], []]
    assert given.values.isnan().sum() == 6, "what was given stands as it is"


# --- score ------------------------------
def test_scores_and_extra_values(worker: Local) -> None:
    """Word counts 2, 1, 1 (the end is a special token); w5 first earns 10 more, and only with w5 there is `lucky`."""
    handle, failures, printed = worker.score(put(RESPONSES), TASK)
    assert (failures, printed) == ([], ([], 0))
    assert handle["score"].tolist() == [12, 1, 11]
    assert handle["reward_extra/hit"].tolist() == [1, 0, 1]
    assert handle["reward_extra/seen"].tolist() == [3, 3, 3]
    assert "reward_extra/text" not in handle.small
    assert column(handle) == [[0, 0, 12], [0, 1], [11]]
    both = DataProtoRef.concat([handle, worker.score(put(RESPONSES[1:2]), TASK)[0]])
    assert np.array_equal(both["reward_extra/lucky"], [1, NAN, 1, NAN], equal_nan=True)
    with pytest.raises(BatchError, match=r"'responses' \(made by rollout\)"):
        worker.score(DataProtoRef(), TASK)


def test_what_an_environment_put_in_is_read_and_earns_nothing(worker: Local) -> None:
    """All words count; the reward sits where the policy can be blamed for it, and the advantage is a mean over that."""
    group = put([[5, 6, 7], [6, 2]], [[1, 1, 0], [1, 1]])
    scored, *_ = worker.score(group, TASK)
    assert scored["score"].tolist() == [13, 1]
    assert column(scored) == [[0, 13, 0], [0, 1]]
    settings = TargetSettings("grpo", GRPO, old_log_probs_from="rollout")
    targets, _ = worker.compute_targets(scored.union(group), settings, 0.0, 0)
    assert column(targets, "advantages") == [[6, 6, 0], [-6, -6]]
    assert targets["advantage_mean"].tolist() == [6, -6]


@pytest.mark.parametrize("separator", [None, " "])
def test_a_failed_response_has_the_score_that_was_set_or_none(
    worker: Local, monkeypatch: pytest.MonkeyPatch, separator: str | None
) -> None:
    """Also where steps have scores, and for validation; the reason is told and is a column."""
    monkeypatch.setattr(worker, "step_separator", separator)
    task = replace(TASK, messages=[{"role": "user", "content": "Two words?"}])
    for failure_score in (NAN, 0.0, -0.5):
        monkeypatch.setattr(worker, "failure_score", failure_score)
        for validation in (False, True):
            handle, failures, _ = worker.score(put([[5, 2], [6, 13], [6, 2]]), replace(task, validation=validation))
            expected = [11, failure_score, 1]
            np.testing.assert_array_equal(handle["score"], np.array(expected, np.float32))
            np.testing.assert_array_equal([sum(row) for row in column(handle)], expected)
            np.testing.assert_array_equal(handle["reward_extra/hit"], [1, NAN, 0])
            assert ("failed" in handle.small) == validation
            assert handle.fetch(("failure",))["failure"].tolist() == ["", failures[0], ""]
            says(failures, "data_source='words'", "ValueError: unlucky", "w6 w13", "prompt: 'Two words?'")


ABSTAINS = """
def compute_score(completions, **columns):
    return [None if "w6" in text else 2.0 for text in completions]
"""


def test_a_response_that_no_function_judges_has_no_score_and_has_not_failed(
    random_models: dict[str, str], tmp_path: Path
) -> None:
    """As in TRL; what an episode brought stands alone then. For validation it is wrong."""
    worker = local(random_models["tied"], tmp_path, ABSTAINS, failure_score=-0.5, function_weight=1.0)
    plain = replace(TASK, is_text=True, messages=[{"role": "user", "content": "w9"}])
    for validation in (False, True):
        task = replace(plain, validation=validation)
        handle, failures, _ = worker.score(put([[5, 2], [6, 13], [6, 2]]), task)
        np.testing.assert_array_equal(handle["score"], np.array([2, NAN, NAN], np.float32))
        assert failures == []
        says(handle.fetch(("failure",))["failure"][1], "mine.py:compute_score", "None", "w6 w13")
        assert handle.small.get("failed", np.array([])).tolist() == [False, True, True] * validation
    given, failures, _ = worker.score(put([[6, 13], [5, 2]], rewards=[0.5, 0.25]), plain)
    assert (given["score"].tolist(), failures) == ([0.5, 2.25], [])
    assert given.fetch(("failure",))["failure"].tolist() == ["", ""]


def test_the_teachers_prompts_of_a_policy_that_teaches_itself(worker: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores 12, 1, 11: of the two with w5 first each is shown the other one; the text is the function's own."""
    forms = {"success_template": " w20 {text}", "feedback_template": " w21 {text}"}
    section = load_config([])[0].algorithm.self_distillation.replaced(success_threshold=11, **forms)
    task = replace(TASK, messages=[{"role": "user", "content": "w9"}])
    alone = section.replaced(success_threshold=None, feedback_name="text")
    of_row = alone.replaced(feedback_name="solution")
    with_solution = replace(task, extra_info={"index": 3, "solution": "w7"})
    for shown, asked, responses, prompts, mask in (
        (section, task, RESPONSES, [[9, 20, 5], [9, 20, 5], [9, 20, 5, 6]], [[1, 1, 1], [1, 1], [1]]),
        (alone, task, [[5, 6, 2], [2]], [[9, 21, 5, 6], []], [[1, 1, 1], [0]]),  # nothing of an empty response
        (of_row, with_solution, [[5, 2]], [[9, 21, 7]], [[1, 1]]),
    ):
        monkeypatch.setattr(worker, "teacher_prompts", TeacherPrompts(shown, worker.tokenizer, {}))
        read = worker.score(put(responses), asked)[0]
        assert (column(read, "teacher_prompts"), column(read, "teacher_mask")) == (prompts, mask)
    validated = worker.score(put([[5, 2]]), replace(with_solution, validation=True))[0]
    assert not {"teacher_prompts", "teacher_mask"} & set(validated.columns)


# --- rewards of episodes ------------------------------
def test_the_reward_of_an_episode_stands_in_place_of_the_functions(worker: Local) -> None:
    """The second response has brought none: the function scores it, and is not asked for the first, which has w13."""
    handle, failures, _ = worker.score(put([[5, 13, 2], [6, 2]], rewards=[0.25, NAN]), TASK)
    assert not failures
    assert handle["score"].tolist() == [0.25, 1]
    assert np.array_equal(handle["reward_extra/hit"], [NAN, 0], equal_nan=True)
    assert column(handle) == [[0, 0, 0.25], [0, 1]]


def test_the_functions_score_is_added_with_its_weight(worker: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 and 1 are the function's; one that it fails on has no more than the failure's score."""
    monkeypatch.setattr(worker, "function_weight", 0.5)
    handle, failures, _ = worker.score(put([[5, 6, 2], [6, 2], [13, 2]], rewards=[0.25, -1.0, 0.0]), TASK)
    assert handle["score"].tolist() == [6.25, -0.5, -0.25]
    assert len(failures) == 1
    assert handle["reward_extra/hit"].tolist()[:2] == [1, 0]


@pytest.mark.parametrize("by_agent", [False, True])
def test_gigpo_tells_turns_apart_by_the_rewards_of_their_own(
    worker: Local, monkeypatch: pytest.MonkeyPatch, by_agent: bool
) -> None:
    """Turns of rewards 1, 0 and 0, 1 behind the same words: as many for each episode, and 1/2 for the second turns."""
    monkeypatch.setattr(worker, "by_turn", True)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "by_agent", by_agent)
        more = {"predecessors": [[-1, 0, 1]] * 2, "agent_ids": [[1, 0, 1]] * 2}
        given = put(
            [[5, 9, 6], [6, 9, 5]],
            [[1, 0, 1]] * 2,
            rewards=[1.0, 1.0],
            steps=[[1.0, NAN, 0.0], [0.0, NAN, 1.0]],
            **{name: Ragged.from_rows(column, torch.int32) for name, column in more.items()},
        )
        batch = worker.score(given, TASK)[0].union(given)
        settings = TargetSettings("gigpo", GRPO, old_log_probs_from="rollout", by_agent=by_agent)
        assert column(worker.compute_targets(batch, settings, 0.0, 0)[0], "advantages") == [[0, 0, -0.5], [0, 0, 0.5]]
    assert column(worker.score(put([[5, 9, 2]], rewards=[3.0]), TASK)[0]) == [[0, 0, 3]], "no turn has one of its own"


def test_rewards_of_steps_stand_where_the_episode_gave_them(worker: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second response has one reward, which is a step's: the last token's."""
    monkeypatch.setattr(worker, "step_separator", " ")
    steps = [[0.5, NAN, -2.0], [NAN, NAN]]
    scored, *_ = worker.score(put([[5, 6, 2], [6, 2]], rewards=[-1.5, 3.0], steps=steps), TASK)
    assert scored["score"].tolist() == [-1.5, 3]
    assert column(scored) == [[0.5, 0, -2], [0, 3]]
    assert column(scored, "step_mask") == [[1, 0, 1], [0, 1]]


# --- other reward functions ------------------------------
def test_what_an_estimator_prints_comes_with_its_advantages(tmp_path: Path) -> None:
    """Of a group of -3, none, -1: mean -2. The reward of the one without a score is none either."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def centred(batch, config):\n"
        "    print('scores', batch.scores.tolist())\n"
        "    values = batch.on_tokens(batch.groups.normalise(batch.scores, by_std=False))\n"
        "    return values, values\n"
    )
    batch, scores = put([[5, 2], [6], [7, 8]]), torch.tensor([-3, NAN, -1])
    placed = on_last_token(scores, batch.fetch(("responses",))["responses"])
    batch = batch.union(DataProtoRef.put(DataProto({"token_level_scores": placed})))
    batch.small["score"] = scores.numpy()
    worker, settings = RewardWorker(), TargetSettings(f"{file}:centred", old_log_probs_from="rollout")
    (label, metrics, printed), data = worker.compute_targets(batch, settings, 0.0, 0)
    assert printed == (["scores [-3.0, -1.0]"], 0)
    assert worker.take_printed() == ([], 0)
    assert rows(data["advantages"]) == [[-1, -1], [0], [1, 1]]
    assert rows(data["response_mask"]) == [[1, 1], [0], [1, 1]]
    np.testing.assert_array_equal(label.small["reward"], [-3, NAN, -1])
    assert label.small["advantage_mean"].tolist() == [-1, 0, 1]
    assert metrics["critic/advantages/mean"] == 0


ANSWER = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    answer = solution_str.split()[0]
    return {'score': 1, 'pred': answer if extra_info['index'] and answer != 'w6' else None}
"""


def test_answers_travel_as_numbers_and_only_for_validation(random_models: dict[str, str], tmp_path: Path) -> None:
    worker = local(random_models["tied"], tmp_path, ANSWER)
    assert math.isnan(worker.failure_score), "a response that the function fails on has no score"
    validation, group = replace(TASK, validation=True), put([[5, 7], [6], [8], [5]])
    found = worker.score(group, validation)[0]["pred_id"]
    assert found.dtype == np.float32
    assert np.array_equal(found, [0, NAN, 2, 0], equal_nan=True)
    training = worker.score(group, TASK)[0]
    assert "pred_id" not in training.small
    told = [json.loads(text).get("pred") for text in training.fetch(["said"])["said"]]
    assert told == ["w5", None, "w8", "w5"], "the record has them as texts"
    silent, *_ = worker.score(group, replace(validation, extra_info={"index": 0}))
    assert "pred_id" not in silent.small, "no response has an answer"


STEPS = '''
def compute_score(data_source, solution_str, ground_truth, extra_info):
    """A step is a word, scored by its number."""
    words = solution_str.split()
    if not words:
        return 9.0
    return {"score": len(words), "step_scores": [float(word[1:]) for word in words][: 2 if "w9" in words else None]}
'''


def test_step_scores_sit_on_the_last_token_of_their_step(random_models: dict[str, str], tmp_path: Path) -> None:
    """The end-of-sequence token belongs to the last step; a response without tokens has none."""
    worker = local(random_models["tied"], tmp_path, STEPS, step_separator=" ")
    handle, *_ = worker.score(put([[5, 6, 7, 2], [], [7]]), TASK)
    assert column(handle) == [[0, 5, 6, 7], [], [7]], "a word ends where the space of the next one comes"
    assert column(handle, "step_mask") == [[0, 1, 1, 1], [], [1]]
    with pytest.raises(RewardError, match=r"2 step_scores .* 3 steps"):
        worker.score(put([[5, 6, 9]]), TASK)


LABELLED = '''
def compute_score(data_source, solution_str, ground_truth, extra_info):
    """A word is good from 6 on; the rule of the response is about its first word."""
    words = [int(word[1:]) for word in solution_str.split()]
    good = [float(word > 5) for word in words]
    return {"score": 0.0, "rule": sum(good[:1]), "rule.step_scores": good, "step_scores": [0.5] * len(words)}
'''


def test_the_labels_of_a_reward_model(random_models: dict[str, str], tmp_path: Path) -> None:
    """Of whole responses and of steps; validation needs none, and a value that is not there is an error."""
    worker = local(random_models["tied"], tmp_path, LABELLED, label="rule", failure_score=0.0)
    assert worker.failure_score == 0
    assert column(worker.score(put(RESPONSES), TASK)[0], "rule_labels") == [[0], [1], [0]]
    assert "rule_labels" not in worker.score(put(RESPONSES), replace(TASK, validation=True))[0].columns
    worker.step_separator = " "
    assert column(worker.score(put(RESPONSES), TASK)[0], "rule_labels") == [[0, 1], [1], [0]]
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
    tokenized: Any = TokenizedPrompt(prompt, np.array([1], np.int32))
    request = make_request("u", tokenized, SamplingSettings(2, 1.0, 1.0, -1, 4, 0), step=3)
    task = replace(request.task, model_scores={"rm_score": np.array([0.5, 1.0])})
    worker._score_texts([("2", [7, 8]), ("3", [9])], task, [0, 1])
    assert seen == [
        Sample("2", "d", "2", {"unit": "m", "rm_score": 0.5}, asked, {"level": 3}, True, [7, 8], 3, 9),
        Sample("3", "d", "2", {"unit": "m", "rm_score": 1.0}, asked, {"level": 3}, True, [9], 3, 9),
    ]


def test_the_overlong_penalty_is_part_of_the_score(worker: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, longest 100, buffer 20, factor 0.5: nothing up to 80, half of it at 90, all at 100."""
    assert OverlongPenalty(100, 20, 0.5)(torch.tensor([10, 80, 90, 100])).tolist() == [0, 0, -0.25, -0.5]
    plain = worker.score(put(RESPONSES), TASK)[0]["score"]
    monkeypatch.setattr(worker, "overlong_penalty", OverlongPenalty(3, 2, 1.0))
    handle, *_ = worker.score(put(RESPONSES), TASK)
    validation, *_ = worker.score(put(RESPONSES), replace(TASK, validation=True))
    assert (handle["score"] - plain).tolist() == [-1, -0.5, 0]
    assert handle["reward_extra/overlong_penalty"].tolist() == [-1, -0.5, 0]
    assert validation["score"].tolist() == handle["unpenalised_score"].tolist() == plain.tolist()
    assert "unpenalised_score" not in validation.small


# --- advantages ------------------------------
def scored_batch(**small: Any) -> DataProtoRef:
    """Group a: scores 1, 0, 0, 0; group b, between them: 5, 5. Responses of 2 tokens, the last one of 1."""
    lengths = [2, 2, 2, 2, 2, 1]
    scores = torch.tensor([1.0, 5, 0, 0, 5, 0])
    shape = Ragged.from_rows([[0.0] * n for n in lengths], torch.float32)
    rollout = torch.full_like(shape.values, np.log(0.5))
    old = rollout.clone()
    old[:2] = torch.tensor([np.log(0.25), np.log(0.75)])
    columns = {
        "token_level_scores": on_last_token(scores, shape),
        "response_mask": Ragged(torch.ones(len(shape.values), dtype=torch.int8), shape.offsets),
        "rollout_log_probs": Ragged(rollout, shape.offsets),
        "old_log_probs": Ragged(old, shape.offsets),
    }
    handle = DataProtoRef.put(DataProto.from_dict(columns, {"uid": ["a", "b", "a", "a", "b", "a"]}))
    small = {"truncated": [0, 0, 0, 1, 0, 0], "score": scores.numpy()} | small
    return replace(handle, small=handle.small | {name: np.array(values) for name, values in small.items()})


def test_advantages_by_hand(worker: Local) -> None:
    """Group a: mean 1/4, std 1/2 (as in tests/algorithms/test_advantage.py). Group b: equal rewards, no advantage."""
    handle, metrics = worker.compute_targets(scored_batch(), TargetSettings("grpo"), 0.0, 0)
    high, low = 0.75 / (0.5 + STD_EPS), -0.25 / (0.5 + STD_EPS)
    expected = [[high] * 2, [0, 0], [low] * 2, [low] * 2, [0, 0], [low]]
    for row, values in zip(column(handle, "advantages"), expected, strict=True):
        assert row == pytest.approx(values)
    assert column(handle, "token_level_rewards") == [[0, 1], [0, 5], [0, 0], [0, 0], [0, 5], [0]]
    assert handle["advantage_mean"].tolist() == pytest.approx([high, 0, low, low, 0, low])
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(2 * 0.25 / 11, abs=1e-6)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.25, abs=1e-6)
    options = TargetSettings("grpo", {"norm_adv_by_std_in_grpo": False}, mask_truncated=True)
    handle, _ = worker.compute_targets(scored_batch(), options, 0.0, 0)
    assert handle["advantage_mean"].tolist() == pytest.approx([0.75, 0, -0.25, 0, 0, -0.25]), "the fourth was cut short"
    assert column(handle, "response_mask")[3] == [0, 0]


def test_log_probs_are_compared_where_the_present_weights_have_sampled(worker: Local) -> None:
    """Not the environment's token, nor those of version 3: what is left is 0.2, 0 and 0.7 apart."""
    columns: dict[str, Any] = {
        "responses": ([[5, 6], [6, 2, 7], [5]], torch.int32),
        "response_mask": ([[1, 1], [1, 0, 1], [1]], torch.int8),
        "weight_versions": ([[3, 4], [4, -1, 4], [3]], torch.int32),
        "rollout_log_probs": ([[-1, -1], [-1, 0, -1], [-1]], torch.float32),
        "old_log_probs": ([[-9, -1.2], [-1, -9, -1.7], [-9]], torch.float32),
    }
    data = {name: Ragged.from_rows(*column) for name, column in columns.items()}
    batch = DataProtoRef.put(DataProto.from_dict(data, {"uid": ["a", "b", "c"]}))
    count, mean, largest, worst = worker.compare_log_probs(batch, 4)
    assert (count, mean, largest) == (3, pytest.approx(0.3), pytest.approx(0.7))
    says(worst, "id 7", "token 2", "prompt b", -1, -1.7)
    assert [worker.compare_log_probs(batch, version)[0] for version in (3, 5)] == [5, 0]


def test_components_and_baselines_come_with_the_handle(worker: Local) -> None:
    """ReMax subtracts the greedy score 1; gdpo sees the reward function's other values."""
    batch = scored_batch(**{"reward_baseline": np.ones(6, np.float32), "reward_extra/style": [1.0, 0, 0, 0, 0, 0]})
    handle, _ = worker.compute_targets(batch, TargetSettings("remax"), 0.0, 0)
    assert handle["advantage_mean"].tolist() == [0, 4, -1, -1, 4, -1]
    handle, _ = worker.compute_targets(batch, TargetSettings("gdpo", {"gdpo_reward_keys": ("style",)}), 0.0, 0)
    assert handle["advantage_mean"][0] > 1 > 0 > handle["advantage_mean"][2]
    with pytest.raises(ConfigError, match=r"algorithm\.gdpo_reward_keys: .*stile.*there are: style"):
        worker.compute_targets(batch, TargetSettings("gdpo", {"gdpo_reward_keys": ("stile",)}), 0.0, 0)


DECLARING = """
def declare_components(weight):
    return {"right": 1.0, "short": weight}


def compute_score(data_source, solution_str, ground_truth, extra_info, weight):
    return 0.0
"""


def test_gdpo_compares_what_the_function_declares(random_models: dict[str, str], tmp_path: Path) -> None:
    """Group a: right is 3 and -1, -1, -1 (over 2), short the opposite with weight 3; the penalty comes on top."""
    worker = local(random_models["tied"], tmp_path, DECLARING, {"weight": 3.0})
    values = {"right": [1.0, 0, 0, 0, 0, 0], "short": [-9.0, 2, -1, -1, 2, -1], "length": [7.0, 1, 2, 3, 4, 5]}
    penalty = {"overlong_penalty": [0, 0, -0.5, 0, 0, 0]}
    plain, penalised = np.array([-3.0, 0, 1, 1, 0, 1]), np.array([-2.5, 0, -0.5, 1.5, 0, 1.5])
    right_alone = {"right": values["right"]}, np.array([1.5, 0, -0.5, -0.5, 0, -0.5])  # short applies to no response
    for columns, total in ((values, plain), (values | penalty, penalised), right_alone):
        worker.overlong_penalty = OverlongPenalty(3, 2, 1.0) if "overlong_penalty" in columns else None
        batch = scored_batch(**{f"reward_extra/{name}": np.float32(column) for name, column in columns.items()})
        handle, _ = worker.compute_targets(batch, TargetSettings("gdpo"), 0.0, 0)
        tokens = np.repeat(total, [2, 2, 2, 2, 2, 1])
        expected = (total - tokens.mean()) / tokens.std(ddof=1)
        assert handle["advantage_mean"].tolist() == pytest.approx(expected.tolist(), rel=1e-5)


# --- samples ------------------------------
def sample_batch(masks: list[list[int]] | None = None, **more: Ragged) -> DataProtoRef:
    columns = {
        "prompts": Ragged.from_rows([[7, 8]] * 3, torch.int32),
        "responses": Ragged.from_rows(RESPONSES, torch.int32),
        "response_mask": Ragged.from_rows(masks or [[1] * len(row) for row in RESPONSES], torch.int8),
        "score": torch.tensor([12.0, torch.nan, 11.0]),
    }
    failures, said = ["", "it raised", "too slow"], ['{"why": "good", "gts": "no"}', "{}", "{}"]
    texts = {"uid": ["p0"] * 3, "failure": failures, "said": said}
    return DataProtoRef.put(DataProto.from_dict(columns | more, texts))


def test_samples_are_written_as_json_lines(worker: Local, tmp_path: Path) -> None:
    small = {
        "advantage_mean": np.array([0.5, -1, 0.5]),
        "reward_extra/short": np.array([2.0, np.nan, 1.0]),
        "reward_extra/output": np.ones(3),  # a function's name that stands for something else here
    }
    plain, path = sample_batch(), tmp_path / "rollouts" / "4.jsonl"
    worker.write_samples(replace(plain, small=plain.small | small), str(path), 4, {"p0": {"gts": "w5"}})
    found = json_lines(path)
    whole = {"step": 4, "uid": "p0", "input": "w7 w8", "output": "w5 w6", "gts": "w5", "score": 12.0, "why": "good"}
    assert found[0] == whole | {"advantage": 0.5, "short": 2.0}
    assert ["short" in line for line in found] == [True, False, True]
    assert [line["output"] for line in found] == ["w5 w6", "w6", "w5"]
    assert [(line["score"], line.get("failure")) for line in found[1:]] == [(None, "it raised"), (11.0, "too slow")]
    assert list(path.parent.iterdir()) == [path], "no half-written file is left"
    worker.write_samples(plain, str(path), 4, {"p0": {"gts": {"any": 1}}})
    assert json_lines(path)[0] == whole | {"gts": {"any": 1}}, "there are no advantages"
    with pytest.raises(BatchError, match=r"'score' \(made by reward"):
        worker.read_samples(plain.select(("uid", "prompts", "responses", "response_mask")), 0, {})


def test_a_training_step_is_written_with_its_tokens(worker: Local, tmp_path: Path) -> None:
    """What only the handle has, such as the reward function's numbers, is there too; old steps make room."""
    advantages = Ragged.from_rows([[0.5] * len(row) for row in RESPONSES], torch.float32)
    batch = sample_batch(advantages=advantages)
    batch = replace(batch, small=batch.small | {"reward_extra/short": np.array([2, np.nan, 1], np.float32)})
    folder = tmp_path / "rollouts"
    for step in (4, 5):
        worker.write_rollouts(batch, str(folder / f"{step}.jsonl"), step, {"p0": {"gts": "w5"}}, 10.0)
    assert sorted(path.name for path in folder.iterdir()) == ["5.jsonl", "5.parquet"]
    found = read_parquet(folder / "5.parquet")
    assert [row.tolist() for row in found["responses"].rows()] == RESPONSES
    assert torch.equal(found["advantages"].values, advantages.values)
    assert found["reward_extra/short"].nan_to_num(nan=9).tolist() == [2, 9, 1]
    assert found["uid"].tolist() == ["p0"] * 3
    assert (tmp_path / "tokenizer" / "tokenizer.json").is_file()


def test_what_an_environment_put_in_and_where_a_branch_begins_is_told(worker: Local) -> None:
    samples = worker.read_samples(sample_batch([[1, 0, 1], [1, 1], [0]]), 4, {"p0": {"gts": ""}})
    assert samples[0]["output"] == "w5 w6"
    parts = [sample.get("parts") for sample in samples]
    assert parts == [[["policy", "w5"], ["environment", "w6"], ["policy", ""]], None, [["environment", "w5"]]]
    follows = {PREDECESSORS: Ragged.from_rows([[-1, 0, -2], [-1, -1], [-1]], torch.int32)}
    parts = [sample.get("parts") for sample in worker.read_samples(sample_batch(**follows), 4, {"p0": {"gts": ""}})]
    assert parts[0] == [["policy", "w5 w6"], ["policy", "", "branch"]]
    assert [part[2:] for part in parts[1]] == [[], ["branch"]]
    assert parts[2] is None


def test_judged_responses_are_rows_for_a_reward_model(
    worker: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, or step by step; without labels, where the reward function failed, or without text it is left out."""
    asked, path = {"p0": [{"role": "user", "content": "w7"}]}, tmp_path / "replay" / "3.jsonl"
    responses = Ragged.from_rows([[5, 6, 2], [6, 2], [2]], torch.int32)

    def written(labels: list[list[int]]) -> list[dict]:
        columns = {"responses": responses, "rule_labels": Ragged.from_rows(labels, torch.int8)}
        worker.write_judged(DataProtoRef.put(DataProto.from_dict(columns, {"uid": ["p0"] * 3})), str(path), asked)
        return json_lines(path)

    assert written([[1], [], [0]]) == [{"prompt": asked["p0"], "completions": ["w5 w6"], "labels": [True]}]
    monkeypatch.setattr(worker, "step_separator", " ")
    found = [(row["completions"], row["labels"]) for row in written([[1, 0], [1], []])]
    assert found == [(["w5", "w6"], [True, False]), (["w6"], [True])]


def test_a_disk_that_becomes_full_in_the_middle_is_no_fault_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("no folder")
    with refuses(DiskError, tmp_path / "rollouts" / "1.jsonl", "trainer.log_rollouts=false") as caught:
        _write_rows([{"a": 1}], str(tmp_path / "rollouts" / "1.jsonl"), "trainer.log_rollouts=false")
    assert caught.value.exit_code == 1
