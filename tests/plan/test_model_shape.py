"""Sizes of models, of which some are known."""

import pytest

from grpo_dist.plan.commands import load_config
from grpo_dist.plan.model_shape import model_shape
from tests.memory_cells import MODELS


def test_two_matrices_in_a_feed_forward_layer_and_an_embedding_that_is_the_head_too() -> None:
    """Pythia-1b has 1.01 billion parameters, phi-2 2.78, Gemma-2b, whose file says nothing of its head, 2.51."""
    pythia = {"model_type": "gpt_neox", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8,
              "intermediate_size": 8192, "vocab_size": 50304, "tie_word_embeddings": False}  # fmt: skip
    phi = {"model_type": "phi", "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32,
           "intermediate_size": 10240, "vocab_size": 51200, "tie_word_embeddings": False}  # fmt: skip
    gemma = {"model_type": "gemma", "hidden_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 8,
             "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 16384, "vocab_size": 256000}  # fmt: skip
    shapes = [model_shape(each) for each in (pythia, phi, gemma)]
    assert [shape and shape.num_parameters / 1e9 for shape in shapes] == pytest.approx([1.01, 2.78, 2.51], rel=0.01)


def test_a_mixture_of_experts() -> None:
    """Qwen3-30B-A3B; transformers counts 30,532,122,624, 12,288 of them in norms of queries and keys."""
    shape = model_shape(MODELS["Qwen3-30B-A3B"])
    assert shape is not None
    attention = 2048 * (4096 + 512 + 512) + 4096 * 2048
    experts = 128 * 3 * 2048 * 768
    assert shape.layer == attention + experts + 128 * 2048 + 2 * 2048 == 623_120_384
    assert shape.num_parameters == 30_532_122_624 - 48 * 2 * 128
    assert (shape.width, shape.copies) == (8 * 768, 8 * 2048), "a token goes to 8 of 128"
    config, _ = load_config(["actor_rollout_ref.model.lora_rank=32"])
    factors = 48 * 32 * ((2048 + 4096) + 2 * (2048 + 512) + (4096 + 2048))
    assert shape.lora_parameters(config.actor_rollout_ref.model) == factors == 26_738_688, "of the attention alone"


@pytest.mark.parametrize(
    ("entries", "experts"),
    [({"num_local_experts": 8}, 8), ({"n_routed_experts": 16}, 16), ({"num_experts": 1}, 0), ({}, 0)],
)
def test_experts_by_the_names_that_families_give_them(entries: dict[str, int], experts: int) -> None:
    dense = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 9,
    }
    shape = model_shape(dense | {"num_experts_per_tok": 2} | entries)
    assert shape is not None
    assert shape.layer == 4 * 8 * 8 + max(1, experts) * 3 * 8 * 16 + experts * 8 + 2 * 8
    assert shape.copies == (2 * 8 if experts else 0)
    assert ("gate_proj" in shape.linears) == (not experts)
