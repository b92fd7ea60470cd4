"""Updates of the engine that an actor rank has, as the actor calls it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import workload
from benchmarks.gpu_check.device import square_rate
from benchmarks.gpu_check.gpu import host_gib, median_seconds, used_gib
from benchmarks.gpu_check.scale import Groups
from benchmarks.gpu_check.work import Work
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.plan.memory import CUDA_GIB, PROCESS_GIB, Rank
from grpo_dist.plan.model_shape import model_shape
from grpo_dist.protocol import DataProto
from grpo_dist.sizes import GIB

LAYOUTS = ("shared", "packed", "padded")
# Useful operations per second, of those of a large matrix product, in long micro-batches: compiled and not. Short ones
# of so small a model are held against nothing: the CPU takes longer to launch kernels than the GPU needs for them.
LEAST_MFU, LEAST_EAGER_MFU = 0.25, 0.15
# Updates of which the median counts.
ROUNDS = 3
# Of the plan.
LEAST_PEAK, MOST_PEAK = 0.9, 1.1


def update(work: Work) -> None:
    """Long micro-batches, the default budget of tokens; then short ones, where much is spent besides large products."""
    engine, rate = _long(work, None, LEAST_MFU), square_rate(work)
    sizes = work.scale.passes["2k"]
    tokens, useful = _rates(work, engine, sizes)
    name = f"micro-batches of {sizes.tokens:,} tokens"
    work.found.note(f"{name}: tokens, prompts counted once", tokens, "/s")
    work.found.note(f"{name}: of the matrix product's rate (MFU)", useful / rate)


def update_eager(work: Work) -> None:
    """Long micro-batches without torch.compile."""
    _long(work, False, LEAST_EAGER_MFU)


def _long(work: Work, use_torch_compile: bool | None, least_mfu: float) -> FSDPEngine:
    """Updates in long micro-batches, held against what is expected; returns the engine."""
    sizes = work.scale.passes["16k"]
    workload.join_process_group(work.device)
    engine = workload.engine(
        *(str(work.model), "shared", work.device), gradient_checkpointing=True, use_torch_compile=use_torch_compile
    )
    started = time.perf_counter()
    _step(engine, _equal_groups(work, sizes), sizes.tokens)
    work.found.note("first update, with compiling", time.perf_counter() - started, "s")
    fell_back = engine.forward.layout != "shared"
    work.found.right("fell back from shared prompts", fell_back, 0, note=engine.forward.report if fell_back else "")
    if (compiler := engine.forward.compiler) is not None:
        work.found.right("left off the compiler", not compiler.on, 0, note="" if compiler.on else engine.forward.report)
    rate = square_rate(work)
    if work.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    tokens, useful = _rates(work, engine, sizes)
    work.found.note(f"update of {sizes.groups} micro-batches", sizes.groups * sizes.tokens / tokens, "s")
    work.found.note("tokens, prompts counted once", tokens, "/s")
    work.found.note("useful operations", useful / 1e12, "TFLOP/s")
    work.found.at_least("of the matrix product's rate (MFU)", useful / rate, least_mfu)
    _memory(work, sizes.tokens)
    return engine


def _rates(work: Work, engine: FSDPEngine, sizes: Groups) -> tuple[float, float]:
    """Tokens, and useful operations, per second of an update whose micro-batches are single groups."""
    data = _equal_groups(work, sizes)
    seconds = median_seconds(partial(_step, engine, data, sizes.tokens), work.device, rounds=ROUNDS)
    return sizes.groups * sizes.tokens / seconds, workload.useful_flops(engine.model, data) / seconds


def _equal_groups(work: Work, sizes: Groups) -> DataProto:
    vocabulary = work.scale.model["vocab_size"]
    return workload.batch(sizes.groups, sizes.n, sizes.prompt, sizes.response, vocabulary, equal=True)


def _memory(work: Work, tokens: int) -> None:
    """The peak against the plan, and the guesses of what is taken besides tensors."""
    plan = planned_gib(work, tokens)
    host = host_gib("VmRSS")
    if work.device == "cpu":
        work.found.missing("peak of the GPU's memory", f"on a GPU only; the plan says {plan:.2g} GiB here")
        work.found.note("CPU memory of the process", host, "GiB")
        return
    peak = torch.cuda.max_memory_allocated() / GIB
    work.found.note("peak of the GPU's memory", peak, "GiB", note=f"plan {plan:.3g} GiB")
    work.found.within("of the plan", peak / plan, LEAST_PEAK, MOST_PEAK)
    work.found.note("peak that the allocator reserved", torch.cuda.max_memory_reserved() / GIB, "GiB")
    used = used_gib()
    if used is None or work.used_before is None:
        work.found.missing("GPU memory besides tensors", "nvidia-smi does not say what is used")
    else:
        besides = used - work.used_before - torch.cuda.memory_reserved() / GIB
        work.found.at_most("GPU memory besides tensors", besides, CUDA_GIB, "GiB", note="against the plan's CUDA_GIB")
    work.found.at_most("CPU memory of the process", host, PROCESS_GIB["cuda"], "GiB", note="the plan's PROCESS_GIB")


def planned_gib(work: Work, tokens: int) -> float:
    """The plan of a rank that is alone, with gradient checkpointing."""
    shape = model_shape(work.model_config)
    assert shape is not None
    device: Any = work.device
    compute = 2 if work.compute == "bf16" else 4
    rank = Rank(shape, device, 4, compute, trained=shape.num_parameters, recomputes=True)
    return sum(rank.update(tokens).values()) / GIB


def layout_speed(work: Work) -> None:
    """The same mini-batch, with responses of all lengths, in each layout; each padded or packed prompt is repeated."""
    workload.join_process_group(work.device)
    sizes, times = work.scale.mixed, {}
    data = workload.batch(sizes.groups, sizes.n, sizes.prompt, sizes.response, work.scale.model["vocab_size"])
    for layout in LAYOUTS:
        engine = workload.engine(str(work.model), layout, work.device, gradient_checkpointing=True)
        call: Callable[[], None] = partial(_step, engine, data, work.scale.budget)
        times[layout] = median_seconds(call, work.device, rounds=ROUNDS)
        kept = engine.forward.layout == layout
        work.found.note(f"{layout}", times[layout], "s", note="" if kept else engine.forward.report)
        del engine, call
        freed()
    for other in LAYOUTS[1:]:
        work.found.at_least(f"{other} takes", times[other] / times["shared"], 1.0, "x of shared")


def _step(engine: FSDPEngine, data: DataProto, max_token_len: int) -> None:
    size = len(data)  # does not count: tokens do
    engine.train_mini_batch(data, workload.OBJECTIVE, PassLimits("", size, max_token_len))


def freed() -> None:
    """Give back what an engine that is gone has held."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
