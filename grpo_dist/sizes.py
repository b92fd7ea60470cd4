"""Sizes that both the engines and the memory estimate use; kept apart so that the estimate needs no torch."""

from __future__ import annotations

GIB = 2**30
# KV cache of an engine on CPU if rollout.kv_cache_memory_gib is null.
CPU_KV_CACHE_GIB = 1.0
# Logits per chunk of the output layer: 64 MiB of float32 on CPU, 512 MiB on GPU, where large matrices are faster.
CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 27}
# Maximum bytes per file of the exported model, which rank 0 holds in memory at once; a larger tensor has its own file.
EXPORT_FILE_BYTES = 1 << 30
