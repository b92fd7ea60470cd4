from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from grpo_dist.algorithms.advantage import STD_EPS
from grpo_dist.algorithms.targets import TargetSettings
from grpo_dist.errors import BatchError, ConfigError, DataError, RewardError
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.reward import OverlongPenalty, RewardSettings, RewardWorker, Task, on_last_token, pred_ids

SCORER = '''
def compute_score(data_source, solution_str, ground_truth, extra_info, bonus):
    """Counts the words, adds the bonus for the right first word."""
    words = solution_str.split()
    if "w13" in words:
        raise ValueError("unlucky")
    hit = bool(words) and words[0] == ground_truth
    extra = {"lucky": 1} if "w5" in words else {}
    return {"score": len(words) + bonus * hit, "hit": hit, "text": solution_str, "seen": extra_info["index"], **extra}
'''


class Local(RewardWorker):
    """In this process; gives handles, as the driver makes them of its answers."""

    def score(self, group: DataProtoRef, task: Task) -> tuple[DataProtoRef, list[str], tuple]:  # type: ignore[override]
        (label, failures, printed), data = super().score(group, task)
        return DataProtoRef.stored(ray.put(data), label), failures, printed

    def compute_targets(self, *args: Any) -> tuple[DataProtoRef, dict[str, float]]:  # type: ignore[override]
        (label, metrics), data = super().compute_targets(*args)
        return DataProtoRef.stored(ray.put(data), label), metrics


RESPONSES = [[5, 6, 2], [6, 2], [5]]
TASK = Task("words", "w5", {"index": 3})


@pytest.fixture(scope="module")
def worker(local_ray: None, random_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Local:
    file = tmp_path_factory.mktemp("scorer") / "scorer.py"
    file.write_text(SCORER)
    worker = Local()
    worker.start(
        RewardSettings(random_models["tied"], False, str(file), "compute_score", {"bonus": 10}, failure_score=-0.5)
    )
    return worker


def put(responses: list[list[int]], masks: list[list[int]] | None = None) -> DataProtoRef:
    masks = [[1] * len(response) for response in responses] if masks is None else masks
    columns = {
        "responses": Ragged.from_rows(responses, torch.int32),
        "response_mask": Ragged.from_rows(masks, torch.int8),
    }
    return DataProtoRef.put(DataProto.from_dict(columns), small=())


def rows(column: Ragged) -> list[list[float]]:
    return [row.tolist() for row in column.rows()]


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
    rest = DataProtoRef.put(DataProto.from_dict(columns, {"uid": ["a", "a"]}), small=("uid",))
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
    handle, (failure,), _ = worker.score(put([[5, 2], [6, 13], [6, 2]]), TASK)
    assert handle["score"].tolist() == [11, -0.5, 1]
    assert np.array_equal(handle["reward_extra/hit"], [1, np.nan, 0], equal_nan=True)
    assert re.search(r"data_source='words' raised ValueError: unlucky(.|\n)*w6 w13", failure)
    with pytest.raises(BatchError, match=r"'responses' \(made by rollout\)"):
        worker.score(DataProtoRef(), TASK)


@pytest.mark.ray
def test_start_names_what_is_wrong(random_models: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not a Hugging Face model folder: it has no config\.json"):
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


# --- advantages --------------------------------------------------------------------------------------------------
def scored_batch() -> DataProtoRef:
    """Group a: scores 1, 0, 0, 0; group b, between them: 5, 5. Responses of 2 tokens, the last one of 1."""
    lengths = [2, 2, 2, 2, 2, 1]
    scores = torch.tensor([1.0, 5, 0, 0, 5, 0])
    shape = Ragged.from_rows([[0.0] * n for n in lengths], torch.float32)
    rollout = torch.full_like(shape.values, np.log(0.5))
    old = rollout.clone()
    old[:2] = torch.tensor([np.log(0.25), np.log(0.75)])
    data = DataProto.from_dict(
        {
            "token_level_scores": on_last_token(scores, shape),
            "response_mask": Ragged(torch.ones(len(shape.values), dtype=torch.int8), shape.offsets),
            "rollout_log_probs": Ragged(rollout, shape.offsets),
            "old_log_probs": Ragged(old, shape.offsets),
        },
        {"uid": ["a", "b", "a", "a", "b", "a"]},
    )
    handle = DataProtoRef.put(data, small=("uid",))
    return replace(handle, small=handle.small | {"truncated": np.array([0, 0, 0, 1, 0, 0])})


@pytest.mark.ray
def test_advantages_by_hand(worker: Local) -> None:
    """Group a: mean 1/4, std 1/2 (as in tests/algorithms/test_advantage.py). Group b: equal rewards, no advantage."""
    handle, metrics = worker.compute_targets(scored_batch(), TargetSettings("grpo"), 0.0, 0)
    high, low = 0.75 / (0.5 + STD_EPS), -0.25 / (0.5 + STD_EPS)
    data = handle.fetch(("advantages", "returns", "token_level_rewards"))
    expected = [[high] * 2, [0, 0], [low] * 2, [low] * 2, [0, 0], [low]]
    for row, values in zip(rows(data["advantages"]), expected, strict=True):
        assert row == pytest.approx(values)
    assert rows(data["token_level_rewards"]) == [[0, 1], [0, 5], [0, 0], [0, 0], [0, 5], [0]]
    assert handle["advantage_mean"].tolist() == pytest.approx([high, 0, low, low, 0, low])
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(2 * 0.25 / 11, abs=1e-6)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.25, abs=1e-6)


@pytest.mark.ray
def test_options_reach_the_estimator(worker: Local) -> None:
    settings = TargetSettings("grpo", {"norm_adv_by_std_in_grpo": False}, mask_truncated=True)
    handle, _ = worker.compute_targets(scored_batch(), settings, 0.0, 0)
    assert handle["advantage_mean"].tolist() == pytest.approx([0.75, 0, -0.25, 0, 0, -0.25]), "the fourth was cut short"
    assert rows(handle.fetch(("response_mask",))["response_mask"])[3] == [0, 0]
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        worker.compute_targets(scored_batch(), TargetSettings("grop"), 0.0, 0)
    with pytest.raises(BatchError, match=r"'token_level_scores' \(made by reward"):
        worker.compute_targets(put(RESPONSES), TargetSettings("grpo"), 0.0, 0)


@pytest.mark.ray
def test_components_and_baselines_come_with_the_handle(worker: Local) -> None:
    """ReMax subtracts the greedy score 1; gdpo sees the reward function's other values."""
    batch = scored_batch()
    small = {"reward_baseline": np.ones(6, np.float32), "reward_extra/style": np.array([1.0, 0, 0, 0, 0, 0])}
    batch = replace(batch, small=batch.small | small)
    handle, _ = worker.compute_targets(batch, TargetSettings("remax"), 0.0, 0)
    assert handle["advantage_mean"].tolist() == [0, 4, -1, -1, 4, -1]
    handle, _ = worker.compute_targets(batch, TargetSettings("gdpo", {"gdpo_reward_keys": ("style",)}), 0.0, 0)
    assert handle["advantage_mean"][0] > 1 > 0 > handle["advantage_mean"][2]
    with pytest.raises(ConfigError, match=r"algorithm\.gdpo_reward_keys=null: .*, which returns style; "):
        worker.compute_targets(batch, TargetSettings("gdpo"), 0.0, 0)
    with pytest.raises(ConfigError, match=r"algorithm\.gdpo_reward_keys: .*stile.*there are: style"):
        worker.compute_targets(batch, TargetSettings("gdpo", {"gdpo_reward_keys": ("stile",)}), 0.0, 0)


DECLARING = """
def declare_components(weight):
    return {"right": 1.0, "short": weight}


def compute_score(data_source, solution_str, ground_truth, extra_info, weight):
    return 0.0
"""


@pytest.mark.ray
def test_gdpo_compares_what_the_function_declares(
    local_ray: None, random_models: dict[str, str], tmp_path: Path
) -> None:
    """Group a: right is 3 and -1, -1, -1 (over 2), and short the opposite; weights 1 and 3 leave -2 of right.

    The penalty, on the second response of the group, comes on top with weight 1. In group b all are equal. `length` is
    much larger, and no component.
    """
    (tmp_path / "mine.py").write_text(DECLARING)
    worker = Local()
    settings = RewardSettings(random_models["tied"], False, str(tmp_path / "mine.py"), "compute_score", {"weight": 3.0})
    worker.start(settings)
    values = {"right": [1.0, 0, 0, 0, 0, 0], "short": [-9.0, 2, -1, -1, 2, -1], "length": [7.0, 1, 2, 3, 4, 5]}
    penalty = {"overlong_penalty": [0, 0, -0.5, 0, 0, 0]}
    plain, penalised = np.array([-3.0, 0, 1, 1, 0, 1]), np.array([-2.5, 0, -0.5, 1.5, 0, 1.5])
    right_alone = {"right": values["right"]}, np.array([1.5, 0, -0.5, -0.5, 0, -0.5])  # short applies to no response
    for columns, total in ((values, plain), (values | penalty, penalised), right_alone):
        worker.overlong_penalty = OverlongPenalty(3, 2, 1.0) if "overlong_penalty" in columns else None
        batch = scored_batch()
        small = {f"reward_extra/{name}": np.array(column, np.float32) for name, column in columns.items()}
        handle, _ = worker.compute_targets(replace(batch, small=batch.small | small), TargetSettings("gdpo"), 0.0, 0)
        tokens = np.repeat(total, [2, 2, 2, 2, 2, 1])
        expected = (total - tokens.mean()) / tokens.std(ddof=1)
        assert handle["advantage_mean"].tolist() == pytest.approx(expected.tolist(), rel=1e-5)


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
    with pytest.raises(RewardError, match="returned 2 step_scores for a response of 3 steps"):
        worker.score(put([[5, 6, 9]]), TASK)


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


# --- samples -----------------------------------------------------------------------------------------------------
def sample_batch() -> DataProtoRef:
    data = DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([[7, 8]] * 3, torch.int32),
            "responses": Ragged.from_rows(RESPONSES, torch.int32),
            "score": torch.tensor([12.0, 1.0, 11.0]),
        },
        {"uid": ["p0"] * 3},
    )
    return DataProtoRef.put(data, small=("uid", "score"))


@pytest.mark.ray
def test_samples_are_written_as_json_lines(worker: RewardWorker, tmp_path: Path) -> None:
    advantages = DataProtoRef.put(
        DataProto.from_dict({"advantage_mean": torch.tensor([0.5, -1, 0.5])}), ("advantage_mean",)
    )
    path = tmp_path / "rollouts" / "4.jsonl"
    worker.write_samples(sample_batch().union(advantages), str(path), 4, {"p0": "w5"})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {
        "step": 4,
        "uid": "p0",
        "input": "w7 w8",
        "output": "w5 w6",
        "gts": "w5",
        "score": 12.0,
        "advantage": 0.5,
    }
    assert [line["output"] for line in lines] == ["w5 w6", "w6", "w5"]
    assert list(path.parent.iterdir()) == [path], "no half-written file is left"


@pytest.mark.ray
def test_samples_without_advantages_and_of_no_rows(worker: RewardWorker, tmp_path: Path) -> None:
    worker.write_samples(sample_batch(), str(tmp_path / "val.jsonl"), 0, {"p0": {"any": 1}})
    line = json.loads((tmp_path / "val.jsonl").read_text().splitlines()[0])
    assert "advantage" not in line
    assert line["gts"] == {"any": 1}
    with pytest.raises(BatchError, match=r"'score' \(made by reward"):
        worker.write_samples(sample_batch().select(("uid", "prompts", "responses")), str(tmp_path / "x"), 0, {})
