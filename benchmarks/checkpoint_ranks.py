"""Ranks that save and load a model with AdamW states, and what they take: seconds, bytes, memory."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
import transformers
from safetensors.torch import save_file

from benchmarks.throughput import TIMEOUT_S, kill
from grpo_dist.config.load import load_config
from grpo_dist.config.node_layout import slots_of
from grpo_dist.engines.settings import ModelSettings, OptimizerSettings
from grpo_dist.trainer.checkpoint.folder import RunState
from grpo_dist.trainer.checkpoint.manifest import damage, read_manifest
from grpo_dist.trainer.checkpoint.saver import CheckpointSaver
from grpo_dist.workers.event_loop import run
from grpo_dist.workers.gang import ActorGroup
from grpo_dist.workers.group import WorkerGroup
from grpo_dist.workers.limits import TimeLimits
from grpo_dist.workers.policy import ActorWorker, PolicySettings
from grpo_dist.workers.resources import release, reserve

MIB, SAMPLED_S, PIECE = 1 << 20, 0.1, 16 << 20


class Rank(ActorWorker):
    """An actor whose optimizer has states, as after a step."""

    def fill_states(self) -> None:
        """Draw them."""
        optimizer = self.engine.optimizer  # type: ignore[attr-defined]
        for parameter in self.engine.model.parameters():  # type: ignore[attr-defined]
            means = {name: torch.rand_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(1.0), **means}
        ctypes.CDLL(None).malloc_trim(0)  # what loading has left, which a pass would use


class Memory:
    """Memory of some processes together, shared pages counted once, MiB.

    Attributes:
        before: when a block began.
        peak: the most during the block, sampled.
    """

    before = peak = 0.0

    def __init__(self, workers: WorkerGroup) -> None:
        self._processes = [psutil.Process(each.pid) for each in run(workers.call_home())]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Sample until the block ends."""
        self.before = self.peak = self._now()
        ends = threading.Event()

        def sample() -> None:
            while not ends.wait(SAMPLED_S):
                self.peak = max(self.peak, self._now())

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join()

    def _now(self) -> float:
        return sum(process.memory_full_info().pss for process in self._processes) / MIB


def write_model(folder: Path, sizes: dict[str, Any]) -> None:
    """A Qwen3 with random weights in fp32, written without a model around them."""
    folder.mkdir()
    config = transformers.Qwen3Config(**sizes, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = dict(transformers.Qwen3ForCausalLM(config).named_parameters())
    weights = {name: torch.rand(weight.shape) for name, weight in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def measure(folder: Path, ranks: int, rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Save `folder/model` in the background and waited for, in turns, and load the last checkpoint on fewer ranks."""
    with started(folder / "model", ranks) as actor:
        saves, checkpoint = save(actor, folder, rounds)
        loads = [load(actor, checkpoint)]
    for fewer in (number for number in range(ranks - 1, 0, -1) if ranks % number == 0):
        with started(folder / "model", fewer) as actor:
            loads.append(load(actor, checkpoint))
    return saves, loads


def save(actor: ActorGroup, folder: Path, rounds: int) -> tuple[list[dict[str, Any]], Path]:
    """What saves of both kinds take; and the last checkpoint."""
    config, _ = load_config([f"trainer.default_local_dir={folder / 'run'}", "trainer.max_actor_ckpt_to_keep=1"])
    run(actor.workers.ask_all("start", "fill_states"))
    memory = Memory(actor.workers)
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for step in range(1, 2 * rounds + 1):
        background = step % 2 == 1
        saver = CheckpointSaver(config, lambda: {"actor": actor}, async_save=background)
        with memory.watched():
            seconds = _save(saver, step)
        assert saver.last is not None
        found[background].append(seconds | {"before": memory.before, "peak": memory.peak})
    num_bytes = sum(file["bytes"] for file in read_manifest(saver.last)["files"].values())
    alone = {"disk": disk_seconds(folder / "zeros", num_bytes), "copy": copy_seconds(num_bytes)}
    rows = []
    for background, figures in found.items():
        row: dict[str, Any] = {"save": "in the background" if background else "waited for", "MB": num_bytes / 1e6}
        row |= {name: median(each[name] for each in figures) for name in figures[0]}
        rows.append(row | {"first peak": figures[0]["peak"]} | alone)
    return rows, saver.last


def _save(saver: CheckpointSaver, step: int) -> dict[str, float]:
    """Seconds of one save, as the loop of a run takes it."""
    began = time.perf_counter()
    run(saver.begin(RunState(step, step, {})))
    run(saver.poll())
    blocked = time.perf_counter() - began
    run(saver.finish())
    return {"blocked": blocked, "whole": time.perf_counter() - began}


def load(actor: ActorGroup, checkpoint: Path) -> dict[str, Any]:
    """What it takes to verify a checkpoint and to load it."""
    memory, seconds = Memory(actor.workers), []
    with memory.watched():
        for work in (lambda: damage(checkpoint), lambda: run(actor.load_checkpoint(str(checkpoint / "actor")))):
            forget(checkpoint)
            began = time.perf_counter()
            assert not work()
            seconds.append(time.perf_counter() - began)
    return {
        "ranks": len(actor.workers),
        "verify": seconds[0],
        "load": seconds[1],
        "before": memory.before,
        "peak": memory.peak,
    }


@contextmanager
def started(model: Path, ranks: int) -> Iterator[ActorGroup]:
    """Ranks that hold the model, with one thread each; their processes end with the block."""
    groups, bundles = reserve(slots_of({"actor": [0] * ranks}, {"actor": (0.01, 0.0)}))
    workers = WorkerGroup.spawn(
        "actor",
        Rank,
        bundles["actor"],
        args=[(rank, ranks) for rank in range(ranks)],
        env={"OMP_NUM_THREADS": "1"},
        limits=TimeLimits(TIMEOUT_S),
    )
    settings = PolicySettings(
        model=ModelSettings(str(model), False, "fp32", "fp32", False, True),
        device="cpu",
        num_threads=1,
        temperature=1.0,
        columns=("old_log_probs",),
        log_prob_micro_batch_size=1,
        collective_timeout_s=240.0,
        seed=1,
        optimizer=OptimizerSettings(1e-6, 0.0, (0.9, 0.999), "constant", 0, 10, 0.0),
    )
    try:
        actor = ActorGroup(workers)
        run(actor.start(settings))
        yield actor
    finally:
        kill([workers])
        release(groups)


def forget(folder: Path) -> None:
    """Drop what the kernel keeps of the files in memory, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_seconds(file: Path, num_bytes: int) -> float:
    """In which one process writes so many bytes and flushes them to disk."""
    piece = np.random.default_rng(0).bytes(PIECE)
    began = time.perf_counter()
    with file.open("wb") as stream:
        for _ in range(num_bytes // PIECE):
            stream.write(piece)
        stream.flush()
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - began
    file.unlink()
    return seconds


def copy_seconds(num_bytes: int) -> float:
    """In which one thread copies so many bytes into memory that is new to the process."""
    source = np.ones(PIECE, np.uint8)
    began = time.perf_counter()
    copied = [source.copy() for _ in range(num_bytes // PIECE)]
    seconds = time.perf_counter() - began
    assert copied
    return seconds
