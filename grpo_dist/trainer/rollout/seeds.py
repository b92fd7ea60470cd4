"""Seeds that depend on what is sampled, not on who samples it."""

from __future__ import annotations

import hashlib

# vLLM seeds response i of a group with seed + i; leave room below 2^31 for any group size.
_SEED_BITS = 30


def group_seed(run_seed: int, step: int, prompt_index: int, attempt: int = 0) -> int:
    """Seed of a group's first response, from run seed, training step, prompt, and batch of prompts in the step."""
    again = f"/{attempt}" if attempt else ""
    digest = hashlib.blake2b(f"{run_seed}/{step}/{prompt_index}{again}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)
