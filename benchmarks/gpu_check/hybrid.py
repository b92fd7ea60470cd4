"""Hybrid sharding over two GPUs: each holds a copy of the weights, and gradients are averaged between the copies."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import workload
from benchmarks.gpu_check.ranks import run_ranks
from benchmarks.gpu_check.work import Work
from grpo_dist.engines.rendezvous import init_process_group
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.sharded_tensors import local_shard
from grpo_dist.protocol import metric_values

RANKS = 2
# Sums of gradients are taken in another order: relative to the single rank's.
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
# What `nccl_timeout` is set to: neither gloo's default nor NCCL's, which the groups must not have.
TIMEOUT_S = 345
# Of the processes of one update.
LIMIT_S = 60.0


def hybrid_sharding(work: Work) -> None:
    """One update of two copies with half of the mini-batch each, against that of a single rank with all of it."""
    (alone,), ranks = _updates(work, 1), _updates(work, RANKS)
    losses = sum(rank["loss"] for rank in ranks)  # each is divided by counts of the whole mini-batch
    _compared(work, "loss", losses, alone["loss"])
    for number, rank in enumerate(ranks):
        _compared(work, f"gradient norm of rank {number}", rank["grad_norm"], alone["grad_norm"])
    work.found.right("copies whose weights differ", len({rank["weights"] for rank in ranks}) - 1, 0)
    axes = [f"{axis} {size}" for axis, size in ranks[0]["axes"].items()]
    work.found.right("axes that are others", axes != [f"replicate {RANKS}", "shard 1"], 0, note=", ".join(axes))
    limits = {limit for rank in ranks for limit in rank["limits"]}
    shown = f"{', '.join(f'{limit:g}' for limit in sorted(limits))} s; nccl_timeout={TIMEOUT_S}"
    work.found.right("groups whose timeout is not nccl_timeout", len(limits - {TIMEOUT_S}), 0, note=shown)


def _compared(work: Work, name: str, found: float, expected: float) -> None:
    shown = f"{found:.6g}; of a single rank {expected:.6g}"
    off = abs(found - expected) / abs(expected)
    work.found.right(f"{name}: difference, relative", off, TOLERANCE[work.compute], note=shown)


def _updates(work: Work, ranks: int) -> list[dict[str, Any]]:
    """What each of so many ranks finds, each on a GPU of its own."""
    environments: list[dict[str, str]] = [{} for _ in range(ranks)]
    if work.device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(ranks)))
        environments = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in visible.split(",")[:ranks]]
    sizes = work.scale.passes["2k"]
    arguments = {"model": str(work.model), "device": work.device, "ranks": ranks}
    arguments |= {"sizes": [sizes.groups, sizes.n, sizes.prompt, sizes.response]}
    arguments |= {"vocabulary": work.scale.model["vocab_size"], "tokens": sizes.tokens}
    return run_ranks("benchmarks.gpu_check.hybrid:update", environments, arguments, LIMIT_S)


def update(
    store: dist.TCPStore,
    rank: int,
    *,
    model: str,
    device: str,
    ranks: int,
    sizes: list[int],
    vocabulary: int,
    tokens: int,
) -> dict[str, Any]:
    """One update with this rank's share of the groups.

    Returns:
        The `loss` of these groups, the `grad_norm` of all, a digest of the `weights`, the sizes of the mesh's `axes`,
        and in seconds the `limits` of their groups.
    """
    init_process_group(device=device, rank=rank, world_size=ranks, store=store, timeout_s=TIMEOUT_S)
    engine = workload.engine(model, "shared", device, gradient_checkpointing=True, fsdp_size=1)
    groups, n, prompt, response = sizes
    data = workload.batch(groups, n, prompt, response, vocabulary)
    mine = data.index([row for row in range(len(data)) if row // n % ranks == rank])
    result = engine.train_mini_batch(mine, workload.OBJECTIVE, PassLimits("", len(mine), tokens))
    metrics = metric_values(result.metrics)
    found = {
        "loss": metrics["actor/loss"],
        "grad_norm": metrics["actor/grad_norm"],
        "weights": _digest(engine),
        **_mesh(engine, device),
    }
    dist.destroy_process_group()
    return found


def _digest(engine: FSDPEngine) -> str:
    """Of the weights that this rank holds."""
    digest = hashlib.sha256()
    for parameter in engine.model.parameters():
        digest.update(local_shard(parameter.detach()).cpu().numpy().tobytes())
    return digest.hexdigest()


def _mesh(engine: FSDPEngine, device: str) -> dict[str, Any]:
    mesh = next(engine.model.parameters()).device_mesh
    names = mesh.mesh_dim_names
    groups: list[Any] = [mesh.get_group(axis) for axis in names]
    limits = [group._get_backend(torch.device(device)).options._timeout.total_seconds() for group in groups]
    return {"axes": dict(zip(names, mesh.shape, strict=True)), "limits": limits}
