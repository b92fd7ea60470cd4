"""Cost against length: `python -m benchmarks.long_responses` prints a table for each part and writes JSON.

One response of the built-in model's shape with more positions, after a prompt of 64 tokens, from 1k to 32k tokens: the
update, with gradient checkpointing, the log-probs, and the generation. Each measurement has a process of its own, which
has done the same with a short response before. Memory is the most that it held resident beside what it held before;
seconds are processor seconds of a thread.

`growth` is the exponent between a length and the one before: 1 is linear, 2 the square. Attention takes seconds with
the square of the length; nothing may take memory so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import record, workload
from benchmarks.throughput import engine_settings
from grpo_dist.assets import resolve_model_path
from grpo_dist.engines.settings import PassLimits, SamplingSettings
from grpo_dist.engines.vllm import vllm_engine
from grpo_dist.protocol import DataProto
from grpo_dist.runtime.freed_memory import FreedMemory

PROMPT, WARM_UP = 64, 256
LENGTHS = tuple(1024 << i for i in range(6))
# Enough for the keys and values of the longest response, of 1.5 KiB a token.
KV_CACHE_GIB = 0.125


def model_with_positions(folder: Path, positions: int) -> str:
    """The built-in model with so many positions; its weights have nothing to do with them."""
    shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
    return str(folder)


def response_of(length: int) -> DataProto:
    """One response of so many tokens."""
    return workload.batch(1, 1, PROMPT, length, vocab=256, equal=True)


def training(path: str) -> tuple[Callable[[int], Any], Callable[[int], Any]]:
    """What takes an optimizer step on a response of so many tokens, and what computes its log-probs."""
    workload.join_process_group("cpu")
    engine = workload.engine(path, "shared", "cpu", gradient_checkpointing=True)

    def update(length: int) -> None:
        engine.train_mini_batch(response_of(length), workload.OBJECTIVE, PassLimits("", 1))

    return update, lambda length: engine.compute_log_probs(response_of(length), PassLimits("", 1))


def generating(path: str, longest: int) -> Callable[[int], Any]:
    """What samples a response of so many tokens."""
    settings = engine_settings(path, longest=longest)
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": longest, "kv_cache_memory_gib": KV_CACHE_GIB}
    engine = vllm_engine(replace(settings, rollout=settings.rollout.replaced(**limits)))
    asyncio.run(engine.start())

    def generate(length: int) -> None:
        sampling = SamplingSettings(1, 1.0, 1.0, -1, length, 0, ignore_eos=True)
        found = asyncio.run(engine.generate(list(range(3, 3 + PROMPT)), sampling))
        assert found is not None
        assert len(found[0].token_ids) == length

    return generate


PARTS = ("update", "log-probs", "generation")


def measure(part: str, path: str, length: int, threads: int) -> dict[str, float]:
    """Seconds and peak MiB of one part at one length."""
    torch.set_num_threads(threads)
    FreedMemory()  # as policy workers do
    work = generating(path, length + PROMPT) if part == "generation" else training(path)[PARTS.index(part)]
    work(WARM_UP)
    seconds: list[float] = []
    peak = workload.peak_mib(lambda: seconds.append(workload.seconds(lambda: work(length), "cpu")))
    return {"seconds": seconds[0], "peak MiB": peak}


def growth(rows: list[dict[str, Any]], name: str) -> list[float]:
    """The exponent of a column against `tokens` from each row to the next."""
    return [math.log(b[name] / a[name]) / math.log(b["tokens"] / a["tokens"]) for a, b in pairwise(rows)]


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """What a linear growth of memory from the shortest response would need for the longest, over what it needs."""
    found = {}
    for part in PARTS:
        if rows := result.get(part):
            first, last = rows[0], rows[-1]
            linear = first["peak MiB"] * last["tokens"] / first["tokens"]
            found[f"long/{part}, linear memory of {last['tokens']} tokens"] = linear / last["peak MiB"]
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/long_responses.json"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    result = record.begun()
    with tempfile.TemporaryDirectory() as folder:
        path = model_with_positions(Path(folder) / "model", max(arguments.lengths) + PROMPT)
        for part in arguments.parts:
            rows: list[dict[str, Any]] = []
            with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
                for length in arguments.lengths:
                    rows.append({"tokens": length, **pool.apply(measure, (part, path, length, arguments.threads))})
                    print(f"    {part}: {rows[-1]}", file=sys.stderr, flush=True)
            for name in ("seconds", "peak MiB"):
                for row, exponent in zip(rows, [None, *growth(rows, name)], strict=True):
                    row[f"growth of {name}"] = exponent
            result[part] = rows
            print(record.table(part, rows), flush=True)
    record.write(arguments.output, result, ratios(result))
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
