"""The processes of a run, started as a run starts them: weight sync, generation, and an engine that is killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from typing import TYPE_CHECKING

from benchmarks.gpu_check.gpu import gpu_facts, used_gib
from benchmarks.gpu_check.work import Work

if TYPE_CHECKING:
    from grpo_dist.config.schema import RunConfig
    from grpo_dist.workers.roles import Roles

# How long the kernel and the driver may take to clear up after a process.
FREED_S = 30.0
# Of the engine's share of the GPU: what is freed at least when it is gone.
LEAST_FREED = 0.8
ROUNDS = 3
# One for the actor, one for the engine.
TWO_GPUS = ("cluster=node8", "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.use_kl_loss=false")
OURS = "our rollout group: tokens"


def roles(work: Work) -> None:
    """All roles on one GPU: sync, tokens per second, then kill -9 of the engine."""
    with _started(work, run_config(work)) as (config, started):
        _sync(work, config, started)
        _generate(work, started)
        _kill_engine(work, config, started)


def broadcast(work: Work) -> None:
    """Weight sync where actor and engine have a GPU each: NCCL."""
    with _started(work, run_config(work, TWO_GPUS)) as (config, started):
        _sync(work, config, started)


def run_config(work: Work, cluster: Sequence[str] = ()) -> RunConfig:
    """The config of a run that samples as the scale says, by default on this one GPU."""
    from grpo_dist.plan.commands import load_config

    sizes = work.scale.rollout
    overrides = [
        *(cluster or ["cluster=single_gpu" if work.device == "cuda" else "cluster=cpu"]),
        f"actor_rollout_ref.model.path={work.model}",
        f"actor_rollout_ref.rollout.n={sizes.n}",
        f"data.max_prompt_length={sizes.prompt}",
        f"data.max_response_length={sizes.response}",
        f"data.train_batch_size={sizes.groups}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={sizes.groups}",
    ]
    return load_config(overrides)[0]


@contextmanager
def _started(work: Work, config: RunConfig) -> Iterator[tuple[RunConfig, Roles]]:
    """The roles of a run on a Ray of their own, ended behind the block."""
    from grpo_dist.runtime.cluster import prepare

    address = prepare("local")  # before Ray is imported
    import ray

    from grpo_dist.plan.plan import make_plan
    from grpo_dist.run.build import spawn_roles, start_roles
    from grpo_dist.runtime.nodes import connect

    connect(address, None)
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        plan = make_plan(config, 1)
        ready = spawn_roles(plan, stack)
        start_roles(plan, ready)
        work.found.note("from the first process to all roles ready", time.perf_counter() - started, "s")
        yield config, ready


def _sync(work: Work, config: RunConfig, started: Roles) -> None:
    from benchmarks.gpu_check.weights import num_bytes
    from grpo_dist.plan.plan import make_plan
    from grpo_dist.runtime.event_loop import run
    from grpo_dist.workers.weight_transport import weight_transport

    plan = make_plan(config)
    settings = plan.engine(0)
    way = weight_transport(
        plan.transport,
        workers_per_engine=plan.place.tensor_parallel,
        collective_timeout_s=config.actor_rollout_ref.nccl_timeout,
    )
    actor, times = started.actor.workers, []
    for version in range(ROUNDS + 1):  # the first one warms up
        begun = time.perf_counter()
        run(started.rollout.sync_weights(actor, way, version=version, dtype=settings.dtype))
        times.append(time.perf_counter() - begun)
    seconds = sorted(times[1:])[ROUNDS // 2]
    size = num_bytes(work.model) * (2 if settings.dtype == "float32" else 1)  # its files are bfloat16
    name = f"weight sync, {plan.transport}, {settings.dtype}"
    work.found.note(name, seconds, "s", note=f"{size / 1e9:.3g} GB")
    work.found.note(name, size / 1e9 / seconds, "GB/s")


def _generate(work: Work, started: Roles) -> None:
    from benchmarks.throughput import Load, runs_of

    load = Load(*astuple(work.scale.rollout))
    run = runs_of(started.rollout, load)
    run()
    seconds = min(run() for _ in range(ROUNDS))
    work.found.note(OURS, load.tokens / seconds, "/s")


def _kill_engine(work: Work, config: RunConfig, started: Roles) -> None:
    """SIGKILL the rollout worker, and see what its processes and the GPU's memory do."""
    import psutil

    process = psutil.Process(started.rollout.workers.call(0, "report", "address").pid)
    family = [process, *process.children(recursive=True)]
    before, begun = used_gib(), time.perf_counter()
    process.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(family, timeout=FREED_S)
    work.found.right(f"of {len(family)} processes of a killed engine still there", len(left), 0)
    work.found.note("until they are gone", time.perf_counter() - begun, "s")
    if before is None:
        work.found.missing("GPU memory freed", "nvidia-smi does not say" if work.device == "cuda" else "on a GPU only")
        return
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization * float(gpu_facts()["gpu_mib"]) / 1024
    deadline = time.perf_counter() + FREED_S
    while True:
        freed = before - (used_gib() or 0.0)
        if freed >= LEAST_FREED * share or time.perf_counter() > deadline:
            break
        time.sleep(0.2)
    work.found.at_least("GPU memory freed, of the engine's share", freed / share, LEAST_FREED)
    work.found.note("until it is freed", time.perf_counter() - begun, "s")
