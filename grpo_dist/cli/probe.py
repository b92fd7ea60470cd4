"""Measures the work of a process of a run here, with random models: `python -m grpo_dist.cli.probe DEVICE DTYPE`.

`calibrate.py` starts it for each number of threads and type, reads the JSON that it prints and makes rates of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grpo_dist.engines.rendezvous import LOOPBACK, init_process_group, open_store
from grpo_dist.engines.settings import (
    EngineSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    SamplingSettings,
)
from grpo_dist.protocol import DataProto, Ragged

# (hidden size, layers, vocabulary) of the models that are trained, and of those that generate.
TRAINED = {
    "cpu": ((64, 2, 256), (64, 6, 256), (256, 2, 256), (768, 1, 256)),
    "cuda": ((512, 2, 256), (512, 6, 256), (2048, 2, 256), (4096, 1, 256)),
}
SAMPLED = {
    "cpu": ((64, 2, 8192), (64, 8, 256), (512, 4, 256)),
    "cuda": ((512, 2, 65536), (512, 12, 256), (4096, 8, 256)),
}
# (groups, responses, prompt tokens, response tokens) of passes: small, with many sequences, large, and with long ones.
PASSES = ((1, 2, 8, 8), (8, 16, 8, 2), (4, 8, 32, 32), (1, 4, 64, 448))
# (groups, responses, prompt tokens) that are sampled: one alone, some, many, and some with a long prompt.
SAMPLES = ((1, 1, 32), (4, 8, 32), (16, 8, 32), (1, 16, 448))
FEW, MANY = 4, 24  # tokens of responses: what many take more is decoding
EXCHANGES = (1 << 8, 1 << 24)  # bytes
BANDWIDTH_BYTES = 1 << 28
CLIPS = {"clip_ratio": 0.2, "clip_ratio_c": 3.0}
OBJECTIVE = ObjectiveSettings("vanilla", "token-mean", CLIPS, True, "low_var_kl", 1e-3, 0.0)


def main(device: str, dtype: str) -> None:
    """Measure everything and print it."""
    from grpo_dist.workers.freed_memory import FreedMemory

    FreedMemory()  # as policy workers do
    init_process_group(device=device, rank=0, world_size=1, store=open_store(LOOPBACK), timeout_s=600)
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "bandwidth": bandwidth(device)}
    if device == "cpu":
        found["exchanges"] = exchanges()
    with tempfile.TemporaryDirectory() as folder:
        trained = TRAINED[device][: 3 if torch.get_num_threads() == 1 else None]  # one thread: for small models
        found["passes"] = [point for sizes in trained for point in passes(_model(folder, sizes), device, dtype)]
        if find_spec("vllm") is not None:
            found["decoding"], found["syncs"] = asyncio.run(_sampled(folder, device, dtype))
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # without vLLM's own clearing up, which may take seconds


def bandwidth(device: str) -> float:
    """Bytes per second of a copy, read and written."""
    source = torch.ones(BANDWIDTH_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * BANDWIDTH_BYTES / _best(lambda: target.copy_(source), device)


def exchanges() -> list[dict[str, float]]:
    """Seconds in which two ranks exchange bytes over gloo: half of them come from the other one."""
    store, limit = dist.HashStore(), timedelta(seconds=60)
    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, limit), range(2)))

        def gather(group: Any, size: int) -> None:
            mine = torch.ones(size // 2, dtype=torch.uint8)
            group.allgather([[torch.empty_like(mine), torch.empty_like(mine)]], [mine]).wait()

        def both(size: int) -> None:
            list(threads.map(lambda group: gather(group, size), ranks))

        return [{"bytes": size, "seconds": _best(partial(both, size), "cpu")} for size in EXCHANGES]


def passes(path: str, device: str, dtype: str) -> Iterator[dict[str, float]]:
    """Seconds of forward passes and of updates of a model."""
    from grpo_dist.engines.train.fsdp_engine import FSDPEngine

    settings = ModelSettings(path, False, "fp32", dtype, False, False)
    optimizer = OptimizerSettings(1e-6, 0.0, (0.9, 0.999), "constant", 0, 1, 0.0)
    engine = FSDPEngine(settings, device=device, temperature=1.0, optimizer=optimizer, grad_clip=1.0)
    sizes = json.loads(Path(path, "config.json").read_text())
    named = {"hidden": sizes["hidden_size"], "layers": sizes["num_hidden_layers"], "vocabulary": sizes["vocab_size"]}
    for groups, n, prompt, response in PASSES:
        data, limits = _batch(groups, n, prompt, response), {"micro_batch_size": groups * n}
        forward = _best(partial(engine.compute_log_probs, data, **limits), device)
        update = _best(partial(engine.train_mini_batch, data, objective=OBJECTIVE, **limits), device)
        lengths = {"prompts": groups, "sequences": groups * n, "prompt": prompt, "response": response}
        yield {**named, **lengths, "forward": forward, "update": update}


async def _sampled(folder: str, device: str, dtype: str) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Seconds of decoding steps and of loading weights."""
    from grpo_dist.engines.vllm.engine import VLLMEngine

    decoding, syncs = [], []
    for sizes in SAMPLED[device]:
        path = _model(folder, sizes)
        limits = {"max_model_len": 512, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
        memory = {"gpu_memory_utilization": 0.5, "kv_cache_memory_gib": 1.0}
        name = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
        ways = {"enforce_eager": device == "cpu", "enable_chunked_prefill": False}
        engine = VLLMEngine(EngineSettings(path, device, name, False, 1, seed=0, **limits, **memory, **ways))  # type: ignore[arg-type]
        await engine.start()
        for groups, n, prompt in SAMPLES:
            few, many = [await _sampling(engine, groups, n, prompt, tokens) for tokens in (FEW, MANY)]
            named = dict(zip(("hidden", "layers", "vocabulary"), sizes, strict=True))
            if many > few:  # but for what disturbs it
                step, context = (many - few) / (MANY - FEW), prompt + (FEW + MANY) / 2
                decoding.append(named | {"sequences": groups * n, "context": context, "step": step})
        syncs.append(await _sync(engine, path, getattr(torch, name)))
        engine.shutdown()
    return decoding, syncs


async def _sampling(engine: Any, groups: int, n: int, prompt: int, tokens: int) -> float:
    """Seconds of sampling so many tokens for every response, the better of two."""
    sampling = SamplingSettings(n, 1.0, 1.0, -1, tokens, 0, ignore_eos=True)
    times = []
    for turn in range(2):
        rng = np.random.default_rng([turn, tokens])  # other prompts each time, which no cache knows
        prompts = [[int(i) for i in rng.integers(3, 250, prompt)] for _ in range(groups)]
        started = time.perf_counter()
        await asyncio.gather(*(engine.generate(each, sampling, f"{turn}-{i}") for i, each in enumerate(prompts)))
        times.append(time.perf_counter() - started)
    return min(times)


async def _sync(engine: Any, path: str, dtype: torch.dtype) -> dict[str, float]:
    """Bytes of a model, and the seconds that it takes to pack them, to check them and to load them."""
    from safetensors.torch import load_file

    from grpo_dist.engines.weights.buckets import pack

    weights, times = {name: t.to(dtype) for name, t in load_file(Path(path, "model.safetensors")).items()}, []
    for version in range(3):
        started = time.perf_counter()
        buckets = list(pack(weights.items(), bucket_bytes=1 << 28))
        await engine.weights.load(buckets, version)
        times.append(time.perf_counter() - started)
    return {"bytes": float(sum(t.numel() * t.element_size() for t in weights.values())), "seconds": min(times)}


def _model(folder: str, sizes: tuple[int, int, int]) -> str:
    """A Llama with random weights, heads of 64 and an MLP of three times the hidden size."""
    import transformers

    hidden, layers, vocabulary = sizes
    path = Path(folder, "-".join(map(str, sizes)))
    if not path.exists():
        torch.manual_seed(0)
        shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
        heads = {"num_attention_heads": max(1, hidden // 64), "num_key_value_heads": max(1, hidden // 128)}
        rest = {"vocab_size": vocabulary, "max_position_embeddings": 4096, "tie_word_embeddings": True}
        sizes_by_name: dict[str, Any] = {**shape, **heads, **rest, "pad_token_id": 0, "eos_token_id": 2}
        config = transformers.LlamaConfig(**sizes_by_name)
        transformers.LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def _batch(groups: int, n: int, prompt: int, response: int) -> DataProto:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 250, prompt) for _ in range(groups)]
    responses = [rng.integers(3, 250, response) for _ in range(groups * n)]
    numbers = [rng.normal(size=response) for _ in responses]
    columns = {
        name: Ragged.from_rows(numbers, torch.float32) for name in ("old_log_probs", "ref_log_probs", "advantages")
    }
    return DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([p for p in prompts for _ in range(n)], torch.int32),
            "responses": Ragged.from_rows(responses, torch.int32),
            "response_mask": Ragged.from_rows([np.ones(response) for _ in responses], torch.int8),
            **columns,
        }
    )


def _best(call: Callable[[], Any], device: str) -> float:
    """Seconds of a call, the best of two after one that warms up."""
    times = []
    for _ in range(3):
        _finish(device)
        started = time.perf_counter()
        call()
        _finish(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
