"""Run a function on several torch.distributed ranks (gloo), each a process of its own."""

import queue
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from grpo_dist.engines.rendezvous import LOOPBACK, init_process_group, open_store

# Imported once, by the server that the ranks are forked from: a rank then starts in a moment.
PRELOADED = ["torch", "transformers.models.auto.modeling_auto", "grpo_dist.engines.train.fsdp_engine", "pytest"]
PRELOADED += ["grpo_dist.engines.train.low_memory_adamw"]
PRELOADED += [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "qwen3")]


LIMIT_S = 270.0  # for all ranks together


def _entry(
    rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...], results: Any
) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        store = dist.TCPStore(LOOPBACK, port)
        init_process_group(device="cpu", rank=rank, world_size=world_size, store=store, timeout_s=LIMIT_S)
        results.put((rank, function(rank, *args), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, *args)` on every rank; the results in rank order. An exception on a rank fails the caller."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Open from now on: a port that is looked for and let go may be another's by the time a rank takes it.
    store = open_store(LOOPBACK)
    results = context.Queue()
    processes = [
        context.Process(target=_entry, args=(rank, world_size, store.port, function, args, results), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        return _collected(processes, results)
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def _collected(processes: list[Any], results: Any) -> list[Any]:
    """What every rank returned, in rank order; a rank that ends without a word fails the caller at once."""
    found: dict[int, Any] = {}
    gone: set[int] = set()
    deadline = time.monotonic() + LIMIT_S
    while len(found) < len(processes):
        try:
            rank, result, error = results.get(timeout=1.0)
        except queue.Empty:
            silent = gone - found.keys()  # gone at the look before: what they had put would be here by now
            codes = {rank: processes[rank].exitcode for rank in silent}
            assert not silent, f"ranks ended without a result; exit codes by rank: {codes}"
            assert time.monotonic() < deadline, f"in {LIMIT_S:g} s results of ranks {sorted(found)} only"
            gone = {rank for rank, process in enumerate(processes) if not process.is_alive()}
            continue
        assert error is None, f"rank {rank}:\n{error}"
        found[rank] = result
    return [found[rank] for rank in range(len(processes))]
