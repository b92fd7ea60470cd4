"""Processes that work on one part together, each with an environment of its own: a GPU, settings of the allocator."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from grpo_dist.engines.rendezvous import LOOPBACK, open_store

# How often the processes are looked at while their results are waited for.
LOOK_S = 0.1
# How long those that have given their results may take to end.
GRACE_S = 15.0


def run_ranks(
    function: str, environments: Sequence[Mapping[str, str]], arguments: Mapping[str, Any], limit_s: float
) -> list[Any]:
    """Start a process for each environment and have it call `function(store, rank, **arguments)`.

    Args:
        function: `module:name`.
        environments: what each process has in its environment besides that of this one; an empty text removes a name.
        arguments: of the function; they and its result are JSON.
        limit_s: seconds that all of them may take together.

    Returns:
        The results, in the order of the ranks.

    Raises:
        RuntimeError: a process failed, ended without a result, or takes too long.
    """
    store = open_store(LOOPBACK)
    command = [sys.executable, "-m", "benchmarks.gpu_check.ranks", function, str(store.port), json.dumps(arguments)]
    processes = [
        subprocess.Popen([*command, str(rank)], env=_changed(environment))
        for rank, environment in enumerate(environments)
    ]
    try:
        deadline = time.monotonic() + limit_s
        results = [_result(store, rank, processes, deadline) for rank in range(len(processes))]
        _await(processes)
        return results
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _await(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let processes that have given their results end what they have started, as far as they do it soon."""
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0.0))


def _changed(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in {**os.environ, **environment}.items() if value}


def _result(store: dist.TCPStore, rank: int, processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> Any:
    """Wait for the result of a rank; any rank that fails ends the waiting, since the others would wait for it."""
    while not store.check([_key(rank)]):
        for other, process in enumerate(processes):
            ended = process.poll() is not None
            if store.check([_key(other)]):
                _read(store, other)
            elif ended:
                raise RuntimeError(f"rank {other} ended with exit code {process.returncode} and without a result")
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank {rank} has no result in time")
        time.sleep(LOOK_S)
    return _read(store, rank)


def _read(store: dist.TCPStore, rank: int) -> Any:
    answer = json.loads(store.get(_key(rank)))
    if "error" in answer:
        raise RuntimeError(f"rank {rank}: {answer['error']}")
    return answer["result"]


def _key(rank: int) -> str:
    return f"result/{rank}"


def main(arguments: Sequence[str] | None = None) -> None:
    """One of the processes: call the function and hand over what comes of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("function")
    parser.add_argument("port", type=int)
    parser.add_argument("arguments", type=json.loads)
    parser.add_argument("rank", type=int)
    asked = parser.parse_args(arguments)
    store = dist.TCPStore(LOOPBACK, asked.port)
    module, _, name = asked.function.partition(":")
    answer: dict[str, Any]
    try:
        answer = {"result": getattr(importlib.import_module(module), name)(store, asked.rank, **asked.arguments)}
    except Exception as error:  # noqa: BLE001 - the process that waits is to hear of it, whatever it is
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    store.set(_key(asked.rank), json.dumps(answer))


if __name__ == "__main__":
    main()
