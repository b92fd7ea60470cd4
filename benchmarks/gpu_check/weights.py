"""Weights on their way: from files, into files, and the optimizer's states to CPU memory and back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks import workload
from benchmarks.gpu_check.gpu import forget_host_peak, host_gib, median_seconds
from benchmarks.gpu_check.work import Work
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.sizes import GIB


def weights(work: Work) -> None:
    """Load, take a step, move the states, export, and compare the export with what was loaded."""
    workload.join_process_group(work.device)
    size = num_bytes(work.model)
    with _timed(work, "loading", size, "of files that were just written"):
        engine = workload.engine(str(work.model), "shared", work.device, optimizer_offload=True)
    with _timed(work, "export in bf16", size, "flushed to the disk"):
        engine.export_hf_model(work.folder / "export", "bf16")
    work.found.right("tensors of the export that are others", _others(work.model, work.folder / "export"), 0)
    _offload(work, engine)


@contextmanager
def _timed(work: Work, name: str, size: int, note: str) -> Iterator[None]:
    """Seconds, GB/s and peak of CPU memory of a block."""
    resets, before = forget_host_peak(), host_gib("VmRSS")
    started = time.perf_counter()
    yield
    if work.device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    work.found.note(name, seconds, "s")
    work.found.note(f"{name}: files", size / 1e9 / seconds, "GB/s", note=note)
    if resets:
        work.found.note(f"{name}: peak of CPU memory above what was there", host_gib("VmHWM") - before, "GiB")
    else:
        work.found.missing(f"{name}: peak of CPU memory", "the kernel does not begin it anew")


def _offload(work: Work, engine: FSDPEngine) -> None:
    """A round trip of AdamW's states, which a step has to make first."""
    if work.device == "cpu":
        work.found.missing("optimizer states out and back", "on CPU nothing moves")
        return
    data = workload.batch(1, 2, 16, 16, work.scale.model["vocab_size"])
    engine.train_mini_batch(data, micro_batch_size=2, objective=workload.OBJECTIVE)
    states = engine.optimizer.state.values()
    moved = sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))

    def round_trip() -> None:
        with engine.offload.states_on_device():
            pass

    seconds = median_seconds(round_trip, work.device, rounds=3)
    work.found.note("optimizer states in and out", seconds, "s", note=f"{moved / GIB:.3g} GiB each way")
    work.found.note("optimizer states in and out: both ways together", 2 * moved / 1e9 / seconds, "GB/s")


def num_bytes(folder: Path) -> int:
    """Of a folder's safetensors files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _others(folder: Path, export: Path) -> int:
    """How many tensors of two folders are not equal, or are in one only."""
    from safetensors.torch import load_file

    first, second = (
        {name: tensor for file in sorted(each.glob("*.safetensors")) for name, tensor in load_file(file).items()}
        for each in (folder, export)
    )
    differ = [name for name in first.keys() & second.keys() if not torch.equal(first[name], second[name])]
    return len(differ) + len(first.keys() ^ second.keys())
