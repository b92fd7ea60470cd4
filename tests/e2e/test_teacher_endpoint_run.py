"""The main job with a teacher that a vLLM server runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(600),
]

ENDPOINT = "actor_rollout_ref.ref.model.endpoint"


@pytest.fixture
def url() -> Iterator[str]:
    """A server of the policy's own start."""
    command = [sys.executable, "-m", "grpo_dist", "serve", "builtin:tiny-qwen3", "actor_rollout_ref.rollout.dtype=fp32"]
    environment = os.environ | {"VLLM_API_KEY": "token"}
    with subprocess.Popen([*command, "--port", "0"], env=environment, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        told = "".join(line for _, line in zip(range(3), started.stdout, strict=False))
        found = re.search(r"http://127.0.0.1:\d+", told)
        assert found, told
        yield f"{found[0]}/v1"
        started.kill()


def test_a_teacher_that_is_the_policy_itself_says_what_the_policy_says(url: str, tmp_path: Path) -> None:
    """In the first step the KL is 0 and the masses are the same; no ranks hold a reference."""
    settings = [
        "recipe=distill",
        f"{ENDPOINT}.base_url={url}",
        f"{ENDPOINT}.model=policy",
        f"{ENDPOINT}.headers_env=TEACHER_HEADERS",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.val_files=null",
        "trainer.save_freq=-1",
        "trainer.export_hf_model=false",
        "trainer.total_training_steps=1",
        "ray_kwargs.ray_init.address=local",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    command, headers = [sys.executable, "-m", "grpo_dist.main", *settings], '{"Authorization": "Bearer token"}'
    environment = os.environ | {"TEACHER_HEADERS": headers}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    step = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert abs(step["actor/kl_loss"]) < 1e-4
    assert 0.9 < step["actor/teacher_top_mass"] <= 1.0001
    assert step["actor/policy_top_mass"] == pytest.approx(step["actor/teacher_top_mass"], abs=1e-3)
