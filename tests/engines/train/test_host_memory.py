"""Peak memory of each rank's process while a model is loaded, copied and exported: its shards, and little else."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from grpo_dist.engines.train import hf_export
from grpo_dist.engines.train.checkpoint import copied, training_state
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from tests.ranks import run_ranks
from tests.worker_settings import model_settings

MIB = 1 << 20
RANKS = 4
CLEAR = Path("/proc/self/clear_refs")

pytestmark = pytest.mark.skipif(not os.access(CLEAR, os.W_OK), reason="the kernel does not start a peak anew")


def random_llama(folder: Path, tokenizer: str, *, vocab_size: int, width: int, layers: int) -> tuple[int, int]:
    """Random weights of such a model in fp32, written without a model around them; (bytes, those of the largest)."""
    import transformers

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tokenizer, name), folder)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    weights = {name: torch.rand(weight.shape) for name, weight in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = [weight.nbytes for weight in weights.values()]
    return sum(sizes), max(sizes)


def peak(work: Callable[[], Any]) -> tuple[Any, int]:
    """What `work` returns, and the most bytes that the process held meanwhile beside those that it held before."""
    gc.collect()
    CLEAR.write_text("5")
    before = _status("VmRSS")
    return work(), _status("VmHWM") - before


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def load_and_export(rank: int, path: str, folder: Path, dtype: str, file_bytes: int) -> tuple[int, int, int]:
    hf_export.EXPORT_FILE_BYTES = file_bytes
    settings = model_settings(path, compute_dtype="bf16")
    engine, loading = peak(lambda: FSDPEngine(settings, device="cpu", temperature=1.0))
    _, exporting = peak(lambda: engine.export_hf_model(folder, dtype))
    _, copying = peak(lambda: copied(training_state(engine.model, None, None)))
    return loading, exporting, copying


def check(path: Path, sizes: tuple[int, int], file_bytes: int, allowance: int, dtype: str) -> None:
    total, largest = sizes
    gathered = 3 * largest // (2 if dtype == "bf16" else 1)  # gloo copies on its way from the shards to the tensor
    peaks = run_ranks(RANKS, load_and_export, str(path), path / "exported", dtype, file_bytes)
    shown = "; ".join(", ".join(f"{each / MIB:.0f}" for each in rank) for rank in peaks)
    print(f"{total / MIB:.0f} MiB, largest {largest / MIB:.0f}: MiB by rank for loading, export, a copy: {shown}")
    for rank, (loading, exporting, copying) in enumerate(peaks):
        assert loading <= total / RANKS + largest + allowance, shown
        assert copying <= total / RANKS + 16 * MIB, shown
        assert exporting <= gathered + allowance + file_bytes * (rank == 0), shown


@pytest.mark.deep
def test_a_rank_needs_its_shards_and_one_tensor(random_models: dict[str, str], tmp_path: Path) -> None:
    sizes = random_llama(tmp_path, random_models["untied"], vocab_size=8192, width=512, layers=6)
    assert sizes[0] > 120 * MIB
    check(tmp_path, sizes, file_bytes=32 * MIB, allowance=80 * MIB, dtype="bf16")


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_of_1_gb(dtype: str, random_models: dict[str, str], tmp_path: Path) -> None:
    sizes = random_llama(tmp_path, random_models["untied"], vocab_size=32_000, width=1024, layers=11)
    assert sizes[0] > 1e9
    check(tmp_path, sizes, file_bytes=128 * MIB, allowance=128 * MIB, dtype=dtype)
