"""Seeds that depend on what is sampled, not on who samples it."""

from __future__ import annotations

import hashlib

# vLLM seeds response i of a group with seed + i; leave room below 2^31 for any group size.
_SEED_BITS = 30


def group_seed(run_seed: int, step: int, prompt_index: int) -> int:
    """Seed of a group's first response, from run seed, training step and prompt."""
    digest = hashlib.blake2b(f"{run_seed}/{step}/{prompt_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)
