"""Errors of a full GPU: for what its memory was not enough, and which setting to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grpo_dist.errors import OutOfMemory


@contextmanager
def within_memory(what: str) -> Iterator[None]:
    """Turn torch's error of a full GPU, raised in the block, into one that names what did not fit.

    Raises:
        OutOfMemory: the GPU is full; `remedied` adds what to do.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        numbers, _, _ = str(error).partition(" If reserved but unallocated")
        raise OutOfMemory(f"the memory of the GPU is not enough for {what}: {numbers}") from None


@contextmanager
def remedied(remedy: str, setting: tuple[str, int] | None = None) -> Iterator[None]:
    """Add to an `OutOfMemory` of the block what to do, unless it says so already.

    Args:
        remedy: a sentence without the full stop.
        setting: a key and its value, if half of the value takes about half of the memory.

    Raises:
        OutOfMemory: raised in the block.
    """
    try:
        yield
    except OutOfMemory as error:
        raise (error if error.remedy else OutOfMemory(error.message, remedy=remedy, setting=setting)) from None


@contextmanager
def smaller_passes(
    prefix: str,
    micro_batch_size: int,
    max_token_len: int | None,
    *,
    ranks: int = 1,
    budget: str = "max_token_len",
    lengths: str = "data.max_response_length or data.max_prompt_length",
) -> Iterator[None]:
    """Add to an `OutOfMemory` of the block, a pass, which key makes passes smaller.

    Args:
        prefix: of the keys, such as "actor_rollout_ref.actor.ppo_".
        micro_batch_size: most sequences of a pass.
        max_token_len: most tokens of a pass; None: the number of sequences is the limit.
        ranks: that split a pass, each with its share of those tokens.
        budget: name of the key of the most tokens, between `prefix` and `_per_gpu`.
        lengths: the keys that limit a sequence.
    """
    name, value = ("micro_batch_size", micro_batch_size)
    if max_token_len is not None:
        name, value = budget, max_token_len // ranks
    key = f"{prefix}{name}_per_gpu"
    longer = "" if value > 1 else f": a pass holds one sequence, so lower {lengths}"
    with remedied(f"lower {key}={value}{longer}", (key, value)):
        yield
