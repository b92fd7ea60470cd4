"""Run a function on several torch.distributed ranks (gloo), each a process of its own."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from grpo_dist.engines.fsdp_model import init_process_group

# Imported once, by the server that the ranks are forked from: a rank then starts in a moment.
PRELOADED = ["torch", "transformers.models.auto.modeling_auto", "grpo_dist.engines.fsdp_engine", "pytest"]
PRELOADED += [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "qwen3")]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _entry(
    rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...], queue: Any
) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        init_process_group(device="cpu", rank=rank, world_size=world_size, master_address="127.0.0.1", master_port=port)
        queue.put((rank, function(rank, *args), None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, *args)` on every rank; the results in rank order. An exception on a rank fails the caller."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    queue, port = context.Queue(), free_port()
    processes = [
        context.Process(target=_entry, args=(rank, world_size, port, function, args, queue), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        results = {}
        for _ in processes:
            rank, result, error = queue.get(timeout=120)
            assert error is None, f"rank {rank}:\n{error}"
            results[rank] = result
        return [results[rank] for rank in range(world_size)]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
