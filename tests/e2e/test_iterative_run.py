"""DeepSeekMath's algorithm 1 on real ranks and the built-in task: two iterations of two steps, whole and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import Rows, sized, train_here
from tests.models import builtin_reward_model
from tests.trainer.metrics_page import PAGE, undocumented

pytestmark = [
    pytest.mark.usefixtures("shared_ray"),
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(900),
]
# The built-in task's own scorer judges steps; spaces are between them.
PROCESS = (
    "algorithm.adv_estimator=grpo_process",
    "reward_model.process.enable=true",
    "reward.step_separator=' '",
    "custom_reward_function.reward_kwargs={functions: [{path: grpo_dist.rewards.reward_model}, "
    "{path: grpo_dist.tasks.worked_sums, weight: 0.0, label: rule}]}",
)


def train(folder: Path, *overrides: str) -> Rows:
    scorer = builtin_reward_model(folder.parent / "scorer", template=None)
    retraining = ("freq=2", "optim.lr=1e-3", "train_batch_size=16")
    return train_here(
        folder,
        *("recipe=deepseekmath_iterative", *sized(4, n=4), f"reward_model.model.path={scorer}"),
        *(*(f"reward_model.retrain.{key}" for key in retraining), "reward_model.replay_share=0.5"),
        *("data.val_max_samples=8", "trainer.total_training_steps=4", "trainer.save_freq=3", *overrides),
    )


def weights(folder: Path) -> dict[str, Any]:
    """The digests of the tensors in the last checkpoint, by role and file, and the exported policy."""
    files = json.loads((folder / "global_step_4" / "manifest.json").read_text())["files"]
    roles = {name: digest for name, digest in files.items() if name.endswith(".distcp")}
    assert {name.partition("/")[0] for name in roles} == {"actor", "ref", "reward_model"}
    return roles | {"policy": (folder / "huggingface" / "model.safetensors").read_bytes()}


@pytest.mark.parametrize("process", [(), PROCESS], ids=["outcome", "process"])
def test_two_iterations_whole_and_resumed_inside_the_second(tmp_path: Path, process: tuple[str, ...]) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    rows = train(whole, *process)
    retrained = [row for row in rows if "reward_model/loss" in row]
    assert [(row["step"], row["reward_model/replayed_rows"] > 0) for row in retrained] == [(2, False), (4, True)]
    kl = {row["step"]: row["actor/kl_loss"] for row in rows if "actor/kl_loss" in row}
    assert kl[1] == pytest.approx(0, abs=1e-6) == kl[3], "the reference has become the policy"
    assert kl[2] > 1e-6 < kl[4]
    assert all("reward_extra/rule/mean" in row for row in rows[1:])
    assert undocumented({name for row in rows for name in row} - {"step"}, PAGE.read_text()) == []
    train(resumed, *process, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole}/global_step_3")
    assert weights(resumed) == weights(whole)


def test_ranks_and_passes_change_nothing(tmp_path: Path) -> None:
    """To rounding: the scores of the third step are those of the model that was retrained before."""
    sizes = ("cluster.reward_model_world_size=2", "reward_model.retrain.micro_batch_size_per_gpu=3")
    short = ("trainer.total_training_steps=3", "trainer.save_freq=-1")
    one, two = train(tmp_path / "one", *short), train(tmp_path / "two", *sizes, *short)
    for name in ("reward_model/loss", "reward_model/accuracy", "reward_model/grad_norm"):
        assert two[2][name] == pytest.approx(one[2][name], rel=1e-3), name
    assert two[3]["reward_extra/rm_score/mean"] == pytest.approx(one[3]["reward_extra/rm_score/mean"], abs=2e-3)
