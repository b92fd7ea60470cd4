"""What a rank keeps of gradients between the micro-batches of a mini-batch, and what offloading takes away."""

from __future__ import annotations

import pytest

from grpo_dist.engines.settings import PassLimits
from tests.fake_memory import GIB, fake_engine, peak_of_update, sequences
from tests.worker_settings import model_settings

pytestmark = pytest.mark.deep

# 4 layers of (2 * 512 * (512 + 256) + 3 * 512 * 4096) numbers of a Qwen3; the vocabulary hardly counts.
SHAPE = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
         "intermediate_size": 4096, "vocab_size": 512, "tie_word_embeddings": True}  # fmt: skip
PARAMETERS = 4 * (2 * 512 * (512 + 256) + 3 * 512 * 4096 + 2 * 512 + 2 * 64) + 512 * 512 + 512
RANKS = 4


def peak(ranks: int = RANKS, response: int = 8, **changes: object) -> float:
    """Bytes at the peak of an optimizer step of two micro-batches of two responses."""
    settings = model_settings("fake", compute_dtype="bf16", enable_gradient_checkpointing=True, **changes)
    with fake_engine(SHAPE, settings, ranks, trains=True) as engine:
        found = peak_of_update(engine, sequences(2, 2, 8, response), limits=PassLimits("", 2))
    return found["Total"] * GIB


@pytest.fixture(scope="module")
def reduced() -> float:
    return peak()


def test_every_micro_batch_is_reduced(reduced: float) -> None:
    """Gradients that wait for the last one are whole: 4 bytes a parameter in place of a shard of them, of which a
    quarter is the buffer of a layer's reduction, which is later.
    """
    assert peak(defer_grad_sync=True) - reduced > PARAMETERS * 4 * (1 - 1 / RANKS) * 0.7


def test_copies_wait_with_their_shards_only(reduced: float) -> None:
    """Hybrid sharding: twice the shard of weights, gradients and states, 16 bytes a parameter, and no more."""
    assert peak(fsdp_size=RANKS // 2) - reduced == pytest.approx(PARAMETERS * 16 / RANKS, rel=0.1)


def test_offloaded_states_are_there_for_the_step_alone() -> None:
    """Alone, a rank keeps weights, whole gradients and its states: of 16 bytes a parameter 8 are not there at the peak
    of the backward pass, whose gathered weights take 2.
    """
    away = peak(1, optimizer_offload=True)
    assert away == pytest.approx(PARAMETERS * 16, rel=0.05), "weights, gradients and states in the step"
    assert peak(1) - away > PARAMETERS * 1.8


def test_offloaded_activations_are_those_of_one_layer() -> None:
    """Of the inputs of 4 layers, 512 numbers of 2 bytes a token, 3 are away where a layer is computed again."""
    stays, away = (peak(response=4096, enable_activation_offload=offload) for offload in (False, True))
    assert stays - away == pytest.approx(3 * (8 + 2 * 4096) * 512 * 2, rel=0.05)
