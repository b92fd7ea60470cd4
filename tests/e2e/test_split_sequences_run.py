"""The main job with sequences that two ranks split: it learns what it learns where each rank has its own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_main_job import command, metrics

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

ACTOR = "actor_rollout_ref.actor"
SPLIT, STEPS = f"{ACTOR}.ulysses_sequence_parallel_size=2", 3
RUN = [
    "cluster.actor_world_size=2",
    f"{ACTOR}.kl_loss_type=full",
    f"{ACTOR}.entropy_coeff=0.001",
    f"{ACTOR}.optim.lr=1e-3",
    f"{ACTOR}.use_dynamic_bsz=true",
    f"{ACTOR}.ppo_max_token_len_per_gpu=512",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
]


def train(folder: Path, steps: int, *overrides: str) -> list[dict[str, Any]]:
    arguments = command(folder, *RUN, f"trainer.total_training_steps={steps}", f"trainer.save_freq={steps}", *overrides)
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return metrics(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train(tmp_path_factory.mktemp("whole") / "run", STEPS)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The last step is taken by ranks that do not split, from the checkpoint of those that do."""
    folder = tmp_path_factory.mktemp("split") / "run"
    train(folder, STEPS - 1, SPLIT)
    return train(folder, STEPS)


def test_rewards_losses_and_norms_are_the_same(whole: list[dict[str, Any]], split: list[dict[str, Any]]) -> None:
    """Losses are sums over ranks: they would double if the ranks of a group counted twice.

    A sum in another order may turn a token over where the draw falls between two; that is rare in so few steps.
    """
    steps = [[row for row in rows if row["step"]] for rows in (whole, split)]
    assert [[row["step"] for row in rows] for rows in steps] == [list(range(1, STEPS + 1))] * 2
    for one, two in zip(*steps, strict=True):
        for name in ("critic/score/mean", "response_length/mean", "actor/entropy"):
            assert two[name] == pytest.approx(one[name], rel=0.02, abs=0.02), (one["step"], name)
        for name in ("actor/loss", "actor/kl_loss", "actor/grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=0.05, abs=1e-3), (one["step"], name)
        assert two["training/rollout_probs_diff_max"] < 1e-3
    first = [rows[0] for rows in steps]
    for name in ("actor/loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy"):
        assert first[1][name] == pytest.approx(first[0][name], rel=1e-3, abs=1e-6), f"{name}: from the same samples"
