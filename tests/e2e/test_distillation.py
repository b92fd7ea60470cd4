"""The main job taught by another model: one of another size, one that a vLLM server runs, and the policy itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.protocol.parquet import read_parquet
from grpo_dist.tasks import arithmetic
from tests.e2e.runs import PLAIN, metrics, sized, train, train_here, write_rows
from tests.models import another_builtin_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

LORA = "actor_rollout_ref.model.lora_rank=4"


def test_it_is_taught_and_a_stop_changes_no_bit(shared_ray: None, tmp_path: Path) -> None:
    """With LoRA, by prompts without ground truths. After a stop the teacher is loaded again from its folder, and its
    output layer comes to the actor once more.
    """
    teacher = another_builtin_model(tmp_path / "teacher", tie_word_embeddings=False, vocab_size=264)
    rows = [{"prompt": row["prompt"]} for row in arithmetic.rows("train")[:12]]
    settings = [
        *("recipe=distill", "data=arithmetic", f"actor_rollout_ref.ref.model.path={teacher}"),
        *(write_rows(tmp_path / "prompts.jsonl", rows), "data.val_max_samples=8", *sized(4, n=2)),
        *(LORA, "actor_rollout_ref.actor.optim.lr=1e-3"),
        *("trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.test_freq=2"),
    ]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    rows = train_here(whole, *settings)
    assert [row["step"] for row in rows] == list(range(5))
    assert all(row["actor/kl_loss"] > 1 and row["actor/grad_norm"] > 0 for row in rows[1:]), "far from its teacher"
    assert all(row["critic/advantages/max"] == row["critic/score/max"] == 0 for row in rows[1:])
    assert rows[0]["val-core/arithmetic/acc/mean@1"] > 0, "rows with a ground truth are scored"
    half = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole}/global_step_2")
    train_here(resumed, *settings, *half)
    for row, other in zip(metrics(whole)[-2:], metrics(resumed)[-2:], strict=True):
        assert row["actor/kl_loss"] == other["actor/kl_loss"]
    one, other = ((folder / "huggingface" / "model.safetensors").read_bytes() for folder in (whole, resumed))
    assert one == other
    assert not (whole / "global_step_2" / "ref").exists()


def test_a_teacher_that_is_the_policy_itself_says_what_the_policy_says(tmp_path: Path) -> None:
    """On a server: in the first step the KL is 0 and the masses are the same; no ranks hold a reference."""
    serve = [sys.executable, "-m", "grpo_dist", "serve", "builtin:tiny-qwen3", "actor_rollout_ref.rollout.dtype=fp32"]
    environment = os.environ | {"VLLM_API_KEY": "token"}
    with subprocess.Popen([*serve, "--port", "0"], env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            told = "".join(line for _, line in zip(range(3), server.stdout, strict=False))
            found = re.search(r"http://127.0.0.1:\d+", told)
            assert found, told
            endpoint = "actor_rollout_ref.ref.model.endpoint"
            (step,) = train(
                tmp_path / "run",
                *("recipe=distill", f"{endpoint}.base_url={found[0]}/v1", f"{endpoint}.model=policy"),
                *(f"{endpoint}.headers_env=TEACHER_HEADERS", "trainer.total_training_steps=1", *PLAIN, *sized(4)),
                TEACHER_HEADERS='{"Authorization": "Bearer token"}',
            )
        finally:
            server.kill()
    assert abs(step["actor/kl_loss"]) < 1e-4
    assert 0.9 < step["actor/teacher_top_mass"] <= 1.0001
    assert step["actor/policy_top_mass"] == pytest.approx(step["actor/teacher_top_mass"], abs=1e-3)


@pytest.mark.parametrize("shown", ["successes", "texts"])
def test_the_policy_teaches_itself(shared_ray: None, tmp_path: Path, shown: str) -> None:
    """By successes of its groups: of 64 responses some are right, groups without one learn nothing, and the teacher
    moves. With LoRA by a text of the row, to single responses.
    """
    hint = {"extra_info": {"hint": arithmetic.worked_answer(1, 2)}}
    key = "algorithm.self_distillation"
    texts = [
        write_rows(tmp_path / "rows.jsonl", [row | hint for row in arithmetic.rows("train")[:16]]),
        *(f"{key}.success_threshold=null", f"{key}.feedback_name=hint", "actor_rollout_ref.rollout.n=1"),
        *(LORA, "actor_rollout_ref.ref.ref_model_sync_steps=-1"),
    ]
    settings = ["recipe=sdpo", *sized(8), *PLAIN, "trainer.total_training_steps=2"]
    for row in train_here(tmp_path / "run", *settings, *(texts if shown == "texts" else ()))[-2:]:
        fraction = row["actor/self_distilled_fraction"]
        assert (fraction == 1) if shown == "texts" else (0 < fraction < 1)
        assert row["actor/kl_loss"] > 0
        assert row["actor/grad_norm"] > 0
    if shown == "successes":
        data = read_parquet(tmp_path / "run" / "rollouts" / "1.parquet")
        told = data["teacher_prompts"].lengths > 0
        for uid in set(data["uid"]):
            rows = [i for i, other in enumerate(data["uid"]) if other == uid]
            successes = [i for i in rows if data["score"][i] >= 1]
            assert [bool(told[i]) for i in rows] == [bool(set(successes) - {i}) for i in rows]
        assert (data["teacher_prompts"].lengths > data["prompts"].lengths)[told].all()
