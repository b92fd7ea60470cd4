"""Ranks that save and load a model with AdamW states, and what they take: seconds, bytes, memory."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
import torch.multiprocessing as mp
from safetensors.torch import save_file

from benchmarks.peak import Peak
from grpo_dist.config.schema_roles import AdamWConfig
from grpo_dist.engines.rendezvous import LOOPBACK, init_process_group, open_store
from grpo_dist.engines.train.durable_files import FileDigest
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.sharded_tensors import local_shard
from grpo_dist.plan.commands import load_config
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.freed_memory import FreedMemory
from grpo_dist.trainer.checkpoint.folder import RunState
from grpo_dist.trainer.checkpoint.manifest import damage, read_manifest
from grpo_dist.trainer.checkpoint.saver import CheckpointSaver
from tests.worker_settings import model_settings

MIB, SAMPLED_S, PIECE, TIMEOUT_S = 1 << 20, 0.1, 16 << 20, 600.0
# Imported once, by the server that the ranks are forked from.
PRELOADED = ["benchmarks.checkpoint_ranks", "transformers.models.qwen3.modeling_qwen3"]


class Ranks:
    """Processes with an engine each, asked as a `Gang` is, but through pipes: Ray has no part in what is measured.

    Args:
        model: folder of the model.
        count: number of ranks.
    """

    def __init__(self, model: Path, count: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._store = open_store(LOOPBACK)
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            arguments = (rank, count, self._store.port, str(model), theirs)
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self._pipes.append(ours)
            self.processes[-1].start()
        for pipe in self._pipes:
            pipe.recv()  # the model is loaded

    def ask(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """What the method of the engine returns on each rank."""
        for pipe in self._pipes:
            pipe.send((method, args, kwargs))
        return [pipe.recv() for pipe in self._pipes]

    async def checkpoint_bytes(self) -> int:
        """As of a `Gang`."""
        return int(self.ask("checkpoint_bytes")[0])

    async def begin_save(self, folder: str) -> None:
        """As of a `Gang`."""
        await asyncio.to_thread(self.ask, "begin_save", Path(folder))

    async def finished_save(self, *, wait: bool) -> dict[str, FileDigest] | None:
        """As of a `Gang`."""
        parts = await asyncio.to_thread(self.ask, "finished_save", wait=wait)
        return None if None in parts else {name: digest for part in parts for name, digest in part.items()}

    def end(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank: int, count: int, port: int, model: str, pipe: Connection) -> None:
    """A rank: it loads the model, gives it the optimizer states of a first step, and does as it is told."""
    torch.set_num_threads(1)
    FreedMemory()  # as workers on CPU have it
    store = torch.distributed.TCPStore(LOOPBACK, port)
    init_process_group(device="cpu", rank=rank, world_size=count, store=store, timeout_s=TIMEOUT_S)
    settings = model_settings(model)
    schedule = AdamWConfig(lr=1e-6, weight_decay=0.0, betas=(0.9, 0.999), override_optimizer_config=None)
    engine = FSDPEngine(settings, device="cpu", temperature=1.0, optimizer=schedule)
    for parameter in engine.model.parameters():
        means = {name: torch.empty_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        for each in means.values():
            local_shard(each).uniform_()
        engine.optimizer.state[parameter] = {"step": torch.tensor(1.0), **means}
    ctypes.CDLL(None).malloc_trim(0)  # what loading has left, and a pass would use
    pipe.send(None)
    while True:
        method, args, kwargs = pipe.recv()
        pipe.send(getattr(engine, method)(*args, **kwargs))


def peak_memory(ranks: Ranks) -> Peak:
    """Of the memory of the ranks together, shared pages counted once, MiB."""
    processes = [psutil.Process(process.pid) for process in ranks.processes]
    return Peak(lambda: float(sum(process.memory_full_info().pss for process in processes) / MIB), SAMPLED_S)


def write_model(folder: Path, sizes: dict[str, Any]) -> None:
    """A Qwen3 with random weights in fp32, written without a model around them."""
    import transformers

    folder.mkdir()
    config = transformers.Qwen3Config(**sizes, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = dict(transformers.Qwen3ForCausalLM(config).named_parameters())
    weights = {name: torch.rand(weight.shape) for name, weight in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def measure(folder: Path, count: int, rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Save `folder/model` in the background and waited for, in turns, and load the last checkpoint on fewer ranks."""
    with started(folder / "model", count) as ranks:
        saves, checkpoint = save(ranks, folder, rounds)
    loads = []
    for fewer in (number for number in range(count, 0, -1) if count % number == 0):
        with started(folder / "model", fewer) as ranks:
            loads.append(load(ranks, checkpoint))
    return saves, loads


def save(ranks: Ranks, folder: Path, rounds: int) -> tuple[list[dict[str, Any]], Path]:
    """What saves of both kinds take; and the last checkpoint."""
    config, _ = load_config([f"trainer.default_local_dir={folder / 'run'}", "trainer.max_actor_ckpt_to_keep=1"])
    actor = {"actor": ranks}
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for step in range(1, 2 * rounds + 1):
        background = step % 2 == 1
        saver = CheckpointSaver(config, lambda: actor, async_save=background)  # type: ignore[arg-type, return-value]
        with peak_memory(ranks) as memory:
            seconds = _save(saver, step)
        assert saver.last is not None
        checkpoint = saver.last
        found[background].append(seconds | {"before": memory.before, "peak": memory.largest})
    num_bytes = sum(file["bytes"] for file in read_manifest(checkpoint)["files"].values())
    alone = {"disk": disk_seconds(folder / "noise", num_bytes), "copy": copy_seconds(num_bytes)}
    rows = []
    for background, figures in found.items():
        row: dict[str, Any] = {"save": "in the background" if background else "waited for", "MB": num_bytes / 1e6}
        row |= {name: median(each[name] for each in figures) for name in ("blocked", "whole")}
        rows.append(row | alone | {"before": figures[0]["before"], "peak": max(each["peak"] for each in figures)})
    return rows, checkpoint


def _save(saver: CheckpointSaver, step: int) -> dict[str, float]:
    """Seconds of one save, as the loop of a run takes it."""
    began = time.perf_counter()
    run(saver.begin(RunState(step, step, {})))
    run(saver.poll())
    blocked = time.perf_counter() - began
    run(saver.finish())
    return {"blocked": blocked, "whole": time.perf_counter() - began}


def load(ranks: Ranks, checkpoint: Path) -> dict[str, Any]:
    """What it takes to verify a checkpoint and to load it."""
    with peak_memory(ranks) as memory:
        verified = _seconds(lambda: damage(checkpoint) == [], checkpoint)
        loaded = _seconds(lambda: not any(ranks.ask("load_checkpoint", checkpoint / "actor")), checkpoint)
    row = {"ranks": len(ranks.processes), "verify": verified, "load": loaded}
    return row | {"before": memory.before, "peak": memory.largest}


def _seconds(work: Callable[[], bool], checkpoint: Path) -> float:
    """Seconds of what reads a checkpoint from the disk."""
    forget(checkpoint)
    began = time.perf_counter()
    assert work()
    return time.perf_counter() - began


@contextmanager
def started(model: Path, count: int) -> Iterator[Ranks]:
    """Ranks that hold the model; they end with the block."""
    ranks = Ranks(model, count)
    try:
        yield ranks
    finally:
        ranks.end()


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
        for _ in range(-(-num_bytes // PIECE)):
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
    copies = [source.copy() for _ in range(-(-num_bytes // PIECE))]
    seconds = time.perf_counter() - began
    assert copies
    return seconds
