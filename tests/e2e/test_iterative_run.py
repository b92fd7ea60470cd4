"""DeepSeekMath's algorithm 1 on real ranks and the built-in task: two iterations of two steps, whole and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.main import main
from tests.models import builtin_reward_model
from tests.trainer.metrics_page import PAGE, undocumented

pytestmark = [
    pytest.mark.usefixtures("shared_ray"),
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(900),
]

SETTINGS = (
    "recipe=deepseekmath_iterative",
    "reward_model.retrain.freq=2",
    "reward_model.retrain.optim.lr=1e-3",
    "reward_model.retrain.train_batch_size=16",
    "reward_model.replay_share=0.5",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "data.val_max_samples=8",
    "trainer.total_training_steps=4",
    "trainer.save_freq=3",
    "trainer.logger=[console]",
)
# The built-in task's own scorer judges steps; spaces are between them.
PROCESS = (
    "algorithm.adv_estimator=grpo_process",
    "reward_model.process.enable=true",
    "reward.step_separator=' '",
    "custom_reward_function.reward_kwargs={functions: [{path: grpo_dist.rewards.reward_model}, "
    "{path: grpo_dist.tasks.worked_sums, weight: 0.0, label: rule}]}",
)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return builtin_reward_model(tmp_path_factory.mktemp("scorer"), template=None)


def train(folder: Path, scorer: str, *overrides: str) -> Path:
    """A run to its end; returns its folder."""
    named = (f"reward_model.model.path={scorer}", f"trainer.default_local_dir={folder}")
    assert main([*SETTINGS, *named, *overrides]) == 0
    return folder


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, Any]:
    """The digests of the tensors in the last checkpoint, by role and file, and the exported policy."""
    files = json.loads((folder / "global_step_4" / "manifest.json").read_text())["files"]
    roles = {name: digest for name, digest in files.items() if name.endswith(".distcp")}
    assert {name.partition("/")[0] for name in roles} == {"actor", "ref", "reward_model"}
    return roles | {"policy": (folder / "huggingface" / "model.safetensors").read_bytes()}


@pytest.mark.parametrize("process", [(), PROCESS], ids=["outcome", "process"])
def test_two_iterations_whole_and_resumed_inside_the_second(
    tmp_path: Path, scorer: str, process: tuple[str, ...]
) -> None:
    whole = train(tmp_path / "whole", scorer, *process)
    rows = metrics(whole)
    assert [row["step"] for row in rows if "reward_model/loss" in row] == [2, 4]
    assert [row["reward_model/replayed_rows"] > 0 for row in rows if "reward_model/loss" in row] == [False, True]
    kl = {row["step"]: row["actor/kl_loss"] for row in rows if "actor/kl_loss" in row}
    assert kl[1] == pytest.approx(0, abs=1e-6) == kl[3], "the reference has become the policy"
    assert kl[2] > 1e-6 < kl[4]
    assert all("reward_extra/rule/mean" in row for row in rows[1:])
    assert undocumented({name for row in rows for name in row} - {"step"}, PAGE.read_text()) == []
    half = f"trainer.resume_from_path={whole}/global_step_3"
    resumed = train(tmp_path / "resumed", scorer, *process, "trainer.resume_mode=resume_path", half)
    assert weights(resumed) == weights(whole)


def test_ranks_and_passes_change_nothing(tmp_path: Path, scorer: str) -> None:
    """To rounding: the scores of the third step are those of the model that was retrained before."""
    sizes = ("cluster.reward_model_world_size=2", "reward_model.retrain.micro_batch_size_per_gpu=3")
    one, two = (
        metrics(train(tmp_path / name, scorer, *overrides, "trainer.total_training_steps=3", "trainer.save_freq=-1"))
        for name, overrides in (("one", ()), ("two", sizes))
    )
    for name in ("reward_model/loss", "reward_model/accuracy", "reward_model/grad_norm"):
        assert two[2][name] == pytest.approx(one[2][name], rel=1e-3), name
    assert two[3]["reward_extra/rm_score/mean"] == pytest.approx(one[3]["reward_extra/rm_score/mean"], abs=2e-3)
