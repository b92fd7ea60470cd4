"""`trainer.max_staleness` on workers that take a known time: what overlaps, how old weights get, what is never lost."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_dist.algorithms.settings import ObjectiveSettings
from grpo_dist.engines.base import EngineLoad, Response
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.runtime.event_loop import run
from grpo_dist.trainer.checkpoint.folder import read_state
from grpo_dist.trainer.checkpoint.saver import find_resumed
from grpo_dist.trainer.trainer import GRPOTrainer
from grpo_dist.workers.reward import RewardWorker
from grpo_dist.workers.rollout import group_batch
from tests.messages import says
from tests.processes import spawned
from tests.trainer import fake_run
from tests.trainer.fake_run import Groups
from tests.trainer.fakes import FakeActorWorker, FakeRolloutWorker
from tests.trainer.recorded import history, shown_by

pytestmark = [pytest.mark.ray, pytest.mark.deep]
STEPS = 6


class SlowRolloutWorker(FakeRolloutWorker):
    """Each token of a group takes the same time, and knows the weights that sampled it."""

    seconds = 1.0

    async def set_seconds(self, seconds: float) -> None:
        self.seconds = seconds

    async def generate(self, uid: str, prompt: np.ndarray, sampling: SamplingSettings, task: object) -> Any:
        self.asked += ((uid, sampling),)
        versions = []
        for _ in range(self.length):
            await asyncio.sleep(self.seconds / self.length)
            versions.append(self.version)
        responses = [Response([5] * self.length, [-1.25] * self.length, False, versions)] * sampling.n
        data = group_batch(uid, prompt, responses)
        return (Label.of(data), EngineLoad(), []), data

    async def die(self) -> None:
        os._exit(1)


class SlowActorWorker(FakeActorWorker):
    seconds = 1.0

    def set_seconds(self, seconds: float) -> None:
        self.seconds = seconds

    def update(self, rows: DataProtoRef, mini_batches: list, objective: ObjectiveSettings, step: int) -> Any:
        time.sleep(self.seconds)
        return super().update(rows, mini_batches, objective, step)


@pytest.fixture(scope="module")
def groups(local_ray: None) -> Iterator[Groups]:
    with (
        spawned("actor", SlowActorWorker, [(0, 1)]) as actor,
        spawned("rollout", SlowRolloutWorker, [(), ()]) as rollout,
        spawned("reward", RewardWorker, [()]) as reward,
    ):
        yield {"actor": actor, "rollout": rollout, "reward": reward}


AHEAD = (
    *("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.use_kl_loss=false"),
    *("data.val_files=null", "trainer.val_before_train=false", "trainer.log_rollouts=false", "trainer.save_freq=-1"),
    f"trainer.total_training_steps={STEPS}",
)


def make_trainer(tmp_path: Path, groups: Groups, *overrides: str, seconds: float = 0.1) -> GRPOTrainer:
    """4 prompts x 4 responses a step, no reference, one optimizer step."""
    for role in ("actor", "rollout"):
        groups[role].call_all("test", "set_seconds", seconds)
    return fake_run.make_trainer(tmp_path, groups, *AHEAD, *overrides)


def trained_uids(groups: Groups) -> list[list[str]]:
    """The groups of each step, in order, that the actor was given."""
    updates = groups["actor"].call_all("test", "seen")[0]
    return [list(dict.fromkeys(mini_batches[0])) for mini_batches in updates]


def test_weights_are_never_older_than_allowed_and_prompts_train_in_the_same_steps(tmp_path: Path, groups: Groups):
    """Step s is opened when step s - 1 - k has trained, and none beyond the last one."""
    seen = []
    for staleness in (0, 1, 3):
        trainer = make_trainer(tmp_path, groups, f"trainer.max_staleness={staleness}")
        trainer.fit()
        assert (trainer.sampler.open, trainer.pump.tasks) == ({}, set()), "nothing is sampled in vain"
        assert [row["step"] for row in history(trainer)] == list(range(1, STEPS + 1))
        oldest = [row.get("staleness/max", 0) for row in history(trainer)]
        assert oldest[: staleness + 1] == list(range(staleness + 1)), "the first batches are sampled at once"
        assert max(oldest) == staleness
        seen.append(trained_uids(groups))
        shares = (history(trainer)[-1][f"staleness/share/{age}"] for age in range(staleness + 1))
        assert not staleness or sum(shares) == pytest.approx(1)
    assert seen[0] == seen[1] == seen[2]
    prompts = [uid for step in seen[0] for uid in step]
    assert len(set(prompts)) == 4 * STEPS
    order = [f"step{step + 1}-" for step in range(STEPS) for _ in range(4)]
    assert all(uid.startswith(step) for uid, step in zip(prompts, order, strict=True))


def test_a_run_that_was_ahead_resumes_with_the_same_prompts_and_finished_groups(tmp_path: Path, groups: Groups) -> None:
    """Stopped after step 3 while steps 4 to 6 were being sampled: what was there keeps tokens, scores and versions."""
    overrides = ("trainer.max_staleness=2", "trainer.save_freq=3")
    make_trainer(tmp_path, groups, *overrides).fit()
    whole = trained_uids(groups)
    folder = tmp_path / "run/global_step_3"
    state = read_state(folder)
    assert {step: len(drawn[0]) for step, drawn in state.ledger["open"].items()} == {"4": 4, "5": 4, "6": 4}
    there = [uid for each in state.finished for uid in each["rows"]]
    assert there, "step 4 at least was sampled during the updates before"
    assert all(uid.startswith(("step4-", "step5-", "step6-")) for uid in there)
    assert (folder / f"groups/{state.finished[0]['name']}.safetensors").is_file()
    groups["rollout"].call_all("test", "take_asked")
    names = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}")
    resumed = make_trainer(tmp_path, groups, *overrides, *names)
    assert resumed.saver.last == folder
    assert sorted(resumed.sampler.restored) == sorted(there)
    for uid, (group, score) in resumed.sampler.restored.items():
        data = group.fetch(group.columns)
        assert data["uid"].tolist() == [uid] * 4
        assert set(data["weight_versions"].values.tolist()) <= {1, 2, 3}, "sampled before the run stopped"
        assert group["last_weight_version"].tolist() == data["last_weight_version"].tolist()
        assert len(set(score["score"].tolist())) == 1
        assert score.fetch(("score",))["score"].tolist() == score["score"].tolist()
    resumed.fit()
    sampled = sum(map(len, groups["rollout"].call_all("test", "take_asked")))
    assert sampled == 3 * 4 - len(there), "the others are sampled again"
    assert history(resumed)[-1]["step"] == STEPS
    assert trained_uids(groups) == whole[3:]
    changed = make_trainer(tmp_path, groups, *overrides, *names, "actor_rollout_ref.rollout.temperature=0.5")
    temperature, groups_again = find_resumed(changed.config, changed.data.identity).changes  # type: ignore[union-attr]
    assert temperature == "actor_rollout_ref.rollout.temperature: 1.0 -> 0.5"
    says(groups_again, str(len(there)), "groups", "again")
    assert changed.sampler.restored == {}, "at another temperature they are not what would be sampled"


async def begin_to_sample(trainer: GRPOTrainer) -> None:
    trainer.sampler.open_steps(1, 1)
    while not any(member.taken for member in trainer.roles.rollout.members):
        await asyncio.sleep(0)


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_rollout_worker_killed_while_it_generates_costs_no_prompt(tmp_path: Path, groups: Groups, staleness: int):
    with spawned("rollout", SlowRolloutWorker, [(), ()]) as rollout:
        mortal = groups | {"rollout": rollout}
        trainer = make_trainer(tmp_path, mortal, f"trainer.max_staleness={staleness}", seconds=0.5)
        shown = shown_by(trainer)
        trainer.sync_weights()
        run(begin_to_sample(trainer))
        rollout.tell(0, "die")
        trainer.weight_version -= 1  # `fit` begins with a sync of its own
        trainer.fit()
        trained = trained_uids(mortal)
        assert len({uid for step in trained for uid in step}) == sum(map(len, trained)) == 4 * STEPS == 4 * len(trained)
        assert history(trainer)[-1]["training/worker_restarts"] == 1
        assert [text for text in shown if "replaced a worker" in text and "rollout worker 0" in text]
