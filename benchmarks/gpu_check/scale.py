"""How large everything is: as it is measured on a GPU, and so small that a CPU shows in seconds that it works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Groups:
    """Groups of n responses to a prompt; lengths in tokens."""

    groups: int
    n: int
    prompt: int
    response: int

    @property
    def tokens(self) -> int:
        """Of one group, where all responses are as long as they may be and share their prompt."""
        return self.prompt + self.n * self.response


@dataclass(frozen=True)
class Tensors:
    """Tensors of about so many numbers each."""

    tensors: int
    numbers: int


@dataclass(frozen=True)
class Scale:
    """Sizes of all parts.

    Attributes:
        model: of config.json.
        square: rows of the large matrix product.
        rounds: measurements of which the median counts.
        attention: lengths at which kernels are compared; multiples of 64.
        changing: lengths that are run one after the other to see what is compiled anew.
        head_tokens: response tokens of the output layer.
        compared: sequences whose log-probs are compared.
        passes: by name, the mini-batch of an update whose micro-batches are single groups.
        mixed: the mini-batch that each layout takes, with responses of all lengths up to the given one.
        budget: tokens of its micro-batches.
        shared_weights: what one process hands over to another, in bf16.
        rollout: what the engines sample.
        job: overrides of the main job.
    """

    model: Mapping[str, Any]
    square: int
    rounds: int
    attention: tuple[int, ...]
    changing: tuple[int, ...]
    head_tokens: int
    compared: Groups
    passes: Mapping[str, Groups]
    mixed: Groups
    budget: int
    shared_weights: Tensors
    rollout: Groups
    job: tuple[str, ...]


QWEN3_06B = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TINY = QWEN3_06B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's attention on CPU has
    "max_position_embeddings": 1024,
}

SCALES = {
    "full": Scale(
        model=QWEN3_06B,
        square=8192,
        rounds=5,
        attention=(2048, 8192, 16_384, 32_768),
        changing=(1153, 1700, 2304, 3001, 4500, 5120, 7777, 9001, 12_345, 16_000, 19_999, 24_064),
        head_tokens=8192,
        compared=Groups(groups=4, n=4, prompt=256, response=256),
        passes={"2k": Groups(8, 8, 256, 224), "16k": Groups(4, 8, 1024, 1920)},
        mixed=Groups(groups=8, n=8, prompt=512, response=512),
        budget=16_384,
        shared_weights=Tensors(tensors=12, numbers=50_000_000),
        rollout=Groups(groups=64, n=8, prompt=256, response=256),
        job=("trainer.total_training_steps=6", "trainer.test_freq=6"),
    ),
    "small": Scale(
        model=TINY,
        square=128,
        rounds=2,
        attention=(64, 128),
        changing=(70, 100),
        head_tokens=64,
        compared=Groups(groups=2, n=2, prompt=12, response=12),
        passes={"2k": Groups(2, 4, 16, 12), "16k": Groups(2, 4, 32, 24)},
        mixed=Groups(groups=2, n=4, prompt=16, response=16),
        budget=128,
        shared_weights=Tensors(tensors=6, numbers=1000),
        rollout=Groups(groups=4, n=2, prompt=16, response=16),
        job=(
            "trainer.total_training_steps=2",
            "trainer.test_freq=2",
            "data.train_batch_size=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "data.val_max_samples=64",
        ),
    ),
}
