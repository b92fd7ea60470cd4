"""Sizes of models, of which some are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.plan.model_shape import model_config_at_hand, model_shape
from tests.memory_cells import MODELS
from tests.plan.asked import load


def decoder(hidden: int, layers: int, heads: int, width: int, vocabulary: int, **more: object) -> dict[str, Any]:
    return {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, **more,
            "intermediate_size": width, "vocab_size": vocabulary}  # fmt: skip


SMOLLM2_135M = decoder(576, 30, 9, 1536, 49152, num_key_value_heads=3, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("config", "billions", "near"),
    [  # transformers counts 8,190,735,360 and 134,515,008; Qwen3's q and k norms are left out here
        (MODELS["Qwen3-8B"], 8.1907, 1e-4),
        (SMOLLM2_135M, 0.134515, 1e-4),
        # two matrices in a feed-forward layer: Pythia-1b and phi-2
        (decoder(2048, 16, 8, 8192, 50304, model_type="gpt_neox", tie_word_embeddings=False), 1.01, 0.01),
        (decoder(2560, 32, 32, 10240, 51200, model_type="phi", tie_word_embeddings=False), 2.78, 0.01),
        # an embedding that is the head too, though the file says nothing of it: Gemma-2b
        (decoder(2048, 18, 8, 16384, 256000, model_type="gemma", num_key_value_heads=1, head_dim=256), 2.51, 0.01),
    ],
)
def test_parameters_of_known_models(config: dict[str, Any], billions: float, near: float) -> None:
    shape = model_shape(config)
    assert shape is not None
    assert shape.num_parameters == pytest.approx(billions * 1e9, rel=near)


def test_a_mixture_of_experts() -> None:
    """Qwen3-30B-A3B; transformers counts 30,532,122,624, 12,288 of them in norms of queries and keys."""
    shape = model_shape(MODELS["Qwen3-30B-A3B"])
    assert shape is not None
    attention = 2048 * (4096 + 512 + 512) + 4096 * 2048
    experts = 128 * 3 * 2048 * 768
    assert shape.layer == attention + experts + 128 * 2048 + 2 * 2048 == 623_120_384
    assert shape.num_parameters == 30_532_122_624 - 48 * 2 * 128
    assert (shape.width, shape.copies) == (8 * 768, 8 * 2048), "a token goes to 8 of 128"
    factors = 48 * 32 * ((2048 + 4096) + 2 * (2048 + 512) + (4096 + 2048))
    model = load("model.lora_rank=32").actor_rollout_ref.model
    assert shape.lora_parameters(model) == factors == 26_738_688, "of the attention alone"


@pytest.mark.parametrize(
    ("entries", "experts"),
    [({"num_local_experts": 8}, 8), ({"n_routed_experts": 16}, 16), ({"num_experts": 1}, 0), ({}, 0)],
)
def test_experts_by_the_names_that_families_give_them(entries: dict[str, int], experts: int) -> None:
    shape = model_shape(decoder(8, 1, 2, 16, 9, num_experts_per_tok=2) | entries)
    assert shape is not None
    assert shape.layer == 4 * 8 * 8 + max(1, experts) * 3 * 8 * 16 + experts * 8 + 2 * 8
    assert shape.copies == (2 * 8 if experts else 0)
    assert ("gate_proj" in shape.linears) == (not experts)


def test_sizes_of_hub_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the hub's cache if it is there, else from known_models.json; nothing is downloaded."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert model_config_at_hand("Qwen/Qwen3-8B") == MODELS["Qwen3-8B"]
    assert model_config_at_hand("/models/Qwen3-8B") == MODELS["Qwen3-8B"]
    assert model_config_at_hand("someone/something") is None
    snapshot = tmp_path / "hub/models--someone--something/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(SMOLLM2_135M))
    assert model_config_at_hand("someone/something") == SMOLLM2_135M
    assert model_shape({"n_embd": 768, "n_layer": 12}) is None, "of another architecture"
