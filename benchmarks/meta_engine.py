"""The train engine as it runs on a GPU, on torch's meta device: the same operations in the same order, and no numbers.

What asks for a GPU is answered as on one: the kernel of FlexAttention, which is compiled there, counts as one forward
and two backward; its mask, made once a micro-batch, is not counted. Streams and events of FSDP2 do nothing.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_init,
    _fsdp_param_group,
    _fsdp_state,
    _fully_shard,
)
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.optim import optimizer  # type: ignore[attr-defined]
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _foreach_utils

from benchmarks import workload
from benchmarks.device_counter import META, DeviceCounter
from benchmarks.fused_graphs import Plan, PlanningCompiler
from grpo_dist.assets import POLICY_KEY
from grpo_dist.config.schema_roles import AdamWConfig, FSDPConfig, ModelConfig
from grpo_dist.engines.settings import ModelSettings, PassLimits
from grpo_dist.engines.train import attention, fsdp_engine, fsdp_model, lm_head
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.protocol import DataProto
from grpo_dist.sizes import CHUNK_LOGITS


def write_headers(folder: Path, config: dict[str, Any]) -> str:
    """Write a Qwen3 without numbers: its config, and a file of weights that is all holes."""
    import transformers

    made = transformers.Qwen3Config(**config)
    made.architectures = ["Qwen3ForCausalLM"]
    made.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(made)
    header, at, tied = {}, 0, set()
    for name, weight in model.named_parameters():
        if id(weight) in tied:
            continue
        tied.add(id(weight))
        header[name] = {"dtype": "F32", "shape": list(weight.shape), "data_offsets": [at, at + 4 * weight.numel()]}
        at += 4 * weight.numel()
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return str(folder)


@torch.library.custom_op("gpu_counts::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, pairs: float) -> Tensor:
    """Stand in for FlexAttention's kernel over so many pairs of tokens."""
    return torch.empty_like(q)


@torch.library.custom_op("gpu_counts::attention_backward", mutates_args=())
def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, pairs: float) -> tuple[Tensor, Tensor, Tensor]:
    """Stand in for its kernel of the gradients."""
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.pairs = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *torch.ops.gpu_counts.attention_backward(grad, *ctx.saved_tensors, ctx.pairs), None


_attention.register_fake(lambda q, k, v, pairs: torch.empty_like(q))
_attention_backward.register_fake(
    lambda g, q, k, v, pairs: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
)
_attention.register_autograd(_gradients, setup_context=_save)


def pairs_of(data: DataProto, tokens: int) -> float:
    """Pairs of a token and one that it sees in a micro-batch: a prompt and its responses, so many tokens in all."""
    prompt, response = float(data["prompts"].lengths[0]), float(data["responses"].lengths[0])
    return prompt**2 / 2 + (tokens - prompt) * (prompt + response / 2)


class _Device:
    """Streams and events of which nothing is expected."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def current_device(self) -> int:
        return 0


def count_update(
    config: dict[str, Any],
    data: DataProto,
    *,
    tokens: int,
    ranks: int = 1,
    compiled: bool = False,
    plans: dict[Any, Plan] | None = None,
) -> tuple[DeviceCounter, float]:
    """Count the second update, with gradient checkpointing, of fp32 weights in bf16; micro-batches are single groups.

    Args:
        config: of a Qwen3.
        data: of each rank; all of its responses are equally long.
        tokens: of a micro-batch.
        ranks: that hold the weights together.
        compiled: with `use_torch_compile`.
        plans: of compiled functions, from an update that differs in the number of layers only.

    Returns:
        The counts: "inputs" are made and sent, "pass" is from there to the end of the backward pass, "step" the rest.
        And the useful operations of the data.
    """
    counter = DeviceCounter("step")
    with (
        tempfile.TemporaryDirectory() as folder,
        _as_on_gpu(counter, pairs_of(data, tokens), ranks, {} if plans is None else plans),
    ):
        engine = _engine(write_headers(Path(folder), config), ranks, compiled)
        limits = PassLimits("", len(data), tokens)
        train = partial(engine.train_mini_batch, objective=workload.OBJECTIVE, limits=limits)
        with counter:
            with counter.pause(), _uncompiled(engine):  # AdamW makes its states in the first step
                train(data.slice(0, 1))
            with _phases(counter, engine):
                train(data)
        return counter, workload.useful_flops(engine.model, data)


def _engine(path: str, ranks: int, compiled: bool) -> FSDPEngine:
    """The engine as on a GPU, with the comparison of layouts behind it."""
    model = workload.section(ModelConfig, "model", enable_gradient_checkpointing=True)
    held = workload.section(FSDPConfig, "actor", "fsdp_config", use_torch_compile=compiled)
    settings = ModelSettings(
        *(model, held, model, POLICY_KEY, path, "fp32", "bf16"), reshard_after_forward=ranks > 1, layout="shared"
    )
    built = fsdp_model.build_model(settings, "cuda", ranks).model
    fsdp_model.shard(built, settings, "cuda")
    optimizer = AdamWConfig(lr=1e-6, weight_decay=0.01, betas=(0.9, 0.999), override_optimizer_config=None)
    with mock.patch.object(fsdp_engine, "load_sharded_model", return_value=built):
        engine = FSDPEngine(settings, device="cuda", temperature=1.0, optimizer=optimizer, grad_clip=1.0)
    engine.device = engine.forward.device = META
    engine.forward.report = "not compared"
    return engine


@contextmanager
def _uncompiled(engine: FSDPEngine) -> Iterator[None]:
    """Within the block nothing of the engine is compiled."""
    compiler = engine.forward.compiler
    if compiler is None:
        yield
        return
    compiler.on = False
    try:
        yield
    finally:
        compiler.on = True


@contextmanager
def _phases(counter: DeviceCounter, engine: FSDPEngine) -> Iterator[None]:
    """Within the block the counter knows what the engine does."""
    micro_batch, backward = engine.forward.micro_batch, Tensor.backward

    def made(*args: Any, **kwargs: Any) -> Any:
        counter.phase = "inputs"
        result = micro_batch(*args, **kwargs)
        counter.phase = "pass"
        return result

    def passed(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        counter.phase = "step"

    with mock.patch.object(engine.forward, "micro_batch", made), mock.patch.object(Tensor, "backward", passed):
        yield


@contextmanager
def _as_on_gpu(counter: DeviceCounter, pairs: float, world_size: int, plans: dict[Any, Plan]) -> Iterator[None]:
    """Within the block meta tensors are the GPU's, and this process is one of so many ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    with counter.pause():
        mask: BlockMask = create_block_mask(lambda b, h, q, k: q >= k, 1, None, 128, 128, device="cpu")

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out: Tensor = torch.ops.gpu_counts.attention(q, k, v, pairs)
        return out

    def add_outer(total: Tensor, grad: Tensor, states: Tensor) -> None:
        counter.kernel("addmm", flops=2.0 * total.numel() * len(states))

    with ExitStack() as stack:
        for module in (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state):
            stack.enter_context(mock.patch.object(module, "_get_device_handle", return_value=_Device()))
        for owner, name, stand_in in (
            (_fsdp_init, "_get_device_from_mesh", lambda mesh: META),
            (_fully_shard, "_get_device_from_mesh", lambda mesh: META),
            (optimizer, "_get_fused_kernels_supported_devices", lambda: ["meta"]),
            (_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda self: None),
            (_foreach_utils, "_get_foreach_kernels_supported_devices", lambda: ["meta"]),
            (attention, "flex_attention", attend),
            (attention, "_kernel", lambda f, device: attend if f is attend else lambda *args, **kwargs: mask),
            (lm_head, "_add_outer", add_outer),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        stack.enter_context(mock.patch.object(torch, "compile", PlanningCompiler(counter, plans)))
        stack.enter_context(mock.patch.dict(CHUNK_LOGITS, meta=CHUNK_LOGITS["cuda"]))
        try:
            yield
        finally:
            dist.destroy_process_group()
