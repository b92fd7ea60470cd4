"""The main job with a mixture of experts: the built-in model, each of whose layers has become four equal ones.

At first it computes what the built-in model does, whichever experts a token goes to, so that it learns within minutes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from grpo_dist.assets import resolve_model_path
from tests.e2e.test_main_job import command, metrics

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

EXPERTS, STEPS = 4, 6
WAYS = {
    "": [],
    "tensor parallel": ["actor_rollout_ref.rollout.tensor_model_parallel_size=2", "cluster.rollout_world_size=2"],
    "router replay": ["actor_rollout_ref.actor.router_replay.mode=R3"],
}


def upcycled(folder: Path) -> Path:
    """The built-in model with `EXPERTS` copies of each feed-forward layer, of which a token goes to two."""
    source = Path(resolve_model_path("builtin:tiny-qwen3"))
    dense = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    entries = {k: v for k, v in dense.config.to_dict().items() if k not in ("model_type", "architectures")}
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": dense.config.intermediate_size}
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3MoeConfig(**entries | sizes | {"norm_topk_prob": True})
    )
    assert set(model.load_state_dict(dense.state_dict(), strict=False).missing_keys) == {
        f"model.layers.{i}.mlp.{name}"
        for i in range(3)
        for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    }
    for old, new in zip(dense.model.layers, model.model.layers, strict=True):
        gate_up = torch.cat([old.mlp.gate_proj.weight, old.mlp.up_proj.weight])
        new.mlp.experts.gate_up_proj.data.copy_(gate_up.expand(EXPERTS, -1, -1))
        new.mlp.experts.down_proj.data.copy_(old.mlp.down_proj.weight.expand(EXPERTS, -1, -1))
    model.save_pretrained(folder)
    for file in source.iterdir():
        if not (folder / file.name).exists() and file.suffix != ".safetensors":
            shutil.copy(file, folder)
    ids = torch.arange(3, 40).unsqueeze(0)
    torch.testing.assert_close(model(input_ids=ids).logits, dense(input_ids=ids).logits, atol=1e-3, rtol=0)
    return folder


@pytest.fixture(scope="module", params=WAYS)
def run_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    overrides = [
        f"actor_rollout_ref.model.path={upcycled(folder / 'model')}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        "trainer.save_freq=-1",
        "cluster.actor_world_size=2",
        *(f"actor_rollout_ref.{role}.fsdp_config.dtype=fp32" for role in ("actor", "ref")),
        "actor_rollout_ref.rollout.dtype=float32",
        *WAYS[request.param],
    ]
    done = subprocess.run(command(folder / "run", *overrides), capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, (done.stderr + done.stdout)[-6000:]
    return folder / "run"


def test_sampler_and_trainer_agree_on_the_experts(run_dir: Path) -> None:
    rows = [row for row in metrics(run_dir) if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["training/rollout_probs_diff_max"] < 1e-3, "in each step with the weights of the update before"
        assert row["actor/grad_norm"] > 0
        assert row.get("training/router_replay/unknown", 0.0) == 0.0
    assert ("training/router_replay/unknown" in rows[0]) == ("mode: R3" in (run_dir / "config.yaml").read_text())
    rewards = [row["critic/score/mean"] for row in rows]
    assert sum(rewards[3:]) > sum(rewards[:3]), "it learns"


def test_what_was_trained_is_exported_expert_by_expert(run_dir: Path) -> None:
    folder = run_dir / "huggingface"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_moe"
    trained = transformers.AutoModelForCausalLM.from_pretrained(folder)
    stack = trained.model.layers[1].mlp.experts.down_proj
    apart = [(stack[i] - stack[0]).abs().max().item() for i in range(1, EXPERTS)]
    assert all(difference > 1e-6 for difference in apart), "equal at first, they have trained apart"
