from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.advantage import STD_EPS
from grpo_dist.algorithms.settings import TargetSettings
from grpo_dist.errors import BatchError, ConfigError, DiskError
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.parquet import read_parquet
from grpo_dist.protocol.sequences import PREDECESSORS
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.workers.records import _write_rows
from grpo_dist.workers.scorer import OverlongPenalty, on_last_token
from tests.messages import refuses, says
from tests.workers.local_reward import RESPONSES, Local, column, local, put

pytestmark = pytest.mark.usefixtures("store_here")


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


def test_options_reach_the_estimator(worker: Local) -> None:
    settings = TargetSettings("grpo", {"norm_adv_by_std_in_grpo": False}, mask_truncated=True)
    handle, _ = worker.compute_targets(scored_batch(), settings, 0.0, 0)
    assert handle["advantage_mean"].tolist() == pytest.approx([0.75, 0, -0.25, 0, 0, -0.25]), "the fourth was cut short"
    assert column(handle, "response_mask")[3] == [0, 0]
    with pytest.raises(BatchError, match=r"'token_level_scores' \(made by reward"):
        worker.compute_targets(put(RESPONSES), TargetSettings("grpo"), 0.0, 0)


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
    """Group a: right is 3 and -1, -1, -1 (over 2), and short the opposite; weights 1 and 3 leave -2 of right.

    The penalty, on the second response of the group, comes on top with weight 1. In group b all are equal. `length` is
    much larger, and no component.
    """
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


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_are_written_as_json_lines(worker: Local, tmp_path: Path) -> None:
    small = {
        "advantage_mean": np.array([0.5, -1, 0.5]),
        "reward_extra/short": np.array([2.0, np.nan, 1.0]),
        "reward_extra/output": np.ones(3),  # a function's name that stands for something else here
    }
    plain, path = sample_batch(), tmp_path / "rollouts" / "4.jsonl"
    worker.write_samples(replace(plain, small=plain.small | small), str(path), 4, {"p0": {"gts": "w5"}})
    found = lines(path)
    whole = {"step": 4, "uid": "p0", "input": "w7 w8", "output": "w5 w6", "gts": "w5", "score": 12.0, "why": "good"}
    assert found[0] == whole | {"advantage": 0.5, "short": 2.0}
    assert ["short" in line for line in found] == [True, False, True]
    assert [line["output"] for line in found] == ["w5 w6", "w6", "w5"]
    assert [(line["score"], line.get("failure")) for line in found[1:]] == [(None, "it raised"), (11.0, "too slow")]
    assert list(path.parent.iterdir()) == [path], "no half-written file is left"
    worker.write_samples(plain, str(path), 4, {"p0": {"gts": {"any": 1}}})
    assert lines(path)[0] == whole | {"gts": {"any": 1}}, "there are no advantages"
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
        return lines(path)

    assert written([[1], [], [0]]) == [{"prompt": asked["p0"], "completions": ["w5 w6"], "labels": [True]}]
    monkeypatch.setattr(worker, "step_separator", " ")
    found = [(row["completions"], row["labels"]) for row in written([[1, 0], [1], []])]
    assert found == [(["w5", "w6"], [True, False]), (["w6"], [True])]


def test_a_disk_that_becomes_full_in_the_middle_is_no_fault_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("no folder")
    with refuses(DiskError, tmp_path / "rollouts" / "1.jsonl", "trainer.log_rollouts=false") as caught:
        _write_rows([{"a": 1}], str(tmp_path / "rollouts" / "1.jsonl"), "trainer.log_rollouts=false")
    assert caught.value.exit_code == 1
