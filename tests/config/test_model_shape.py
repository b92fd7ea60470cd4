"""Sizes of models, of which some are known."""

import pytest

from grpo_dist.config.model_shape import model_shape


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
