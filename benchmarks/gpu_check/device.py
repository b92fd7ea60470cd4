"""The GPU itself: what a process takes of it, how fast it multiplies, and what the output layer takes."""

from __future__ import annotations

import torch

from benchmarks import head as ways
from benchmarks.gpu_check.gpu import host_gib, median_seconds, used_gib
from benchmarks.gpu_check.results import largest
from benchmarks.gpu_check.work import Work
from grpo_dist.engines.train.model_loading import DTYPES
from grpo_dist.plan.memory import CUDA_GIB
from grpo_dist.sizes import GIB

# Less than any CUDA context, which takes some hundred MiB.
NO_CONTEXT_GIB = 0.1
# A chunk's sums are rounded otherwise than those of all tokens: relative, of values and gradients.
HEAD_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}


def context(work: Work) -> None:
    """GPU memory of a process that asks for the GPU's properties, as the driver does, and of one that computes."""
    before = work.used_before
    if before is None:
        work.found.missing("GPU memory of a process", "nvidia-smi does not say how much is used")
        return
    torch.cuda.get_device_properties(0)
    asked = _used() - before
    work.found.at_most("GPU memory of asking for the GPU's properties", asked, NO_CONTEXT_GIB, "GiB")
    a = torch.zeros(16, 16, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    work.found.note("CUDA context", _used() - before - torch.cuda.memory_reserved() / GIB, "GiB")
    a @ a
    torch.cuda.synchronize()
    with_blas = _used() - before - torch.cuda.memory_reserved() / GIB
    work.found.at_most("with cuBLAS", with_blas, CUDA_GIB, "GiB", note="the plan's CUDA_GIB has NCCL in it too")
    work.found.note("CPU memory of the process", host_gib("VmRSS"), "GiB")


def _used() -> float:
    found = used_gib()
    if found is None:
        raise RuntimeError("nvidia-smi has stopped to say how much memory of the GPU is used")
    return found


def square_rate(work: Work) -> float:
    """FLOP/s of a large square matrix product in the compute type."""
    return product_rate(work, work.scale.square, work.scale.square, work.scale.square)


def product_rate(work: Work, rows: int, inner: int, columns: int) -> float:
    """FLOP/s of (rows, inner) times a weight (columns, inner), as a linear layer has it."""
    dtype = DTYPES[work.compute]
    a = torch.randn(rows, inner, device=work.device, dtype=dtype)
    b = torch.randn(columns, inner, device=work.device, dtype=dtype)
    seconds = median_seconds(lambda: a @ b.t(), work.device, rounds=4 * work.scale.rounds, warm_ups=10)
    return 2 * rows * inner * columns / seconds


def matmul(work: Work) -> None:
    """The rate of a large square product, and of the model's matrices at two numbers of tokens."""
    config = work.scale.model
    square = square_rate(work)
    work.found.note(f"{work.scale.square} x {work.scale.square}, {work.compute}", square / 1e12, "TFLOP/s")
    hidden, width = config["hidden_size"], config["intermediate_size"]
    query, key = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = [(hidden, query), (hidden, key), (hidden, key), (query, hidden), (hidden, width), (hidden, width)]
    shapes.append((width, hidden))
    for group in work.scale.passes.values():
        sizes = [group.tokens * inner * columns for inner, columns in shapes]
        times = [size / product_rate(work, group.tokens, *shape) for size, shape in zip(sizes, shapes, strict=True)]
        work.found.note(f"a layer's matrices, {group.tokens:,} tokens", sum(sizes) / sum(times) / 1e12, "TFLOP/s")
    rows = min(2048, work.scale.head_tokens)
    rate = product_rate(work, rows, hidden, config["vocab_size"])
    work.found.note(f"output layer, {rows:,} tokens", rate / 1e12, "TFLOP/s")


def head(work: Work) -> None:
    """Time and peak memory, and whether values and gradients are the same."""
    tokens, config = work.scale.head_tokens, work.scale.model
    dtype = DTYPES[work.compute]
    torch.manual_seed(0)
    states = torch.randn(1, tokens, config["hidden_size"], device=work.device, dtype=dtype, requires_grad=True)
    weight = (
        torch.randn(config["vocab_size"], config["hidden_size"], device=work.device) * config["hidden_size"] ** -0.5
    )
    weight = weight.to(dtype).requires_grad_()
    targets = torch.randint(0, config["vocab_size"], (tokens,), device=work.device)
    found: dict[str, list[torch.Tensor]] = {}
    for name in ("chunked", "plain logits"):
        try:
            found[name] = _way(work, name, states, weight, targets)
        except torch.OutOfMemoryError:
            work.found.missing(f"{name}: {tokens:,} tokens", "the GPU's memory is not enough")
    if len(found) == 2:
        pairs = zip(found["chunked"], found["plain logits"], strict=True)
        off = largest(float((a - b).float().norm() / b.float().norm()) for a, b in pairs)
        work.found.right("difference of the two, relative", off, HEAD_TOLERANCE[work.compute])


def _way(
    work: Work, name: str, states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> list[torch.Tensor]:
    """The sum of log-probs and its gradients, one way; notes its time and memory."""

    def call() -> list[torch.Tensor]:
        value = ways.WAYS[name](states, weight, targets)
        return [value.detach(), *torch.autograd.grad(value, (states, weight))]

    seconds = median_seconds(call, work.device, rounds=work.scale.rounds)
    work.found.note(f"{name}: forward and backward, {len(targets):,} tokens", seconds * 1e3, "ms")
    if work.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = call()
        work.found.note(f"{name}: memory besides inputs", (torch.cuda.max_memory_allocated() - before) / GIB, "GiB")
        return found
    work.found.missing(f"{name}: memory besides inputs", "taken on a GPU only")
    return call()
