"""`trainer.stream_mini_batches` in the loop: what trains before what, and that results are those without it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from grpo_dist.engines.base import EngineLoad, Response
from grpo_dist.errors import WeightsLost
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.placement import placement
from grpo_dist.plan.roles import ROLES
from grpo_dist.protocol import DataProto
from grpo_dist.roles.gang import ActorGroup
from grpo_dist.roles.policy import ActorWorker
from grpo_dist.roles.rollout import SMALL_COLUMNS, group_batch
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.trainer.settings import rank_settings
from grpo_dist.trainer.trainer import GRPOTrainer
from tests.processes import spawned
from tests.trainer.fake_run import make_trainer
from tests.trainer.fakes import FakeRolloutWorker, HeldRolloutWorker
from tests.trainer.metrics_page import PAGE, undocumented
from tests.trainer.recorded import history

pytestmark = [pytest.mark.ray, pytest.mark.deep]
STREAM = "trainer.stream_mini_batches=true"
CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode=true"
PLAIN = (
    "data.val_files=null",
    "trainer.val_before_train=false",
    "trainer.log_rollouts=false",
    "trainer.export_hf_model=false",
)


class LastIsHeld(HeldRolloutWorker):
    """The last of a step's four groups is held."""

    def is_held(self, uid: str) -> bool:
        return sum(line.startswith(f"asked {uid.partition('-')[0]}-") for line in self.log) == 4

    async def die(self) -> None:
        os._exit(1)


class Sampler(FakeRolloutWorker):
    """Samples other tokens for each prompt and response, with other log-probs; response i is longer by i."""

    async def generate(
        self, uid: str, prompt: np.ndarray, sampling: Any, task: object
    ) -> tuple[tuple[Label, EngineLoad, list], DataProto]:
        random = np.random.default_rng(int(hashlib.md5(uid.encode()).hexdigest()[:8], 16))
        responses = []
        for length in random.integers(4, 12, sampling.n):
            tokens, log_probs = random.integers(3, 12, length), -3 * random.random(length)
            responses.append(Response(tokens.tolist(), log_probs.tolist(), False, [self.version] * int(length)))
        data = group_batch(uid, prompt, responses)
        return (Label.of(data, SMALL_COLUMNS), EngineLoad(), []), data


@pytest.fixture
def held(groups: dict[str, WorkerGroup]) -> Iterator[dict[str, WorkerGroup]]:
    with spawned("rollout", LastIsHeld, [()]) as rollout:
        yield groups | {"rollout": rollout}


def after_each_update(trainer: GRPOTrainer, what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have something done once the actor has trained on a part of the batch."""
    update = trainer.update

    def then(batch: DataProtoRef) -> DataProtoRef:
        trained = update(batch)
        what()
        return trained

    monkeypatch.setattr(trainer, "update", then)


@pytest.mark.timeout(120)
def test_the_first_mini_batch_trains_while_the_last_group_is_sampled(
    tmp_path: Path, held: dict[str, WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group ends only after that update: without streaming nobody would go on."""
    trainer = make_trainer(tmp_path, held, *PLAIN, STREAM)
    after_each_update(trainer, lambda: held["rollout"].call_all("test", "release"), monkeypatch)
    trainer.fit()
    by_rank = zip(*held["actor"].call_all("test", "seen"), strict=True)
    updates = [{uid for mini_batches in ranks for uid in mini_batches[0]} for ranks in by_rank]
    assert [len(uids) for uids in updates] == [2] * 6
    assert [len(first | second) for first, second in zip(updates[::2], updates[1::2], strict=True)] == [4] * 3
    rows = history(trainer)
    assert [row["training/weight_version"] for row in rows] == [1, 2, 3]
    assert [row["staleness/mini_batches/mean"] for row in rows] == [0.5] * 3, "none for one half, one for the other"
    assert {row["staleness/mini_batches/max"] for row in rows} == {1}
    assert all({"mismatch/old_weights", "mismatch/rest"} <= row.keys() for row in rows)
    assert undocumented({name for row in rows for name in row} - {"step"}, PAGE.read_text()) == []


@pytest.mark.timeout(120)
def test_an_engine_lost_within_a_step_ends_the_wait_for_its_groups(
    tmp_path: Path, held: dict[str, WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor does not hold the weights any more that another one would need."""
    trainer = make_trainer(tmp_path, held, *PLAIN, STREAM)
    after_each_update(trainer, lambda: held["rollout"].tell(0, "die"), monkeypatch)
    with pytest.raises(WeightsLost):
        trainer.fit()
    assert trainer.preemption.held, "nothing may be saved now"


TIMED = ("timing_s/", "perf/", "staleness/")
SINCE_THE_START = ("health/", "training/worker_restarts")


def comparable(rows: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if not name.startswith(TIMED + SINCE_THE_START)} for row in rows
    ]


class RealActor(ActorWorker):
    """Has nothing of a run before to forget."""

    def forget(self) -> None: ...


REAL = (
    *PLAIN,
    BYPASS,
    "actor_rollout_ref.actor.use_kl_loss=false",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "trainer.max_actor_ckpt_to_keep=null",
    "trainer.save_freq=1",
)


@dataclass
class Lab:
    """A real actor, and engines that sample the same for a prompt whoever trains; every run has one beginning."""

    groups: dict[str, WorkerGroup]
    start: str

    def train(self, folder: Path, *overrides: str) -> tuple[list[dict[str, float]], np.ndarray]:
        """Metrics and last weights of a run of three steps of two mini-batches each."""
        run(ActorGroup(self.groups["actor"]).load_checkpoint(self.start))
        trainer = make_trainer(folder, self.groups, *REAL, *overrides)
        trainer.fit()
        buckets = ray.get(trainer.roles.actor.workers.call_all("test", "export_weights", "float32")[0])
        return comparable(history(trainer)), np.concatenate([bucket.data for bucket in buckets])


@pytest.fixture(scope="module")
def lab(groups: dict[str, WorkerGroup], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    start = str(tmp_path_factory.mktemp("lab") / "start")
    config, _ = load_config(["actor_rollout_ref.rollout.n=4", *REAL, "actor_rollout_ref.actor.ppo_mini_batch_size=2"])
    with spawned("rollout", Sampler, [()]) as rollout, spawned("actor", RealActor, [(0, 1)]) as workers:
        actor = ActorGroup(workers)
        run(actor.start(rank_settings(config, ROLES["actor"], placement(config), 3)))
        run(actor.begin_save(start))
        run(actor.finished_save(wait=True))
        yield Lab(groups | {"actor": workers, "rollout": rollout}, start)


@pytest.mark.timeout(240)
def test_with_the_samplers_log_probs_as_the_old_ones_results_are_the_same_bit_for_bit(tmp_path: Path, lab: Lab) -> None:
    """A step's samples do not depend on when its mini-batches train. So do those of a run that is taken up again."""
    (off, weights), (on, streamed) = lab.train(tmp_path / "off"), lab.train(tmp_path / "on", STREAM)
    assert on == off, "also what is merged of several parts"
    assert {"actor/loss", "actor/lr", "actor/grad_norm", "critic/advantages/max", "critic/score/mean"} <= on[0].keys()
    assert np.array_equal(weights, streamed)
    folder = f"trainer.resume_from_path={tmp_path}/on/run/global_step_1"
    rest, resumed = lab.train(tmp_path / "on", STREAM, "trainer.resume_mode=resume_path", folder)
    assert rest == on[1:]
    assert np.array_equal(streamed, resumed)


ALSO = {
    "kl in the reward": ["algorithm.use_kl_in_reward=true"],
    "rejected tokens": [f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.5_2.0"],
    "sampled ahead": ["trainer.max_staleness=1"],
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("also", ALSO.values(), ids=ALSO)
def test_so_are_they_beside_what_else_changes_the_targets(tmp_path: Path, lab: Lab, also: list[str]) -> None:
    (off, weights), (on, streamed) = lab.train(tmp_path / "off", *also), lab.train(tmp_path / "on", STREAM, *also)
    assert on == off
    assert np.array_equal(weights, streamed)
