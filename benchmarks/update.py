"""The update: `python -m benchmarks.update` prints three tables and writes JSON. A few minutes on two cores.

(a) tokens per second, and useful operations per second against a large matrix product on the same machine, and against
    the products of the model's own shapes; where the seconds go, beside what each part would take at its own rate;
(b) padded, packed and shared micro-batches over group sizes and lengths, and padded ones with plain logits;
(c) memory and time of the output layer against plain logits.

Seconds on CPU are processor seconds of a thread: on a shared machine wall time says little.
Lengths are given as P:R, the prompt's and the longest response's; responses are uniform in 1..R, unless `equal`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import floor, head, record, workload
from grpo_dist.assets import resolve_model_path
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.model_loading import DTYPES
from grpo_dist.protocol import DataProto
from grpo_dist.runtime.freed_memory import FreedMemory

# Tokens of a micro-batch in (a).
BUDGET = 2048
LAYOUTS = ("padded", "packed", "shared")
GRID = [(n, prompt, response, False) for n in (4, 16, 8) for prompt, response in ((64, 32), (32, 64), (64, 64))][:-1]
GRID += [(8, 64, 64, True), (8, 64, 64, False)]


def efficiency(
    name: str, path: str, device: str, groups: int, rounds: int, compute: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(a): updates of a batch of n=8, P:R = 64:64, between measurements of the matmul rate; and its phases."""
    engine = workload.engine(path, "shared", device, compute=compute)
    dtype = DTYPES[compute]
    data = workload.batch(groups, 8, 64, 64, engine.model.config.vocab_size)
    run = partial(update, engine, data, BUDGET)
    update(engine, data.index(list(range(8))), 16_384)
    rates, times = [workload.matmul_rate(device, dtype)], []
    for _ in range(rounds):
        times.append(workload.seconds(run, device))
        rates.append(workload.matmul_rate(device, dtype))
    operations, rate = workload.useful_flops(engine.model, data), sum(rates) / len(rates)
    tokens = int(data["prompts"].lengths.sum() + data["responses"].lengths.sum())
    shared = tokens - 7 * 64 * groups
    micro_batch = shared // -(-shared // BUDGET)
    parts = floor.floors(engine.model, data, micro_batch, device, dtype)
    products = ("linear layers", "output layer")
    shapes = sum(parts[part]["work"] for part in products) / sum(parts[part]["floor"] for part in products)
    measured = floor.phase_seconds(run)
    phases = [
        {
            "model": f"{name} {compute}",
            "phase": phase,
            "GFLOP, GB": parts.get(phase, {}).get("work", 0.0),
            "floor s": parts.get(phase, {}).get("floor", 0.0),
            "measured s": seconds,
        }
        for phase, seconds in measured.items()
    ]
    return {
        "model": f"{name} {compute}",
        "sequences": len(data),
        "tokens": tokens,
        "seconds": min(times),
        "tokens/s": tokens / min(times),
        "GFLOP/s": operations / min(times) / 1e9,
        "matmul GFLOP/s": rate / 1e9,
        "ratio": operations / min(times) / rate,
        "ratio of the mean time": operations / (sum(times) / len(times)) / rate,
        "same shapes GFLOP/s": shapes,
        "ratio to them": operations / min(times) / shapes / 1e9,
    }, phases


def layouts(path: str, device: str, cases: list[tuple[int, int, int, bool]], groups: int) -> list[dict[str, Any]]:
    """(b): the same batch in each layout, in turns, the best of two."""
    engines = {layout: workload.engine(path, layout, device) for layout in LAYOUTS}
    engines["plain"] = workload.engine(path, "padded", device)
    engines["plain"].forward.head = None
    rows = []
    for n, prompt, response, equal in cases:
        print(f"    n={n} P:R={prompt}:{response}", file=sys.stderr)
        data = workload.batch(groups, n, prompt, response, engines["padded"].model.config.vocab_size, equal=equal)
        times: dict[str, list[float]] = {layout: [] for layout in engines}
        for _ in range(3):
            for layout, engine in engines.items():
                times[layout].append(workload.seconds(partial(update, engine, data, None), device))
        best = {layout: min(each[1:]) for layout, each in times.items()}  # the first call warms up
        rows.append(
            {
                "n": n,
                "P:R": f"{prompt}:{response}{' equal' if equal else ''}",
                **{f"{layout} s": seconds for layout, seconds in best.items()},
                "packed x": best["padded"] / best["packed"],
                "shared x": best["padded"] / best["shared"],
                "x of plain": best["plain"] / best["shared"],
            }
        )
    return rows


def update(engine: Any, data: DataProto, max_token_len: int | None) -> None:
    """One optimizer step; without a budget in micro-batches of one group or 8 sequences, whichever is more."""
    engine.train_mini_batch(data, workload.OBJECTIVE, PassLimits("", 16, max_token_len))


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """What is compared with other commits."""
    found = {f"update/{row['model']}, of a product's rate": row["ratio"] for row in result.get("efficiency", [])}
    for row in result.get("layouts", []):
        case = f"layouts/n={row['n']} {row['P:R']}"
        found |= {f"{case}, {way}": row[way] for way in ("packed x", "shared x", "x of plain")}
    found |= {
        f"update/{row['model']}, of its shapes' rate": row["ratio to them"] for row in result.get("efficiency", [])
    }
    return found | head.ratios(result.get("head", []))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/update.json"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--groups", type=int, default=4, help="groups of 8 in (a)")
    parser.add_argument("--cases", type=int, default=len(GRID), help="of (b), from the last")
    parser.add_argument("--parts", default="abc", help="which of a, b and c")
    parser.add_argument("--dtype", nargs="+", choices=("fp32", "bf16"), help="compute types in (a)")
    parser.add_argument("--models", nargs="+", default=["builtin", "smollm2"], help="in (a)")
    parser.add_argument(
        "--short", action="store_true", help="(a) in fp32 on the built-in model only, (c) without torch's own"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    FreedMemory()  # as policy workers do
    device = "cuda" if torch.cuda.is_available() else "cpu"
    workload.join_process_group(device)
    result = record.begun()
    with tempfile.TemporaryDirectory() as folder:
        if "a" in arguments.parts:
            smollm2 = workload.write_llama(Path(folder) / "smollm2", workload.SMOLLM2_135M)
            models = {
                "builtin": ("builtin:tiny-qwen3", resolve_model_path("builtin:tiny-qwen3"), device, 32, 5),
                "smollm2": ("SmolLM2-135M (random)", smollm2, device, arguments.groups, 3),
            }
            dtypes = arguments.dtype or ["bf16" if device == "cuda" else "fp32"]
            names = ["builtin"] if arguments.short else arguments.models
            found = [efficiency(*models[model], compute) for model in names for compute in dtypes]
            result["efficiency"], phases = [row for row, _ in found], [row for _, rows in found for row in rows]
            result["phases"] = phases
            print(record.table("(a) update, shared prompts", result["efficiency"]))
            print(record.table("(a) by phase, wall time under the profiler", phases))
        if "b" in arguments.parts:
            part = workload.write_llama(Path(folder) / "slice", workload.SMOLLM2_SLICE)
            result["layouts"] = layouts(part, device, GRID[-arguments.cases :], groups=2)
            print(record.table("(b) layouts, SmolLM2-135M with 4 of its 30 layers", result["layouts"]))
    if "c" in arguments.parts:
        result["head"] = head.compare(
            vocab=151_936,
            hidden=512,
            tokens=512,
            threads=arguments.threads,
            rounds=3 if arguments.short else 1,
            ways=(head.PLAIN, head.CHUNKED) if arguments.short else (),
        )
        print(record.table("(c) output layer, forward and backward", result["head"]))
    record.write(arguments.output, result, ratios(result))
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
