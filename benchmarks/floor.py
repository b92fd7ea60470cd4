"""What an update would take if every part ran at the rate that the machine reaches on that part alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks import workload
from grpo_dist.protocol import DataProto
from grpo_dist.sizes import CHUNK_LOGITS

# Events of the profiler by phase. What lies within another one of these counts to that one.
PHASES = {
    "attention": (
        "_BatchedAttention",
        "_BatchedAttentionBackward",
        "aten::scaled_dot_product_attention",
        "ScaledDotProductFlashAttentionForCpuBackward0",
    ),
    "output layer": ("_ChunkedHead", "_ChunkedHeadBackward"),
    "optimizer": ("Optimizer.step#AdamW.step",),
    "linear layers": ("aten::mm", "aten::addmm", "aten::addmm_"),
}
# AdamW reads weights, gradients and two moments, and writes all but the gradients, in float32.
STEP_BYTES = 7 * 4


def product_seconds(tokens: int, shape: torch.Size, device: str, dtype: torch.dtype) -> float:
    """Of a linear layer's forward and both backward products over so many tokens, each the best of several.

    Wall time: small products take one thread, which processor time would take for half of the machine at no cost.
    """
    generator = torch.Generator(device).manual_seed(0)
    x, w, g = (
        torch.randn(size, generator=generator, device=device).to(dtype)
        for size in ((tokens, shape[1]), shape, (tokens, shape[0]))
    )
    products: tuple[Callable[[], Any], ...] = (lambda: F.linear(x, w), lambda: g @ w, lambda: g.t() @ x)
    return sum(min(wall_seconds(product, device) for _ in range(8)) for product in products)


def wall_seconds(call: Callable[[], Any], device: str) -> float:
    """Wall time of a call."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def floors(model: Any, data: DataProto, tokens: int, device: str, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Of each phase of an update with shared prompts, its work and its seconds at the measured rates.

    The layers' products are measured over as many tokens as a micro-batch has, the output layer's over a chunk.

    Args:
        model: the engine's.
        data: the mini-batch.
        tokens: of a micro-batch.
        device: "cpu" or "cuda".
        dtype: the compute type.
    """
    head = model.get_output_embeddings().weight.shape
    layers = Counter(p.shape for name, p in model.named_parameters() if p.dim() == 2 and "layers." in name)
    parts = workload.useful_operations(model, data)
    answered = int(data["responses"].lengths.sum())
    chunk = min(CHUNK_LOGITS[device] // head[0], answered)
    seconds = sum(count * product_seconds(tokens, shape, device, dtype) for shape, count in layers.items())
    per_token = 6 * sum(count * shape.numel() for shape, count in layers.items())
    rate = per_token * tokens / seconds
    head_seconds = product_seconds(chunk, head, device, dtype) * answered / chunk
    source = torch.zeros(1 << 26, device=device)
    copied = torch.empty_like(source)
    speed = 2 * source.nbytes / min(wall_seconds(lambda: copied.copy_(source), device) for _ in range(4))
    weights = sum(p.numel() for p in model.parameters())
    return {
        "linear layers": {"work": parts["layers"] / 1e9, "floor": parts["layers"] / rate},
        "attention": {"work": parts["attention"] / 1e9, "floor": parts["attention"] / rate},
        "output layer": {"work": parts["head"] / 1e9, "floor": head_seconds},
        "optimizer": {"work": STEP_BYTES * weights / 1e9, "floor": STEP_BYTES * weights / speed},
    }


def phase_seconds(update: Callable[[], Any]) -> dict[str, float]:
    """Wall time of an update by phase, under the profiler."""
    names = {name: phase for phase, members in PHASES.items() for name in members}
    with profile(activities=[ProfilerActivity.CPU]) as found:
        update()
    total = dict.fromkeys(PHASES, 0.0)
    events = found.events() or []
    for event in events:
        parent: Any = event.cpu_parent
        while parent is not None and parent.name not in names:
            parent = parent.cpu_parent
        if parent is None and event.name in names:
            total[names[event.name]] += event.cpu_time_total / 1e6
    whole = (max(e.time_range.end for e in events) - min(e.time_range.start for e in events)) / 1e6
    return total | {"rest": whole - sum(total.values())}
