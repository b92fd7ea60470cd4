"""Errors of a full GPU: for what its memory was not enough, and which setting to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grpo_dist.engines.settings import PassLimits
from grpo_dist.errors import OutOfMemory


@contextmanager
def within_memory(what: str) -> Iterator[None]:
    """Turn torch's error of a full GPU, raised in the block, into one that names what did not fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        numbers, _, _ = str(error).partition(" If reserved but unallocated")
        raise OutOfMemory(f"the memory of the GPU is not enough for {what}: {numbers}") from None


@contextmanager
def remedied(remedy: str, setting: tuple[str, int] | None = None) -> Iterator[None]:
    """Add to an `OutOfMemory` of the block what to do, a sentence without the full stop, unless it says so already.

    `setting` is a key and its value, if half of the value takes about half of the memory.
    """
    try:
        yield
    except OutOfMemory as error:
        raise (error if error.remedy else OutOfMemory(error.message, remedy=remedy, setting=setting)) from None


@contextmanager
def smaller_passes(limits: PassLimits, *, ranks: int = 1) -> Iterator[None]:
    """Add to an `OutOfMemory` of the block, a pass that `ranks` split the tokens of, which key makes passes smaller."""
    name, value = ("micro_batch_size", limits.micro_batch_size)
    if limits.max_token_len is not None:
        name, value = limits.budget, limits.max_token_len // ranks
    key = f"{limits.keys}{name}_per_gpu"
    longer = "" if value > 1 else f": a pass holds one sequence, so lower {limits.lengths}"
    with remedied(f"lower {key}={value}{longer}", (key, value)):
        yield
