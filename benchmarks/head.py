"""Memory and time of the output layer: chunked against plain logits, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import workload
from grpo_dist.algorithms.aggregate import token_log_probs
from grpo_dist.engines.train.lm_head import HeadRequest, response_values


def compare(
    vocab: int, hidden: int, tokens: int, threads: int, *, rounds: int = 1, ways: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Forward and backward of the log-probs of `tokens` tokens on CPU, by all ways or some: the best of each.

    The ways take turns, `rounds` processes each, every one of which does it as many times.
    """
    ways = ways or tuple(WAYS)
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, maxtasksperchild=1) as pool:
        jobs = [(way, vocab, hidden, tokens, threads, rounds) for way in ways] * rounds
        rows = pool.starmap(measure, jobs, chunksize=1)
    best = [{name: min(row[name] for row in rows[i :: len(ways)]) for name in rows[0]} for i in range(len(ways))]
    return [
        {"head": way, "vocabulary": vocab, "hidden": hidden, "tokens": tokens, **row}
        for way, row in zip(ways, best, strict=True)
    ]


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Plain logits over chunked ones, in seconds and memory."""
    found = {row["head"]: row for row in rows}
    names = {"seconds": "time", "peak_mib": "memory"} if rows else {}
    return {f"head/{name} of plain logits": found[PLAIN][key] / found[CHUNKED][key] for key, name in names.items()}


def measure(way: str, vocab: int, hidden: int, tokens: int, threads: int, times: int) -> dict[str, float]:
    """Peak resident memory above the inputs and gradients' own, MiB, and the least seconds of some times."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    states = torch.randn(1, tokens, hidden, requires_grad=True)
    weight = (torch.randn(vocab, hidden) * hidden**-0.5).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,))
    states.grad, weight.grad = torch.zeros_like(states), torch.zeros_like(weight)
    weight.grad.add_(1e-30)  # the pages are there from now on
    seconds = []

    def work() -> None:
        for _ in range(times):
            start = time.perf_counter()
            WAYS[way](states, weight, targets).backward()
            seconds.append(time.perf_counter() - start)

    return {"peak_mib": workload.peak_mib(work), "seconds": min(seconds)}


def plain(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits at once."""
    return token_log_probs(nn.functional.linear(states[0], weight), targets, 1.0).sum()


def chunked(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """As the engine does."""
    request = HeadRequest(torch.arange(len(targets), device=targets.device), targets, 1.0)
    return response_values(states, weight, None, request).log_probs.sum()


def torchs_own(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """`linear_cross_entropy` of torch, chunked: a sum only, without temperature, entropy or KL."""
    options = torch.nn.LinearCrossEntropyOptions()
    return -nn.functional.linear_cross_entropy(states[0], weight, targets, reduction="sum", options=options)


PLAIN, CHUNKED = "plain logits", "chunked"
WAYS = {PLAIN: plain, CHUNKED: chunked, "torch linear_cross_entropy": torchs_own}
