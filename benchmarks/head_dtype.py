"""How far a sampler's log-probs are from its trainer's, by the types of their layers and of their output layer.

nice -n 15 python -m benchmarks.head_dtype [FOLDER of another model ...]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_dist.assets import resolve_model_path
from grpo_dist.data import load_tokenizer
from grpo_dist.runtime.cluster import prepare

BUILTIN = "builtin:tiny-qwen3"
FAR = 0.05  # nats
# (layers of the sampler, of the trainer, `head_dtype`); in float32 throughout the output layer is float32 anyway.
TYPES: tuple[tuple[str, str, str | None], ...] = (
    ("bf16", "bf16", None),
    ("bf16", "bf16", "fp32"),
    ("bf16", "fp32", None),
    ("bf16", "fp32", "fp32"),
    ("fp32", "fp32", None),
)


def compare(name: str, path: str, threads: int) -> list[dict[str, Any]]:
    """A row for each pair of types."""
    from benchmarks import agreement

    rows = []
    for sampler, trainer, head in TYPES:
        pair = agreement.log_probs(path, threads, sampler=sampler, trainer=trainer, head=head)
        types = {"sampler": sampler, "trainer": trainer, "output layer": head or "as the layers"}
        rows.append({"model": name, **types, **mismatch(*pair)})
    return rows


def mismatch(of_sampler: Tensor, of_trainer: Tensor) -> dict[str, float]:
    """Mean difference of log-probs, k3's estimate of KL(sampler || trainer), and the share of tokens far off."""
    difference = (of_trainer - of_sampler).double()
    return {
        "tokens": len(difference),
        "mean |diff|, nats": float(difference.abs().mean()),
        "KL (k3), nats": float((difference.expm1() - difference).mean()),
        f"share above {FAR}": float((difference.abs() > FAR).double().mean()),
    }


def random_experts(folder: Path) -> str:
    """A random Qwen3-MoE of 2 layers with the built-in model's tokenizer."""
    from tests.models import EXPERTS, random_model

    tokenizer = load_tokenizer(resolve_model_path(BUILTIN), trust_remote_code=False)
    path = random_model("Qwen3Moe", folder, head_dim=32, vocab_size=len(tokenizer), **EXPERTS)
    tokenizer.save_pretrained(path)
    return path


def main() -> None:
    """Print a table."""
    address = prepare("local")  # before the others import Ray
    from benchmarks import record
    from grpo_dist.runtime.nodes import connect

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", help="of other models")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        models = {"built-in": resolve_model_path(BUILTIN), "random experts": random_experts(Path(folder))}
        models |= {Path(path).name: path for path in arguments.folders}
        connect(address, None)
        for name, path in models.items():
            print(record.table("sampler and trainer", compare(name, path, arguments.threads)), flush=True)


if __name__ == "__main__":
    main()
