"""Weights on their way: from files, into files, and with the optimizer's states to CPU memory and back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import torch

from benchmarks import workload
from benchmarks.gpu_check.gpu import forget_host_peak, host_gib
from benchmarks.gpu_check.work import Work
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.optimizer import Offload
from grpo_dist.sizes import GIB

# Round trips of which the median counts.
ROUNDS = 3


def weights(work: Work) -> None:
    """Load, take a step, move the states, export, and compare the export with what was loaded."""
    workload.join_process_group(work.device)
    size = num_bytes(work.model)
    with _timed(work, "loading", size, "of files that were just written"):
        engine = workload.engine(  # nothing that is compiled
            *(str(work.model), "padded", work.device), optimizer_offload=True, use_torch_compile=False
        )
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
    """AdamW's states, which a step has to make first, and the weights: `optimizer_offload` and `param_offload`."""
    if work.device == "cpu":
        work.found.missing("weights and optimizer states to CPU memory and back", "on CPU nothing moves")
        return
    data = workload.batch(1, 2, 16, 16, work.scale.model["vocab_size"])
    engine.train_mini_batch(data, workload.OBJECTIVE, PassLimits("", 2))
    states = engine.optimizer.state.values()
    moved = sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))
    note_ways(work, "optimizer states", moved, engine.offload.states_on_device)
    weights = Offload(engine.model, None, engine.device, parameters=True)
    weights.away()
    held = sum(parameter.nbytes for parameter in engine.model.parameters())
    note_ways(work, "weights", held, weights.on_device)
    note_ways(work, "weights that were only read", held, partial(weights.on_device, reads=True))


def note_ways(work: Work, name: str, size: int, on_device: Callable[[], AbstractContextManager[None]]) -> None:
    """Median seconds, and GB/s, of each way of `size` bytes that are in the GPU's memory within a block."""
    times: dict[str, list[float]] = {"to the GPU": [], "to CPU memory": []}
    for _ in range(ROUNDS):
        started = _now(work)
        with on_device():
            times["to the GPU"].append(_now(work) - started)
            started = _now(work)
        times["to CPU memory"].append(_now(work) - started)
    for way, taken in times.items():
        seconds = statistics.median(taken)
        work.found.note(f"{name} {way}", seconds, "s", note=f"{size / GIB:.3g} GiB")
        work.found.note(f"{name} {way}", size / 1e9 / seconds, "GB/s")


def _now(work: Work) -> float:
    """The clock, when the GPU has done what it was given."""
    if work.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


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
