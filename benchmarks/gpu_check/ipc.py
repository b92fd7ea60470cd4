"""Weights from one process to another on the same GPU (CUDA IPC), as the actor passes them to the engines' workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_check.ranks import run_ranks
from benchmarks.gpu_check.work import Work
from grpo_dist.config.processor import is_wsl
from grpo_dist.engines.rendezvous import LOOPBACK
from grpo_dist.engines.settings import SENDER, GroupAddress
from grpo_dist.engines.weights.broadcast import CudaMemory, FileMemory, WeightGroup, receive, send
from grpo_dist.errors import WeightSyncError

# torch's settings of its allocator, under its present name and the one before.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# One pair of processes for each. Containers do not let another process open an expandable segment: none is shared.
SETTINGS = {"default allocator": "", "expandable segments": "expandable_segments:True"}
# Versions of the weights that are sent; the first one does not count: it opens the memory, and loads kernels.
SYNCS = 4
TENSORS_IN_A_BUCKET = 4
# A GPU multiplies for a third of a second, while bytes that it has yet to write are handed over.
PRODUCTS, ROWS, BYTES = 200, 8192, 1 << 20
WRITTEN = 7
# All processes together, and a rank that waits for the other one of its pair.
LIMIT_S, PEER_LIMIT_S = 100.0, 30.0

Numbers = dict[str, Any]


def ipc(work: Work) -> None:
    """Send weights by CUDA IPC between two processes, for each setting of torch's allocator."""
    if is_wsl():
        work.found.missing("weights by CUDA IPC", "Linux under Windows (WSL) has no CUDA IPC; runs take object_store")
        return
    sizes = work.scale.shared_weights
    environments = [dict.fromkeys(ALLOCATOR, setting) for setting in SETTINGS.values() for _ in range(2)]
    arguments = {"device": work.device, "tensors": sizes.tensors, "numbers": sizes.numbers}
    sides = run_ranks("benchmarks.gpu_check.ipc:side", environments, arguments, LIMIT_S)
    for pair, name in enumerate(SETTINGS):
        note_pair(work, name, sides[2 * pair], sides[2 * pair + 1])


def note_pair(work: Work, name: str, sender: Mapping[str, Any], receiver: Mapping[str, Any]) -> None:
    """The figures of a setting of the allocator."""
    work.found.right(f"{name}: GPUs of the two by UUID that differ", sender["place"] != receiver["place"], 0)
    refused = "; ".join(f"{side}: {said['refused']}" for side, said in
                        (("sender", sender), ("receiver", receiver)) if said["refused"])  # fmt: skip
    work.found.right(f"{name}: refused", bool(refused), 0, note=refused)
    if refused:
        return
    work.found.right(f"{name}: of {receiver['tensors']} tensors arrived as others", receiver["others"], 0)
    busy = "the GPU was busy until then" if sender["busy"] else "the GPU was idle already: this shows nothing"
    work.found.right(f"{name}: bytes read before they were written", receiver["early"], 0, note=busy)
    rate = sender["bytes"] / 1e9 / sender["seconds"]
    work.found.note(f"{name}: packed, checked and copied", rate, "GB/s", note=f"{sender['bytes'] / 1e9:.3g} GB")


def side(store: dist.TCPStore, rank: int, *, device: str, tensors: int, numbers: int) -> Numbers:
    """One process of a pair: ranks 0 and 1 are the first, 2 and 3 the second, which waits until the first is done.

    Returns:
        `place`: the GPU by its UUID; `refused`: why its memory could not be shared, or ""; and what `_sent` or
        `_received` say.
    """
    pair, own = divmod(rank, 2)
    if pair:
        store.wait([f"done/{2 * pair - 2}", f"done/{2 * pair - 1}"])
    try:
        return _met(store, pair, own, torch.device(device), lambda version: _weights(device, version, tensors, numbers))
    finally:
        store.set(f"done/{rank}", "")


def _met(
    store: dist.TCPStore, pair: int, own: int, device: torch.device, weights: Callable[[int], list[tuple[str, Tensor]]]
) -> Numbers:
    found: Numbers = {"refused": "", "place": (CudaMemory if device.type == "cuda" else FileMemory)(device).place}
    try:
        address = GroupAddress(LOOPBACK, store.port, pair + 1, 2, PEER_LIMIT_S, "ipc", num_senders=1)
        group = WeightGroup(address, own, device, store)
        try:
            signals = dist.PrefixStore(f"pair/{pair}", store)
            return found | (_sent if own == SENDER else _received)(group, signals, weights)
        finally:
            group.close()
    except WeightSyncError as error:
        return found | {"refused": str(error)}


def _sent(group: WeightGroup, signals: Any, weights: Callable[[int], list[tuple[str, Tensor]]]) -> Numbers:
    """Send all versions, then bytes that are not written yet.

    Returns:
        `bytes` of a version, the median of its `seconds`, and whether the GPU was `busy` at the end.
    """
    times = []
    for version in range(SYNCS):
        made = weights(version)
        _synchronize(group.device)
        signals.wait([f"ready/{version}"])
        started = time.perf_counter()
        send(group, made, version=version, bucket_bytes=TENSORS_IN_A_BUCKET * made[0][1].nbytes)
        times.append(time.perf_counter() - started)
    late = torch.zeros(BYTES, dtype=torch.uint8, device=group.device)
    written = _busy(group.device)
    late.fill_(WRITTEN)
    under_way = group.broadcast(late)
    busy = written is not None and not written.query()
    group.wait(under_way)
    return {"bytes": sum(t.nbytes for _, t in made), "seconds": sorted(times[1:])[(SYNCS - 1) // 2], "busy": busy}


def _received(group: WeightGroup, signals: Any, weights: Callable[[int], list[tuple[str, Tensor]]]) -> Numbers:
    """Receive what `_sent` sends.

    Returns:
        How many `tensors` came, how many of them as `others`, and how many bytes were read too `early`.
    """
    others = count = 0
    for version in range(SYNCS):
        expected, loaded = dict(weights(version)), dict[str, Tensor]()
        _synchronize(group.device)
        signals.set(f"ready/{version}", "")
        receipt = receive(group, version=version, load=partial(_keep, loaded))
        if receipt.fault:
            raise WeightSyncError(receipt.fault)
        count += len(loaded)
        others += len(expected.keys() ^ loaded.keys())
        others += sum(not torch.equal(tensor, expected[name]) for name, tensor in loaded.items() if name in expected)
    late = torch.empty(BYTES, dtype=torch.uint8, device=group.device)
    group.wait(group.broadcast(late))
    return {"tensors": count, "others": others, "early": int((late != WRITTEN).sum())}


def _keep(loaded: dict[str, Tensor], part: list[tuple[str, Tensor]]) -> None:
    """Copy tensors out of a bucket, whose memory goes on to the next one."""
    loaded.update((name, tensor.clone()) for name, tensor in part)


def _busy(device: torch.device) -> torch.cuda.Event | None:
    """Give a GPU work for a while; returns the event behind it."""
    if device.type == "cpu":
        return None
    matrix = torch.randn(ROWS, ROWS, device=device, dtype=torch.bfloat16)
    matrix @ matrix  # the first product loads its kernel
    torch.cuda.synchronize()
    for _ in range(PRODUCTS):
        matrix @ matrix
    event = torch.cuda.Event()
    event.record()
    return event


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _weights(device: str, version: int, tensors: int, numbers: int) -> list[tuple[str, Tensor]]:
    """Tensors that both processes draw alike; their sizes differ, so that they need gaps in a bucket."""
    generator = torch.Generator(device).manual_seed(version)
    options: Numbers = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    return [(f"tensor {i}", torch.randn(numbers - i, **options)) for i in range(tensors)]
