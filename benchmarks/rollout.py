"""The rollout: `python -m benchmarks.rollout` prints four tables and writes JSON. Some minutes on two cores.

(a) tokens per second of our rollout group (Ray, pump, vLLM's async engine) against vLLM's offline `LLM.generate` and
    against Hugging Face's `generate`, on the same prompts and with responses of the same length, in turns;
(b) weight sync: seconds and bytes per second of each transport, against a copy in memory;
(c) control plane: what a step of many samples on many (fake) workers costs the driver, and whether that grows with
    the length of responses, and how many samples take the driver as long as a fixed loop in Python;
(d) the probabilities of vLLM's tokens against those of the trainer's forward pass, in fp32 and bf16 (`--model FOLDER`).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from grpo_dist.assets import resolve_model_path
from grpo_dist.runtime.cluster import prepare


def main() -> None:
    """Measure, print and write."""
    address = prepare("local")  # before the others import Ray
    from benchmarks import agreement, control_plane, record, throughput, weight_sync, workload
    from grpo_dist.runtime.nodes import connect

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/rollout.json"))
    parser.add_argument("--parts", default="abcd", help="which of a, b, c and d")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3, help="of (a) and (b)")
    parser.add_argument("--samples", type=int, default=100_000, help="of (c)")
    parser.add_argument("--control-rounds", type=int, default=1, help="of (c)")
    parser.add_argument("--workers", type=int, default=256, help="of (c)")
    parser.add_argument("--short", action="store_true", help="(a) on the built-in model only, (b) on 72 MB")
    parser.add_argument("--model", default="builtin:tiny-qwen3", help="folder of the model of (d)")
    arguments = parser.parse_args()
    result = record.begun()
    connect(address, None)
    with tempfile.TemporaryDirectory() as folder:
        if "a" in arguments.parts:
            models = {"builtin:tiny-qwen3": resolve_model_path("builtin:tiny-qwen3")}
            if not arguments.short:
                small = workload.write_llama(Path(folder) / "a", workload.SMOLLM2_135M)
                models["SmolLM2-135M (random)"] = small
            result["throughput"] = throughput.compare(models, arguments.threads, arguments.rounds)
            print(record.table("(a) tokens per second", result["throughput"]))
        if "b" in arguments.parts:
            gigabyte = workload.SMOLLM2_135M | {"num_hidden_layers": 62}  # twice the layers
            sizes = {"SmolLM2-135M": workload.SMOLLM2_135M, "1 GB": gigabyte}
            if arguments.short:
                sizes = {"slice of SmolLM2-135M": workload.SMOLLM2_SLICE}
            models = {name: workload.write_llama(Path(folder) / name, each) for name, each in sizes.items()}
            result["weight_sync"] = weight_sync.compare(models, arguments.threads, arguments.rounds)
            print(record.table("(b) weight sync, fp32, one actor rank to one engine", result["weight_sync"]))
    if "c" in arguments.parts:
        result["control_plane"] = control_plane.measure(
            arguments.workers, arguments.samples, rounds=arguments.control_rounds
        )
        print(record.table(f"(c) a step of {arguments.samples:,} samples: the driver", result["control_plane"]))
    if "d" in arguments.parts:
        result["agreement"] = agreement.compare(resolve_model_path(arguments.model), arguments.threads)
        print(record.table(f"(d) probability of a token, vLLM and trainer, {arguments.model}", result["agreement"]))
    record.write(arguments.output, result, ratios(result))


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """What is compared with other commits."""
    found = {
        f"rollout/{row['model']}, {way}": row[way]
        for row in result.get("throughput", [])
        for way in ("of vllm", "of hf")
    }
    found |= {
        f"weight_sync/{row['model']} by {row['transport']}, of a copy": row["of a copy"]
        for row in result.get("weight_sync", [])
    }
    found |= {
        f"control_plane/{row['response tokens']} response tokens, samples a loop": row["samples a loop"]
        for row in result.get("control_plane", [])
    }
    return found


if __name__ == "__main__":
    main()
