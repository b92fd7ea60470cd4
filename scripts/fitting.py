"""The fewest GPUs that the memory plan gives a model: the table of docs/clusters.md.

python scripts/fitting.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_dist.config.keys import with_value
from grpo_dist.config.schema import RunConfig
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.memory import memory_problems
from grpo_dist.plan.model_shape import model_config_at_hand
from grpo_dist.plan.placement import PLACEMENT_RULES, placement
from grpo_dist.plan.rules import between_values

MODELS = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B")
# What CUDA gives of a GPU that is sold as so large, in GiB.
GPUS = {"24 GB": 23.6, "40 GB": 39.4, "80 GB": 79.1, "141 GB": 139.8}
COUNTS = (1, 2, 4, 8, 16, 32, 64)
MODEL = "actor_rollout_ref.model"
ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
# What trains, by the heads of columns.
KINDS = {
    "all weights": (),
    "8-bit states": (f"{ACTOR}.fsdp_config.model_dtype=bf16", f"{ACTOR}.optim.optimizer=AdamW8bit"),
    "LoRA 32": (f"{MODEL}.lora_rank=32",),
}
RUN = ("data=arithmetic", "model=hf", "data.max_prompt_length=512", "data.max_response_length=1024",
       "data.train_batch_size=128", f"{ACTOR}.ppo_mini_batch_size=128", f"{ROLLOUT}.n=8",
       f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=8192",
       f"{MODEL}.enable_gradient_checkpointing=true")  # fmt: skip


def run_on(model: str, count: int, kind: str) -> RunConfig:
    """A run of the model on so many GPUs, on machines of 8; `kind` is one of KINDS."""
    nodes = max(1, count // 8)
    cluster = ("cluster=single_gpu",) if count == 1 else ("cluster=multi_node", f"trainer.nnodes={nodes}")
    each = f"trainer.n_gpus_per_node={count // nodes}"
    path = f"{MODEL}.path=Qwen/{model}"
    return load_config([*RUN, *cluster, each, path, *KINDS[kind]])[0]


def variants(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Engines on 1, 2, 4 and 8 GPUs of their own; then GPUs that all roles share, with what is offloaded; then those
    that an engine and the actor have in turns, each nearly whole.
    """
    config = with_value(config, f"{REF}.fsdp_config.param_offload", True)
    sizes = [size for size in (1, 2, 4, 8) if size <= config.trainer.n_gpus_per_node]
    if config.num_gpus > 1:
        for size in sizes:
            tensor_parallel = with_value(config, f"{ROLLOUT}.tensor_model_parallel_size", size)
            if not placement(tensor_parallel).shares_gpu:
                yield f" (TP {size})" if size > 1 else "", tensor_parallel
    config = with_value(config, "cluster.colocate", "all")
    config = with_value(config, f"{ACTOR}.fsdp_config.optimizer_offload", True)
    for size in sizes:
        for share in (0.5, 0.35, 0.25):
            shared = with_value(config, f"{ROLLOUT}.gpu_memory_utilization", share)
            mark = f" (TP {size}, shared)" if size > 1 else " (shared)" if config.num_gpus > 1 else ""
            yield mark, with_value(shared, f"{ROLLOUT}.tensor_model_parallel_size", size)
    for key in (
        f"{ACTOR}.fsdp_config.param_offload",
        f"{ROLLOUT}.free_cache_engine",
        f"{MODEL}.enable_activation_offload",
    ):
        config = with_value(config, key, True)
    for share in (0.85, 0.6) if config.num_gpus == 1 else (0.85,):
        yield " (in turns)", with_value(config, f"{ROLLOUT}.gpu_memory_utilization", share)


def fewest(model: str, gib: float, kind: str) -> str:
    """The fewest GPUs of that size, and how an engine lies on them."""
    sizes: Mapping[str, Any] | None = model_config_at_hand(f"Qwen/{model}")
    for count in COUNTS:
        for mark, config in variants(run_on(model, count, kind)):
            allowed = not any(problem for rule in (between_values, *PLACEMENT_RULES) for problem in rule(config))
            if allowed and not any(memory_problems(config, sizes, gib, None, certain=False)):
                return f"{count}{mark}"
    return f"more than {COUNTS[-1]}"


def table() -> str:
    """Models by GPUs, and what trains."""
    head = ["model", *(f"{gpu}, {kind}" for kind in KINDS for gpu in GPUS)]
    rows = [[model, *(fewest(model, gib, kind) for kind in KINDS for gib in GPUS.values())] for model in MODELS]
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(table())
