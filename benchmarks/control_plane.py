"""What a step costs the driver, with workers that make up their answers.

The driver sees as many rollout workers as it is told; a few processes answer for all of them, since a machine holds
only so many. Everything on the driver's side is real: pump, handles, Ray's calls and object store, balancing.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.plan.placement import slots_of
from grpo_dist.protocol import DataProto, Mean, Ragged
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.runtime.event_loop import TimeLimits, run
from grpo_dist.runtime.group import DATA_STAYS_IN_STORE, WorkerGroup
from grpo_dist.runtime.resources import reserve
from grpo_dist.trainer.rollout.pump import RolloutPump
from grpo_dist.workers.actor import ActorGroup
from grpo_dist.workers.reward import RewardPool
from grpo_dist.workers.rollout import GroupRequest, RolloutGroup, RolloutWorker
from grpo_dist.workers.scorer import Task, on_last_token
from tests.engines.fakes import FakeRolloutEngine
from tests.worker_settings import objective_settings

N, PROMPT_LENGTH, LENGTHS = 8, 64, (32, 256)
PROCESSES = {"rollout": 4, "reward": 2, "actor": 1}
REWARD_WORKERS, ACTOR_RANKS = 64, 64
PROCESSOR = "driver's processor s"
LOOP = 200_000  # turns of the loop that a sample's processor time is compared with
OBJECTIVE = objective_settings()


class FakeRolloutWorker(RolloutWorker):
    """Answers at once with responses of one length."""

    def __init__(self) -> None:
        self.engine: Any = FakeRolloutEngine(growth=0)

    async def set_length(self, length: int) -> None:
        """Of the responses to come."""
        self.engine.length = length


class FakeReward:
    """Every response scores its position."""

    def score(
        self, batch: DataProtoRef, sizes: Sequence[int], tasks: Sequence[Task]
    ) -> tuple[tuple[list[tuple[Label, list[str]]], tuple, float], DataProto]:
        """Scores of some groups."""
        import torch

        started = time.monotonic()
        responses = batch.fetch(("responses",))["responses"]
        parts = []
        for end, size in zip(np.cumsum(sizes), sizes, strict=True):
            scores = torch.arange(size).float()
            rows = responses[np.arange(end - size, end)]
            columns: dict[str, Any] = {"score": scores, "token_level_scores": on_last_token(scores, rows)}
            parts.append(DataProto.from_dict(columns, {"failure": [""] * size}))
        found: list[tuple[Label, list[str]]] = [(Label.of(part), []) for part in parts]
        return (found, ([], 0), time.monotonic() - started), DataProto.concat(parts)


class FakeActor:
    """Takes its rows and does nothing with them."""

    def update(self, rows: DataProtoRef, *args: Any) -> tuple[tuple[list[dict[str, Any]], None], None]:
        """One mini-batch's metrics."""
        return ([{"actor/loss": Mean(float(len(rows)), 1)}], None), None


def measure(num_workers: int, samples: int, *, rounds: int = 1) -> list[dict[str, Any]]:
    """A step for each response length: the driver's processor and wall seconds, and its memory.

    Of several rounds, in which the lengths take turns, the one that took the driver least.
    """
    rollout = _spawn("rollout", FakeRolloutWorker, num_workers, max_concurrency=1000)
    reward, actor = _spawn("reward", FakeReward, REWARD_WORKERS), _spawn("actor", FakeActor, ACTOR_RANKS)
    group = RolloutGroup(rollout)
    pump = RolloutPump(group, RewardPool(reward), {}, reward_timeout_s=600.0)
    steps: dict[int, list[dict[str, float]]] = {length: [] for length in LENGTHS}
    loops = [loop_seconds()]
    for _ in range(rounds):
        for length, found in steps.items():
            rollout.call_all("set_length", "set_length", length)
            found.append(run(_step(pump, ActorGroup(actor), samples)))
            loops.append(loop_seconds())
    rows = []
    for length, found in steps.items():
        best = min(found, key=lambda step: step[PROCESSOR])
        ratio = min(loops) / (best[PROCESSOR] / samples)
        rows.append({"workers": num_workers, "response tokens": length, **best, "samples a loop": ratio})
    return rows


def loop_seconds() -> float:
    """Processor seconds of a loop in plain Python, the best of several: how fast the machine runs such code."""
    times = []
    for _ in range(5):
        started = time.process_time()
        table: dict[str, int] = {}
        for i in range(LOOP):
            table[f"key{i % 1000}"] = i
        times.append(time.process_time() - started)
    return min(times)


async def _step(pump: RolloutPump, actor: ActorGroup, samples: int) -> dict[str, float]:
    sampling = SamplingSettings(N, 1.0, 1.0, -1, max(LENGTHS), 0)
    prompt = np.arange(PROMPT_LENGTH, dtype=np.int32)
    task = Task("arithmetic", "579", {"index": 0}, [{"role": "user", "content": "123+456=?"}])
    requests = [GroupRequest(f"step1-prompt{i}", prompt, sampling, task) for i in range(samples // N)]
    wall, cpu, before = time.perf_counter(), time.process_time(), _resident_mib()
    job = pump.submit(requests)
    await job.finished()
    batch = DataProtoRef.concat(job.results())
    rollout_wall, rollout_cpu = time.perf_counter() - wall, time.process_time() - cpu
    mask = DataProtoRef.put(_advantages(batch))
    batch = batch.union(mask)
    await actor.update(batch, [np.arange(len(batch))], OBJECTIVE, 1)
    return {
        "rollout s": rollout_wall,
        PROCESSOR: rollout_cpu,
        "update s": time.perf_counter() - wall - rollout_wall,
        "driver MiB": _resident_mib(),
        "of that the step's": _resident_mib() - before,
        "groups/s": len(requests) / rollout_wall,
    }


def _advantages(batch: DataProtoRef) -> DataProto:
    """A column as the targets make it, put once for the whole batch."""
    import torch

    lengths = torch.as_tensor(batch["response_length"])
    values = torch.zeros(int(lengths.sum()), dtype=torch.float32)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return DataProto.from_dict({name: Ragged(values, offsets) for name in ("advantages", "old_log_probs")})


def _spawn(role: str, worker_class: type, size: int, **options: Any) -> WorkerGroup:
    """A group of `size` ranks, several of which share a process."""
    processes = PROCESSES[role]
    _, bundles = reserve(slots_of({role: [0] * processes}, {role: (0.01, 0.0)}))
    args: list[tuple[Any, ...]] = [()] * processes
    options |= {"limits": TimeLimits(600.0), "env": DATA_STAYS_IN_STORE}  # as in a run
    group = WorkerGroup.spawn(role, worker_class, bundles[role], args=args, **options)
    return WorkerGroup(role, [group.handles[rank % processes] for rank in range(size)], TimeLimits(600.0))


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20
