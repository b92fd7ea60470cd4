"""Sizes that a run and the estimates of its memory and time use; kept apart so that estimates need no torch."""

from __future__ import annotations

import math

GIB = 2**30
# KV cache of an engine on CPU if rollout.kv_cache_memory_gib is null.
CPU_KV_CACHE_GIB = 1.0
# Tokens of a block of the KV cache, by device. CPU: vLLM's default of 128 means that short prompts never share a cached
# prefix; 32 is the smallest there. CUDA: vLLM's default.
KV_BLOCK_TOKENS = {"cpu": 32, "cuda": 16}
# Log-probs and model scores of a job are computed in this many passes each: enough to overlap with generation, few
# enough to be large.
PASSES = 4
# Logits per chunk of the output layer: 64 MiB of float32 on CPU, 512 MiB on GPU, where large matrices are faster.
CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 27}
# Maximum bytes per file of the exported model, which rank 0 holds in memory at once; a larger tensor has its own file.
EXPORT_FILE_BYTES = 1 << 30
# Ranks for which vLLM makes room; others take the room of the next one.
ENGINE_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def heads_split(heads: int, kv_heads: int, size: int) -> bool:
    """Tell if attention heads split over processes: each gets whole ones, and whole key-value heads or one of them."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def divisor_up_to(number: int, most: int) -> int:
    """A divisor of a number, at most `most`: the largest one, if it is among the 10,000 numbers up to there."""
    top = min(number, most)
    near = range(top, max(top - 10_000, 0), -1)
    return next((size for size in near if number % size == 0), math.gcd(number, most))


def engine_lora_rank(rank: int) -> int:
    """The rank for which an engine makes room."""
    return next((size for size in ENGINE_LORA_RANKS if size >= rank), rank)


ADAM_STATES = 2  # AdamW's two running means
STATE_BYTES = {"AdamW": 4.0, "AdamW8bit": 1 + 4 / 256}  # of one: float32, or a code and its part of a block's scale
