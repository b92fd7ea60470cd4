"""Sizes that the engines use and that the memory plan counts with, without torch."""

from __future__ import annotations

GIB = 2**30
# The engine's KV cache on CPU where rollout.kv_cache_memory_gib is null.
CPU_KV_CACHE_GIB = 1.0
# Logits of a chunk of the output layer, in numbers: 64 MiB of float32 on CPU, 512 MiB on GPU, where large matrices pay.
CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 27}
# Most bytes of a file of the exported model with several tensors: what rank 0 holds of them at once.
EXPORT_FILE_BYTES = 1 << 30
