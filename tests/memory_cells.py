"""The memory plan against torch's tracker: named models, GPUs and settings. docs/performance.md has some figures.

python -m tests.memory_cells [part of a name]
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_dist.config.schema import RunConfig
from grpo_dist.engines.settings import PassLimits
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.memory import RoleMemory, memory_estimate
from grpo_dist.plan.plan import make_plan
from grpo_dist.protocol import DataProto
from tests.fake_memory import fake_engine, peak_of_pass, peak_of_update, sequences


def qwen3(hidden: int, layers: int, heads: int, width: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": width,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": tied,
    }  # fmt: skip


MODELS = {
    "Qwen3-0.6B": qwen3(1024, 28, 16, 3072, tied=True),
    "Qwen3-1.7B": qwen3(2048, 28, 16, 6144, tied=True),
    "Qwen3-8B": qwen3(4096, 36, 32, 12288),
    "Qwen3-14B": qwen3(5120, 40, 40, 17408),
    "Qwen3-32B": qwen3(5120, 64, 64, 25600),
    "Qwen3-30B-A3B": qwen3(2048, 48, 32, 6144) | {
        "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
    "Qwen3.5-0.8B": qwen3(1024, 24, 8, 3584, tied=True) | {
        "model_type": "qwen3_5_text", "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
    },
}  # fmt: skip
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
FSDP = f"{ACTOR}.fsdp_config"
FLOAT32_HEAD = f"{MODEL}.head_dtype=fp32"
NO_CHECKPOINTING = f"{MODEL}.enable_gradient_checkpointing=false"
OFFLOAD = f"{MODEL}.enable_activation_offload=true"
N, PROMPT, RESPONSE, LONG = 8, 512, 1024, 32768
GROUP = PROMPT + N * RESPONSE  # tokens, the prompt shared
# A pass is one sequence.
ONE_BY_ONE = (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu={PROMPT + LONG}")


@dataclass(frozen=True)
class Cell:
    """A model on so many actor ranks, with overrides; `role` is the one that is measured, `response` in tokens."""

    model: str
    ranks: int
    overrides: tuple[str, ...] = ()
    role: str = "actor"
    response: int = RESPONSE


def _split(actor: int, ref: int = 1) -> tuple[str, str]:
    """Ranks of each role that split sequences."""
    key = "ulysses_sequence_parallel_size"
    return f"{ACTOR}.{key}={actor}", f"actor_rollout_ref.ref.{key}={ref}"


CELLS = {
    "0.6B, 1 GPU": Cell("Qwen3-0.6B", 1),
    "0.6B, 4 GPUs, no checkpointing": Cell("Qwen3-0.6B", 4, (NO_CHECKPOINTING,)),
    "1.7B, 1 GPU, optimizer offloaded": Cell("Qwen3-1.7B", 1, (f"{FSDP}.optimizer_offload=true",)),
    "1.7B, 2 GPUs, no checkpointing": Cell("Qwen3-1.7B", 2, (NO_CHECKPOINTING,)),
    "8B, 4 GPUs": Cell("Qwen3-8B", 4, (f"{ACTOR}.use_dynamic_bsz=true",
                                       f"{ACTOR}.ppo_max_token_len_per_gpu={2 * GROUP}")),
    "8B, 4 GPUs, gradients deferred": Cell("Qwen3-8B", 4, (f"{FSDP}.defer_grad_sync=true",)),
    "8B, 8 GPUs, weights stay gathered": Cell("Qwen3-8B", 8, (f"{FSDP}.reshard_after_forward=false",)),
    "8B, 8 GPUs, of which 4 split": Cell("Qwen3-8B", 8, _split(4)),
    "0.6B, 4 GPUs that split, no checkpointing": Cell("Qwen3-0.6B", 4, (NO_CHECKPOINTING, *_split(4))),
    "8B, 1 GPU, LoRA": Cell("Qwen3-8B", 1, (f"{MODEL}.lora_rank=32",)),
    "14B, 8 GPUs, optimizer offloaded": Cell("Qwen3-14B", 8, (f"{FSDP}.optimizer_offload=true",)),
    "14B, 16 GPUs, two copies": Cell("Qwen3-14B", 16, (f"{FSDP}.fsdp_size=8",)),
    "32B, 16 GPUs": Cell("Qwen3-32B", 16),
    "32B, 8 GPUs, LoRA": Cell("Qwen3-32B", 8, (f"{MODEL}.lora_rank=32",)),
    "1.7B, reference on 1 GPU": Cell("Qwen3-1.7B", 1, role="ref"),
    "30B-A3B, 16 GPUs": Cell("Qwen3-30B-A3B", 16),
    "30B-A3B, 16 GPUs, no checkpointing": Cell("Qwen3-30B-A3B", 16, (NO_CHECKPOINTING,)),
    "30B-A3B, 8 GPUs, LoRA": Cell("Qwen3-30B-A3B", 8, (f"{MODEL}.lora_rank=32",)),
    "30B-A3B, reference on 8 GPUs": Cell("Qwen3-30B-A3B", 8, role="ref"),
    "8B, reference on 2 GPUs": Cell("Qwen3-8B", 2, role="ref"),
    "0.6B, 1 GPU, 32k": Cell("Qwen3-0.6B", 1, ONE_BY_ONE, response=LONG),
    "0.6B, 1 GPU, 32k, activations offloaded": Cell("Qwen3-0.6B", 1, (*ONE_BY_ONE, OFFLOAD), response=LONG),
    "1.7B, 1 GPU, 32k, activations offloaded": Cell("Qwen3-1.7B", 1, (*ONE_BY_ONE, OFFLOAD), response=LONG),
    "8B, 4 GPUs, 32k": Cell("Qwen3-8B", 4, ONE_BY_ONE, response=LONG),
    "8B, 4 GPUs, 32k, activations offloaded": Cell("Qwen3-8B", 4, (*ONE_BY_ONE, OFFLOAD), response=LONG),
    "8B, 1 GPU, 32k, LoRA, activations offloaded": Cell(
        "Qwen3-8B", 1, (*ONE_BY_ONE, OFFLOAD, f"{MODEL}.lora_rank=32"), response=LONG),
    "32B, 16 GPUs, 32k, activations offloaded": Cell("Qwen3-32B", 16, (*ONE_BY_ONE, OFFLOAD), response=LONG),
    "8B, reference on 2 GPUs, 32k": Cell("Qwen3-8B", 2, ONE_BY_ONE, role="ref", response=LONG),
    "0.6B, 1 GPU, output layer in fp32": Cell("Qwen3-0.6B", 1, (FLOAT32_HEAD,)),
    "8B, 4 GPUs, output layer in fp32": Cell("Qwen3-8B", 4, (FLOAT32_HEAD,)),
    "8B, 1 GPU, LoRA, output layer in fp32": Cell("Qwen3-8B", 1, (f"{MODEL}.lora_rank=32", FLOAT32_HEAD)),
    "1.7B, reference on 1 GPU, output layer in fp32": Cell("Qwen3-1.7B", 1, (FLOAT32_HEAD,), role="ref"),
    "Qwen3.5-0.8B, 1 GPU": Cell("Qwen3.5-0.8B", 1),
    "Qwen3.5-0.8B, 4 GPUs, no checkpointing": Cell("Qwen3.5-0.8B", 4, (NO_CHECKPOINTING,)),
    "8B, reference on 2 GPUs that split": Cell("Qwen3-8B", 2, _split(1, ref=2), role="ref"),
}  # fmt: skip
QUICK = ("0.6B, 1 GPU", "1.7B, reference on 1 GPU")


def run_config(cell: Cell, folder: Path) -> RunConfig:
    """The run of a cell; its model is a config.json in `folder`."""
    (folder / "config.json").write_text(json.dumps(MODELS[cell.model]))
    place = {"actor": cell.ranks, "rollout": 1, "ref": cell.ranks if cell.role == "ref" else 1}
    nodes = -(-sum(place.values()) // 8)
    sizes = [f"data.max_prompt_length={PROMPT}", f"data.max_response_length={cell.response}"]
    sizes += ["data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64"]
    where = ["cluster=multi_node", f"trainer.nnodes={nodes}"]
    where += [f"cluster.{role}_world_size={ranks}" for role, ranks in place.items()]
    config, _ = load_config([f"{MODEL}.path={folder}", *where, *sizes, *cell.overrides])
    return config


def planned(cell: Cell, config: RunConfig) -> RoleMemory:
    """The plan of the cell's role."""
    roles = memory_estimate(config, MODELS[cell.model])
    assert roles is not None
    return next(role for role in roles if role.role == cell.role)


def measured(cell: Cell, config: RunConfig) -> dict[str, float]:
    """What the tracker sees, in GiB: two micro-batches of an update, or a pass of the reference."""
    trains = cell.role == "actor"
    settings = make_plan(config, 10).ranks(cell.role)
    with fake_engine(MODELS[cell.model], settings.model, cell.ranks, trains=trains) as engine:
        if not trains:
            return peak_of_pass(engine, _largest_pass(cell, settings.forward, passes=1), limits=settings.forward)
        assert settings.update is not None
        return peak_of_update(engine, _largest_pass(cell, settings.update, passes=2), limits=settings.update)


def _largest_pass(cell: Cell, limits: PassLimits, *, passes: int) -> DataProto:
    """Sequences that fill so many passes of these limits."""
    size, budget = limits.micro_batch_size, limits.max_token_len
    if budget is None:
        return sequences(passes * size // N, N, PROMPT, cell.response)
    group = PROMPT + N * cell.response
    if group <= budget:
        return sequences(passes * budget // group, N, PROMPT, cell.response)
    return sequences(passes, 1, PROMPT, cell.response)


def main(arguments: Sequence[str]) -> None:
    """Print a row for each cell whose name has the text."""
    print("| cell | plan, GiB | tracker, GiB | plan / tracker | seconds |\n|---|---|---|---|---|")
    for name, cell in CELLS.items():
        if arguments and arguments[0] not in name:
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            config = run_config(cell, Path(folder))
            plan, found = planned(cell, config), measured(cell, config)
        ratio, seconds = sum(plan.parts.values()) / found["Total"], time.monotonic() - started
        print(
            f"| {name} | {sum(plan.parts.values()):.1f} | {found['Total']:.1f} | {ratio:.3f} | {seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
