"""Models with random weights, batches with lengths as in GRPO, and the work they ask for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import yaml

from grpo_dist.algorithms.settings import ObjectiveSettings
from grpo_dist.assets import POLICY_KEY
from grpo_dist.config.command import CONFIG_DIR
from grpo_dist.config.field_types import Section
from grpo_dist.config.schema_roles import ActorConfig, AdamWConfig, FSDPConfig, ModelConfig
from grpo_dist.engines.rendezvous import LOOPBACK, init_process_group, open_store
from grpo_dist.engines.settings import ModelSettings
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.protocol import DataProto, Ragged

SMOLLM2_135M = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
# The same widths with 4 of the 30 layers and a vocabulary cut alike, so that head and layers keep their shares.
SMOLLM2_SLICE = SMOLLM2_135M | {"num_hidden_layers": 4, "vocab_size": 6554}

S = TypeVar("S", bound=Section)


def section(kind: type[S], *names: str, **changes: Any) -> S:
    """Read a section of `actor_rollout_ref` as grpo.yaml has it, with other values of some keys; needs no Hydra."""
    values = yaml.safe_load((CONFIG_DIR / "grpo.yaml").read_text())["actor_rollout_ref"]
    for name in names:
        values = values[name]
    return kind.model_validate(values | changes)


OBJECTIVE = ObjectiveSettings(
    section(ActorConfig, "actor", ppo_mini_batch_size=1, use_kl_loss=True, kl_loss_type="low_var_kl", kl_loss_coef=1e-3)
)


def join_process_group(device: str) -> None:
    """A process group of this process alone."""
    init_process_group(device=device, rank=0, world_size=1, store=open_store(LOOPBACK), timeout_s=600)


def write_llama(folder: Path, sizes: dict[str, Any]) -> str:
    """A Llama with random weights on disk."""
    import transformers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    return str(folder)


def engine(
    path: str,
    layout: str,
    device: str,
    *,
    compute: str | None = None,
    trains: bool = True,
    gradient_checkpointing: bool = False,
    optimizer_offload: bool = False,
    use_torch_compile: bool | None = None,
    fsdp_size: int = -1,
) -> FSDPEngine:
    """An engine, trainable unless told otherwise; None: float32 on CPU, bf16 compute on GPU."""
    compute = compute or ("bf16" if device == "cuda" else "fp32")
    model = section(ModelConfig, "model", enable_gradient_checkpointing=gradient_checkpointing)
    held = section(FSDPConfig, "actor", "fsdp_config", use_torch_compile=use_torch_compile, fsdp_size=fsdp_size)
    settings = ModelSettings(
        *(model, held, model, POLICY_KEY, path, "fp32", compute),
        reshard_after_forward=False,
        layout=layout,
        optimizer_offload=optimizer_offload,
    )
    optimizer = (
        AdamWConfig(lr=1e-6, weight_decay=0.01, betas=(0.9, 0.999), override_optimizer_config=None) if trains else None
    )
    return FSDPEngine(settings, device=device, temperature=1.0, optimizer=optimizer, grad_clip=1.0)


def batch(groups: int, n: int, prompt: int, response: int, vocab: int, *, equal: bool = False) -> DataProto:
    """Groups of n responses to a prompt of `prompt` tokens; lengths uniform in 1..`response`, or all `response`."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, vocab, prompt) for _ in range(groups)]
    lengths = np.full(groups * n, response) if equal else rng.integers(1, response + 1, groups * n)
    lengths[::n] = response  # someone always answers at full length
    responses = [rng.integers(3, vocab, length) for length in lengths]
    numbers = [rng.normal(size=length) for length in lengths]
    columns = {"old_log_probs": numbers, "ref_log_probs": numbers, "advantages": numbers}
    return DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([p for p in prompts for _ in range(n)], torch.int32),
            "responses": Ragged.from_rows(responses, torch.int32),
            "response_mask": Ragged.from_rows([np.ones(length) for length in lengths], torch.int8),
            **{name: Ragged.from_rows(rows, torch.float32) for name, rows in columns.items()},
        }
    )


def useful_operations(model: Any, data: DataProto) -> dict[str, float]:
    """Operations of forward and backward with shared prompts, by phase: nothing repeated, padded or recomputed.

    Six a weight and token in the layers, six a weight and response token in the output layer ("head"), and attention's
    pairs: 12 * head_dim * heads each and layer.
    """
    config = model.config
    head = model.get_output_embeddings().weight.numel()
    layers = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "layers." in name)
    prompts, responses = data["prompts"].lengths.double(), data["responses"].lengths.double()
    first = _first_rows(data)
    pairs = (prompts[first] ** 2 / 2).sum() + (responses * (prompts + responses / 2)).sum()
    tokens = prompts[first].sum() + responses.sum()
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return {
        "layers": float(6 * layers * tokens),
        "head": float(6 * head * responses.sum()),
        "attention": float(12 * width * config.num_hidden_layers * pairs),
    }


def useful_flops(model: Any, data: DataProto) -> float:
    """The sum of `useful_operations`."""
    return sum(useful_operations(model, data).values())


def matmul_rate(device: str, dtype: torch.dtype, size: int = 0) -> float:
    """FLOP/s of a large square matrix product, the best of several."""
    size = size or (8192 if device == "cuda" else 1536)
    a = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / min(seconds(lambda: a @ a, device) for _ in range(5))


def seconds(call: Callable[[], Any], device: str) -> float:
    """Wall time of a call on GPU; on CPU the processor time of a thread, which other processes hardly change.

    Without contention the two are equal, as threads of OpenMP wait actively.
    """
    if device == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter if device == "cuda" else time.process_time
    start = clock()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (clock() - start) / (1 if device == "cuda" else torch.get_num_threads())


def peak_mib(call: Callable[[], Any]) -> float:
    """The most resident memory that the process holds during a call beside what it held before, MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _high_water_mib()
    call()
    return _high_water_mib() - before


def _high_water_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def _first_rows(data: DataProto) -> list[int]:
    from grpo_dist.engines.train.micro_batch_plan import group_rows

    return np.unique(group_rows(data), return_index=True)[1].tolist()
