"""The transports on real processes: an actor of two FSDP2 ranks, and vLLM engines that generate with its weights."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import ray
import torch

from grpo_dist.config.schema_roles import CheckpointEngineConfig
from grpo_dist.engines.settings import RankSettings
from grpo_dist.engines.weights.buckets import unpack
from grpo_dist.errors import EngineError, GrpoDistError, WeightSyncError, WorkerError
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.workers.actor import ActorWorker
from grpo_dist.workers.gang import Gang
from grpo_dist.workers.rollout import RolloutGroup, RolloutWorker
from grpo_dist.workers.weight_transport import BroadcastTransport, ObjectStoreTransport, outcomes
from tests.engines.vllm import real
from tests.messages import refuses, says
from tests.processes import open_to_others, spawned, start_together
from tests.worker_settings import engine_settings, model_settings, policy_settings

pytestmark = [pytest.mark.ray, pytest.mark.deep]

BUCKET_BYTES = 20_000
TIMEOUT_S = 20.0
VERSIONS = itertools.count(1_000_000)  # of engines that other tests use too


def actor_class() -> type:
    """An actor whose weights and broadcasts can be spoiled; Ray sends it by value."""

    class Actor(ActorWorker):
        def perturb(self, seed: int, share: float = 1.0, only: str = "", size: float = 0.025) -> None:
            """Change this share of the weights with this in their names."""
            torch.manual_seed(100 * seed + self.rank)
            with torch.no_grad():
                for name, parameter in self.engine.model.named_parameters():
                    if only in name:
                        shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                        shard += (torch.rand_like(shard) < share) * size * torch.randn_like(shard)

        def damage(self, bucket: int) -> None:
            """Flip a bit of that bucket of the next sync, after its checksum was taken."""
            group, count = self._weight_group, iter(range(1000))
            broadcast = type(group).broadcast

            def run(data: torch.Tensor) -> Any:
                if next(count) == bucket:
                    data[len(data) // 3] ^= 16
                return broadcast(group, data)

            group.broadcast = run

    return Actor


def exported(actor: WorkerGroup, method: str, *arguments: str) -> dict[str, torch.Tensor]:
    """The actor's weights, as a method of its ranks gives them."""
    buckets = ray.get(actor.call_all("test", method, *arguments)[0])
    return {name: tensor.clone() for bucket in buckets for name, tensor in unpack(bucket.data, bucket.entries)}


def trained_model(path: str, actor: WorkerGroup, method: str, *arguments: str) -> Any:
    """Hugging Face's model with these weights."""
    model, sent = real.of_folder(path), exported(actor, method, *arguments)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(sent.pop(name))
    assert not sent
    return model


@dataclass
class Case:
    """An actor and two engines with the same model."""

    name: str
    path: str
    actor: WorkerGroup
    rollout: WorkerGroup
    transport: BroadcastTransport
    version: int = -1

    def sync(self, dtype: str = "float32") -> RolloutGroup:
        self.version += 1
        rollout = RolloutGroup(self.rollout)
        run(rollout.sync_weights(self.actor, self.transport, version=self.version, dtype=dtype))
        return rollout

    def expected(self, dtype: str = "float32") -> list[list[int]]:
        """What Hugging Face answers with the actor's weights, rounded to `dtype` on the way."""
        return real.hf_answers(trained_model(self.path, self.actor, "export_weights", dtype))

    def answers(self, rank: int) -> list[list[int]]:
        found = real.generate(self.rollout, rank, real.PROMPTS, real.GREEDY)
        assert set(found["weight_version"].tolist()) == {self.version}
        return real.tokens(found)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("tied", 1, "broadcast"), id="tied"),
        pytest.param(("untied", 1, "broadcast"), id="untied", marks=pytest.mark.long),
        pytest.param(("tied", 2, "broadcast"), id="tensor parallel", marks=pytest.mark.long),
        pytest.param(("tied", 1, "ipc"), id="ipc"),
        pytest.param(("tied", 2, "ipc"), id="ipc, tensor parallel", marks=pytest.mark.long),
    ],
)
def case(request: pytest.FixtureRequest, local_ray: None, random_models: dict[str, str]) -> Iterator[Case]:
    name, size, backend = request.param
    path = random_models[name]
    with (
        spawned("actor", actor_class(), [(0, 2), (1, 2)]) as actor,
        spawned("rollout", RolloutWorker, [(), ()], env={"OMP_NUM_THREADS": "1"}) as rollout,
    ):
        engines = [engine_settings(path, seed=rank, tensor_model_parallel_size=size) for rank in range(2)]
        start_together(Gang(actor).start(actor_settings(path)), RolloutGroup(rollout).start(engines))
        yield Case(name, path, actor, rollout, BroadcastTransport(size, TIMEOUT_S, backend))


def actor_settings(path: str) -> RankSettings:
    return policy_settings(model_settings(path), weight_bucket_bytes=BUCKET_BYTES)


def test_all_engines_generate_with_the_actors_weights(case: Case, rollouts: WorkerGroup) -> None:
    """And so does an engine that got the same weights through the object store."""
    seen = [case.answers(0)]
    for step, dtype in enumerate(("float32", "bfloat16", "float32")):
        case.actor.call_all("test", "perturb", step)
        case.sync(dtype)
        assert len(case.actor.call_all("test", "export_weights", dtype)[0]) > 2, "smaller than the model"
        expected = case.expected(dtype)
        assert [case.answers(rank) for rank in (0, 1)] == [expected] * 2, (step, dtype)
        assert expected not in seen, "the change does not show"
        seen.append(expected)
    assert case.transport.generation == 1, "one group for all syncs"
    rank, version = real.RANKS[case.name], next(VERSIONS)
    through_store = run(ObjectStoreTransport().sync(case.actor, rollouts, [rank], version=version, dtype="float32"))
    assert through_store == {rank: version}
    assert real.greedy(rollouts, rank) == seen[-1]


def test_nothing_listens_for_other_machines(case: Case) -> None:
    """Ray, the ranks of two process groups and the engines, while the weight group stands."""
    case.sync()
    sender = psutil.Process(case.actor.addresses[0].pid)
    ports = [c.laddr.port for c in sender.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert len(ports) > 3, "Ray's, those of two stores and gloo's"
    assert open_to_others(psutil.Process()) == {}


def spoiled_sync(case: Case, bucket: int, version: int) -> dict[int, Any]:
    """What the engines say to a sync with a damaged bucket, in one attempt; a group carries each version once."""
    case.actor.call_all("test", "perturb", 10 + bucket)
    case.actor.call(0, "test", "damage", bucket)
    calls = [case.rollout.submit(rank, "test", "receive_weights", version) for rank in range(2)]
    case.actor.call_all("test", "broadcast_weights", "float32", version)
    return run(outcomes(dict(enumerate(calls))))


def test_a_damaged_bucket_is_refused_or_leaves_mixed_weights_and_costs_a_second_attempt(case: Case) -> None:
    """Before the first bucket the old weights stay in force; behind it they are mixed, until a whole sync has come."""
    case.sync()
    before, first, second = case.answers(0), case.version + 1, case.version + 2
    for error in spoiled_sync(case, 0, first).values():
        assert isinstance(error, WeightSyncError)
        says(error, f"version {first}", "bucket 0", f"keeps version {case.version}")
    assert [case.answers(rank) for rank in (0, 1)] == [before] * 2

    mixed = ("mixed", f"versions {case.version} and {second}")
    for error in spoiled_sync(case, 2, second).values():
        assert isinstance(error, WeightSyncError)
        says(error, "bucket 2", "2 weight buckets", *mixed)
    with refuses(EngineError, *mixed):
        real.generate(case.rollout, 1, real.PROMPTS, real.GREEDY)
    case.version = second
    case.sync()
    assert [case.answers(rank) for rank in (0, 1)] == [case.expected()] * 2

    groups = case.transport.generation
    case.actor.call(0, "test", "damage", 1)
    case.actor.call_all("test", "perturb", 30)
    case.sync()
    assert case.transport.generation == groups + 1
    assert [case.answers(rank) for rank in (0, 1)] == [case.expected()] * 2


def test_an_engine_that_dies_during_a_sync_does_not_take_the_other_along(case: Case) -> None:
    """The last test of the case: rank 0 is gone afterwards."""
    case.sync()
    case.actor.call_all("test", "perturb", 40)
    calls = {1: case.rollout.submit(1, "test", "receive_weights", case.version + 1)}
    time.sleep(0.5)  # it waits for the sender, and so does nobody on rank 0
    ray.kill(case.rollout.handles[0])
    started = time.monotonic()
    sends = case.actor.submit_all("test", "broadcast_weights", "float32", case.version + 1)
    sent = run(outcomes(dict(enumerate(sends))))
    assert isinstance(sent[0], WeightSyncError), "rank 0 sends"
    assert sent[1] is None, "the other rank only gathers, and is not held up"
    assert isinstance(run(outcomes(calls))[1], WeightSyncError)
    assert time.monotonic() - started < 2 * TIMEOUT_S
    groups, case.version = case.transport.generation, case.version + 1
    case.transport._members = []  # as after a failure of its own
    found = run(case.transport.sync(case.actor, case.rollout, [0, 1], version=case.version, dtype="float32"))
    assert isinstance(found[0], WorkerError), "its process died"
    assert found[1] == case.version
    assert case.transport.generation == groups + 1, "a group without it"
    assert case.answers(1) == case.expected()
    engines = case.sync()
    with refuses(GrpoDistError, "rollout worker 0", "died"):
        run(engines.started())


def test_engines_that_get_changes_only_hold_the_actors_weights_to_the_bit(
    local_ray: None, random_models: dict[str, str]
) -> None:
    """Rank 0 gets changes in all syncs, rank 1 misses one, rank 2 is as new as one that was replaced; 3 gets all."""
    path, seed = random_models["tied"], itertools.count()
    sends = CheckpointEngineConfig(backend="object_store", update_weights_bucket_megabytes=1, changes_only=True)
    changing = engine_settings(path, dtype="bfloat16", checkpoint_engine=sends)
    with (
        spawned("actor", actor_class(), [(0, 2), (1, 2)]) as actor,
        spawned("rollout", RolloutWorker, [()] * 4, env={"OMP_NUM_THREADS": "1"}) as rollout,
    ):
        plain = engine_settings(path, dtype="bfloat16")
        starts = [rollout.ask(rank, "start", "start", plain if rank == 3 else changing) for rank in (0, 1, 3)]
        start_together(Gang(actor).start(actor_settings(path)), *starts)
        changes, whole = ObjectStoreTransport(changes_only=True), ObjectStoreTransport()

        def sync(version: int, ranks: list[int]) -> float:
            actor.call_all("test", "perturb", next(seed), 0.01)
            found = run(changes.sync(actor, rollout, ranks, version=version, dtype="bfloat16"))
            found |= run(whole.sync(actor, rollout, [3], version=version, dtype="bfloat16"))
            assert found == dict.fromkeys([*ranks, 3], version)
            return changes.metrics["perf/sent_weights_share"]

        assert sync(0, [0, 1]) == 1
        assert all(0 < sync(version, [0, 1]) < 0.1 for version in range(1, 8))
        assert 0 < sync(8, [0]) < 0.1
        run(rollout.ask(2, "start", "start", changing))
        assert sync(9, [0, 1, 2]) == 1, "ranks 1 and 2 were sent all of it"
        assert 0 < sync(10, [0, 1, 2]) < 0.1
        answers = [real.generate(rollout, rank, real.PROMPTS, real.sampling()) for rank in range(4)]
        for name in ("responses", "rollout_log_probs"):
            assert all(torch.equal(answers[3][name].values, each[name].values) for each in answers), name
