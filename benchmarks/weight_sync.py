"""Weight sync on real processes: one actor rank, one engine, every transport, in turns."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.throughput import engine_settings, kill, spawn
from grpo_dist.runtime.event_loop import run
from grpo_dist.workers.actor import ActorWorker
from grpo_dist.workers.gang import Gang
from grpo_dist.workers.rollout import RolloutWorker
from grpo_dist.workers.weight_transport import weight_transport
from tests.worker_settings import model_settings, policy_settings

TRANSPORTS = ("object_store", "broadcast")


def compare(models: dict[str, str], threads: int, rounds: int) -> list[dict[str, Any]]:
    """The best of some syncs of each model by each transport, and of copies of as many bytes."""
    return [row for name, path in models.items() for row in _compare(name, path, threads, rounds)]


def _compare(name: str, path: str, threads: int, rounds: int) -> list[dict[str, Any]]:
    actor = spawn("actor", ActorWorker, (0, 1), threads)
    run(Gang(actor).start(policy_settings(model_settings(path), num_threads=threads)))
    engines = {}
    for way in TRANSPORTS:
        engines[way] = spawn("rollout", RolloutWorker, (), threads, max_concurrency=10)
        engines[way].call(0, "start", "start", engine_settings(path, weight_transport=way))
    transports = {way: weight_transport(way, workers_per_engine=1, collective_timeout_s=240.0) for way in TRANSPORTS}
    num_bytes = _num_bytes(path)
    times: dict[str, list[float]] = {way: [] for way in (*TRANSPORTS, "copy")}
    for version in range(rounds + 1):  # the first one warms up, and forms the group
        for way in TRANSPORTS:
            started = time.perf_counter()
            confirmed = run(transports[way].sync(actor, engines[way], [0], version=version, dtype="float32"))
            times[way].append(time.perf_counter() - started)
            assert confirmed == {0: version}, confirmed
        times["copy"].append(_copy_seconds(num_bytes))
    best = {way: min(each[1:]) for way, each in times.items()}
    kill([actor, *engines.values()])
    return [
        {
            "model": name,
            "MB": num_bytes / 1e6,
            "transport": way,
            "seconds": best[way],
            "MB/s": num_bytes / 1e6 / best[way],
            "copy MB/s": num_bytes / 1e6 / best["copy"],
            "of a copy": best["copy"] / best[way],
        }
        for way in TRANSPORTS
    ]


def _copy_seconds(num_bytes: int) -> float:
    source, target = np.ones(num_bytes, np.uint8), np.empty(num_bytes, np.uint8)
    target[:] = 0  # the pages are there from now on
    started = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started


def _num_bytes(path: str) -> int:
    """Of the weights in fp32."""
    from pathlib import Path

    from safetensors import safe_open

    total = 0
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            total += sum(4 * int(np.prod(tensors.get_slice(key).get_shape())) for key in tensors.keys())
    return total
