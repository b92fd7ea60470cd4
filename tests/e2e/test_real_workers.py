"""The trainer on real workers: bit for bit that of a loop without concurrency, also where workers are killed."""

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import HealthError
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.plan import Plan, make_plan
from grpo_dist.protocol import metric_values
from grpo_dist.run.build import spawn_roles, start_roles
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.event_loop import run
from grpo_dist.trainer.rollout.job import group_seed
from grpo_dist.trainer.rollout.pump import PASSES
from grpo_dist.trainer.run_prompts import load_run_prompts
from grpo_dist.trainer.trainer import GRPOTrainer
from grpo_dist.workers.roles import Roles
from grpo_dist.workers.scorer import Task
from grpo_dist.workers.weight_transport import ObjectStoreTransport
from tests.e2e.runs import PLAIN, sized
from tests.messages import refuses
from tests.models import builtin_reward_model, policy_folder
from tests.trainer.recorded import history, recorded_trainer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.deep, pytest.mark.timeout(900)]

STEPS = 2
CONFIG = (
    *(*sized(8, n=4), *PLAIN, "trainer.val_before_train=false", "trainer.log_rollouts=false"),
    *("actor_rollout_ref.rollout.temperature=0.7", "actor_rollout_ref.actor.optim.lr=1e-3"),
    *("cluster.rollout_world_size=2", f"trainer.total_training_steps={STEPS}"),
    *("reward_model.enable=true", "reward_model.micro_batch_size_per_gpu=8"),
    "custom_reward_function.path=grpo_dist.rewards.weighted",
    "custom_reward_function.reward_kwargs={functions: [{path: null, label: rule}, "
    "{path: grpo_dist.rewards.reward_model, weight: 0.1}]}",
)


@dataclass
class Lab:
    """Started roles, and where every run begins. Engines only take newer weights: versions go on from run to run."""

    plan: Plan[RunConfig]
    roles: Roles
    start: str
    version: int = -1

    def weights(self) -> np.ndarray:
        buckets = ray.get(self.roles.actor.workers.call_all("test", "export_weights", "float32")[0])
        return np.concatenate([bucket.data for bucket in buckets])

    def train(self, prepare: Callable[[GRPOTrainer], None] = lambda trainer: None) -> GRPOTrainer:
        run(self.roles.actor.load_checkpoint(self.start))
        prompts, _ = load_run_prompts(self.plan.config, policy_folder(self.plan.config))
        trainer = recorded_trainer(self.plan, self.roles, prompts)
        trainer.weight_version = self.version
        prepare(trainer)
        trainer.fit()
        self.version = trainer.weight_version
        return trainer

    def train_as(self, folder: Path, *overrides: str) -> GRPOTrainer:
        """A run by other settings, with the same reward model."""
        scorer = f"reward_model.model.path={self.plan.config.reward_model.model.path}"
        config, _ = load_config([*overrides, scorer, f"trainer.default_local_dir={folder}"])
        trainer = replace(self, plan=make_plan(config, STEPS)).train()
        self.version = trainer.weight_version
        return trainer

    def save(self, folder: Path) -> None:
        run(self.roles.actor.begin_save(str(folder)))
        run(self.roles.actor.finished_save(wait=True))


@pytest.fixture(scope="module")
def lab(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    scorer = builtin_reward_model(folder / "scorer")
    config, _ = load_config([*CONFIG, f"reward_model.model.path={scorer}", f"trainer.default_local_dir={folder}"])
    with ExitStack() as stack:
        plan = make_plan(config, STEPS)
        roles = spawn_roles(plan, stack)
        start_roles(plan, roles)
        made = Lab(plan, roles, str(folder / "start"))
        made.save(folder / "start")
        yield made


@pytest.fixture(scope="module")
def undisturbed(lab: Lab) -> tuple[list[dict[str, float]], np.ndarray]:
    """Metrics and last weights of a run in which nothing happened."""
    trainer = lab.train()
    return history(trainer), lab.weights()


def plain_loop(lab: Lab) -> list[dict[str, float]]:
    """One prompt after the other on one engine, then its score, then the log-probs, the update, the sync."""
    config, roles, rows = lab.plan.config, lab.roles, []
    actor, transport = roles.actor.workers, ObjectStoreTransport()
    prompts, _ = load_run_prompts(config, policy_folder(config))
    for step in range(1, STEPS + 1):
        lab.version += 1
        run(roles.rollout.sync_weights(actor, transport, version=lab.version, dtype="float32"))
        drawn = [prompts.train[int(i)] for i in prompts.sampler.next_batch()]
        groups = scored(lab, [sample(lab, prompt, step) for prompt in drawn], drawn)
        batch = DataProtoRef.concat(groups).union(reference_log_probs(lab, groups))
        seed = group_seed(config.trainer.seed, step, -1)
        computed, metrics = run(roles.reward.compute_targets(batch, lab.plan.targets, 0.0, seed))
        batch = batch.replace(computed)
        _, update = run(roles.actor.update(batch, [np.arange(len(batch))], lab.plan.objective, step))
        scores = {"critic/score/mean": float(batch["score"].mean())}
        rows.append(metrics | scores | metric_values(update))
    return rows


def reference_log_probs(lab: Lab, groups: Sequence[DataProtoRef]) -> DataProtoRef:
    """In the passes that a run makes."""
    computed = []
    for part in np.array_split(np.arange(len(groups)), PASSES):
        batch = DataProtoRef.concat([groups[i] for i in part])
        computed.append(run(lab.roles.reference.compute_log_probs("ref", batch)))
    return DataProtoRef.concat(computed)


def sample(lab: Lab, prompt: Any, step: int) -> DataProtoRef:
    index = prompt.prompt.index
    sampling = replace(lab.plan.sampling, seed=group_seed(lab.plan.config.trainer.seed, step, index))
    asked = f"step{step}-prompt{index}", prompt.token_ids, sampling, task_of(prompt)
    workers = lab.roles.rollout.workers
    call = workers.submit_for_data(1, "generate", "generate", *asked)
    label, *_ = workers.gather([call])[0]
    return call.handle(label)


def task_of(prompt: Any) -> Task:
    source = prompt.prompt
    return Task(source.data_source, source.ground_truth, source.extra_info, source.messages)


def scored(lab: Lab, groups: Sequence[DataProtoRef], prompts: Sequence[Any]) -> list[DataProtoRef]:
    """By the reward model, in the passes that a run makes, then by the reward function."""
    found = []
    for part in np.array_split(np.arange(len(groups)), PASSES):
        batch = DataProtoRef.concat([groups[i] for i in part])
        messages = {uid: prompts[i].prompt.messages for i in part for uid in groups[i]["uid"].tolist()}
        values = run(lab.roles.reward_model.score(batch, messages))
        for k, i in enumerate(part):
            own = {name: each.reshape(len(part), -1)[k] for name, each in values.items()}
            task = replace(task_of(prompts[i]), model_scores=own)
            inputs = groups[i].select(("responses", "response_mask"))
            scoring = lab.roles.reward.workers.submit_for_data(0, "score", "score", inputs, [len(inputs)], [task])
            [(label, failures)], *_ = lab.roles.reward.workers.gather([scoring])[0]
            assert not failures
            found.append(groups[i].union(scoring.handle(label)))
    return found


def test_at_staleness_0_the_trainer_is_the_plain_loop_bit_for_bit(lab: Lab, undisturbed: tuple) -> None:
    """At another temperature than 1, probabilities differ by far more where one of the roles leaves it out."""
    rows, weights = undisturbed
    assert rows[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6), "before its first step the policy is the reference"
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in rows), "engine and actor"
    run(lab.roles.actor.load_checkpoint(lab.start))
    before = lab.weights()
    plain = plain_loop(lab)
    assert (lab.weights() == weights).all()
    assert (before != weights).any(), "it has learned something"
    for expected, found in zip(plain, rows, strict=True):
        shared = {name: found[name] for name in expected if name in found}
        assert {"critic/score/mean", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm"} <= shared.keys()
        assert shared == {name: expected[name] for name in shared}


def test_engines_with_other_weights_than_the_trainer_are_noticed_before_the_first_update(
    lab: Lab, undisturbed: tuple[list[dict[str, float]], np.ndarray], tmp_path: Path
) -> None:
    """They get the weights of the start, and the trainer goes on with those after two steps; see `Lab.train`."""
    rows, _ = undisturbed
    assert rows[0]["training/agreement/mean"] < 1e-5
    assert rows[0]["training/agreement/of_limit"] < 1
    lab.save(tmp_path)
    last = lab.weights()

    def poison(trainer: GRPOTrainer) -> None:
        sync = trainer.sync_weights

        def sync_and_move_on() -> None:
            sync()
            lab.version = trainer.weight_version
            run(lab.roles.actor.load_checkpoint(str(tmp_path)))

        trainer.sync_weights = sync_and_move_on

    with refuses(HealthError, "health/agreement", "step 1", 0.0001, 0.005, "grpo-dist agreement", "worst") as caught:
        lab.train(poison)
    assert float(re.findall(r"differ by (\S+) nats", str(caught.value))[0]) > 0.01
    assert (lab.weights() == last).all(), "no step was taken"


def kill_engine(trainer: GRPOTrainer) -> None:
    """It has answered one group by then, which is scored after its death, and is at work on others."""
    workers = trainer.roles.rollout.workers
    value, process = workers.value, workers.call(0, "test", "address").pid

    async def then_kill(call: Call) -> Any:
        answer = await value(call)
        if call.stage == "generate" and call.rank == 0:
            workers.value = value
            os.kill(process, signal.SIGKILL)
        return answer

    workers.value = then_kill


def kill_reward_model(trainer: GRPOTrainer) -> None:
    """Its weights come from the folder again, and the pass is repeated."""
    workers = trainer.roles.reward_model.workers
    submit, process = workers.submit, workers.call(0, "test", "address").pid

    def then_kill(rank: int, stage: str, method: str, *args: Any) -> Call:
        call = submit(rank, stage, method, *args)
        if stage == "reward_model":
            workers.submit = submit
            os.kill(process, signal.SIGKILL)
        return call

    workers.submit = then_kill


# In a sync: test_layouts.py, and tests/workers/test_weight_transport.py.
@pytest.mark.parametrize(("prepare", "role"), [(kill_engine, "rollout"), (kill_reward_model, "reward_model")])
def test_one_that_is_killed_at_work_changes_nothing(
    lab: Lab, undisturbed: tuple, prepare: Callable[[GRPOTrainer], None], role: str
) -> None:
    rows, weights = undisturbed
    restarts = len(lab.roles.restarts.failures)
    trainer = lab.train(prepare)
    assert len(lab.roles.restarts.failures) == restarts + 1
    assert role in str(lab.roles.restarts.failures[-1])
    assert (lab.weights() == weights).all()
    for row, other in zip(history(trainer), rows, strict=True):
        names = [name for name in row if name.startswith(("critic/", "actor/", "reward_extra/", "response_length/"))]
        assert {"reward_extra/rm_score/mean", "reward_extra/rule/mean"} <= set(names)
        assert {name: row[name] for name in names} == {name: other[name] for name in names}


def test_validation_beside_training_says_what_it_says_in_the_foreground(lab: Lab, tmp_path: Path) -> None:
    """In the same files; one step ahead no token of it comes from other weights either: the run would end."""

    def validating_run(name: str, *overrides: str) -> tuple[dict[int, dict[str, float]], dict[str, str]]:
        """What the validations of a run have said, and the files that they have written."""
        asked = "actor_rollout_ref.rollout.val_kwargs"
        validated = [text for text in CONFIG if "val_files" not in text and "log_rollouts" not in text]
        more = ("data.val_max_samples=12", "trainer.test_freq=1", f"{asked}.n=2", f"{asked}.do_sample=true")
        trainer = lab.train_as(tmp_path / name, *validated, *more, f"{asked}.temperature=1.0", *overrides)
        metrics: dict[int, dict[str, float]] = {}
        for row in history(trainer):
            said = {name: value for name, value in row.items() if name.startswith("val-")}
            metrics[int(row["step"])] = metrics.get(int(row["step"]), {}) | said
        return metrics, {path.name: path.read_text() for path in (tmp_path / name / "validation").iterdir()}

    metrics, files = validating_run("foreground")
    assert [*metrics] == [1, 2]
    assert metrics[1] != metrics[2], "the policy has changed"
    assert len(metrics[1]) > 10
    assert sorted(files) == ["1.jsonl", "2.jsonl"]
    assert validating_run("beside", "trainer.val_in_background=true") == (metrics, files)
    ahead, _ = validating_run("ahead", "trainer.max_staleness=1", "trainer.val_in_background=true")
    assert [len(said) for said in ahead.values()] == [len(said) for said in metrics.values()]


def test_one_step_ahead_the_same_prompts_train_once_and_the_difference_is_weighed(lab: Lab, tmp_path: Path) -> None:
    first, second = history(lab.train_as(tmp_path, *CONFIG, "trainer.max_staleness=1"))
    assert [row["staleness/max"] for row in (first, second)] == [0, 1]
    assert first["training/rollout_probs_diff_max"] < 1e-4, "sampled by the weights it trains"
    assert second["training/rollout_probs_diff_max"] > 1e-4, "by older ones"
    assert 0.5 < second["rollout_corr/rollout_is_mean"] < 1.5
