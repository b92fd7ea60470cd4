"""The loop on fake workers: real Ray, real handles, no model."""

import gc
import weakref
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from grpo_dist.errors import ConfigError, HealthError, RewardError
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.trainer.checkpoint.folder import read_state
from grpo_dist.trainer.metrics import batch_metrics
from grpo_dist.trainer.rollout import pump
from grpo_dist.trainer.rollout.sampling import Rollout
from grpo_dist.trainer.trainer import GRPOTrainer
from tests.messages import refuses, says
from tests.processes import spawned
from tests.trainer.fake_run import Groups, make_trainer
from tests.trainer.fakes import StuckRewardWorker
from tests.trainer.metrics_page import PAGE, undocumented
from tests.trainer.recorded import history, shown_by, trained_rows

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def finished(groups: Groups, tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    trainer = make_trainer(tmp_path_factory.mktemp("fit"), groups)
    trainer.fit()
    return trainer


def test_metrics_are_right(finished: GRPOTrainer) -> None:
    """Token 5 decodes to one character, so responses of 8..11 tokens score 8..11."""
    rows = history(finished)
    step = rows[1]
    assert step["critic/score/mean"] == pytest.approx(9.5)
    assert (step["critic/score/min"], step["critic/score/max"]) == (8, 11)
    assert step["reward_extra/half/mean"] == pytest.approx(4.75)
    assert step["response_length/mean"] == pytest.approx(9.5)
    assert step["num_turns/mean"] == 1
    # over tokens: -1.5, -0.5, 0.5, 1.5 over their deviation, each on as many tokens as it has
    assert step["critic/advantages/mean"] == pytest.approx((-12 - 4.5 + 5 + 16.5) / (5 / 3) ** 0.5 / 38, rel=1e-4)
    assert step["critic/zero_variance_groups"] == 0
    assert step["reward/failure_rate"] == 0
    assert step["training/rollout_probs_diff_mean"] == pytest.approx(np.exp(-1) - np.exp(-1.25))
    assert step["actor/loss"] == 8, "summed over ranks, averaged over mini-batches"
    assert step["training/weight_version"] == 1
    assert [row.get("val-core/arithmetic/reward/mean@1") for row in rows] == [8, None, 8, 8]
    names = {name for row in rows for name in row} - {"step"}
    assert len(names) > 60
    assert undocumented(names, PAGE.read_text()) == []


def test_a_batch_that_has_trained_is_let_go_before_the_next_one_is_sampled(groups: Groups, tmp_path: Path) -> None:
    """Without validation files nothing is validated."""
    trainer = make_trainer(tmp_path, groups, "data.val_files=null")
    trained, held = list[weakref.ref](), list[int]()
    measure, rollout = trainer.measure, trainer.sampler.rollout

    def note(batch: DataProtoRef) -> None:
        trained.append(weakref.ref(batch))
        measure(batch)

    async def count(step: int) -> Rollout:
        gc.collect()
        held.append(sum(batch() is not None for batch in trained))
        return await rollout(step)

    trainer.measure, trainer.sampler.rollout = note, count
    trainer.fit()
    assert held == [0, 0, 0]
    assert not any(name.startswith("val-") for row in history(trainer) for name in row)


AGREEMENT, BF16 = "trainer.health.agreement.action", "actor_rollout_ref.actor.fsdp_config.dtype=bf16"
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("overrides", "limits"),
    [
        ([], (1e-4, 0.005)),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=4"], (1e-4, 0.005)),  # the update has the old log-probs
        ([f"{ROLLOUT}.dtype=bfloat16"], (0.15,)),
    ],
)
def test_engines_with_other_log_probs_end_the_run_before_its_first_update(
    tmp_path: Path, groups: Groups, overrides: list, limits: tuple
) -> None:
    """Theirs are -1, and the trainer's -1.25, on 4 prompts with responses of 8 to 11 tokens."""
    trainer = make_trainer(tmp_path, groups, f"{AGREEMENT}=stop", *overrides)
    told = ("health/agreement", "step 1", 0.25, *limits, "152 tokens", -1, -1.25, "id 5", "token 0")
    with refuses(HealthError, *told, "grpo-dist agreement", "builtin:tiny-qwen3"):
        trainer.fit()
    assert not any(groups["actor"].call_all("test", "seen"))
    measured = [history(trainer)[-1][f"training/agreement/{name}"] for name in ("mean", "max", "of_limit")]
    assert measured == pytest.approx([0.25, 0.25, 0.25 / limits[0]])


def test_engines_that_differ_by_rounding_and_rules_that_warn_end_nothing(tmp_path: Path, groups: Groups) -> None:
    """In float32 the trainer is 0.1 off from itself in bf16, so 0.3 is the limit."""
    trainer = make_trainer(tmp_path, groups, f"{AGREEMENT}=stop", BF16, "trainer.health.rollout_mismatch.steps=1")
    shown = shown_by(trainer)
    trainer.fit()
    (told,) = [text for text in shown if text.startswith("health/")]
    says(told, "health/rollout_mismatch", "step 1")
    assert [row["step"] for row in history(trainer)] == [0, 1, 2, 3]
    first, *others = history(trainer)[1:]
    assert first["training/agreement/of_limit"] == pytest.approx(0.25 / 0.3)
    assert first["health/agreement"] == 0
    assert not any("training/agreement/mean" in row for row in others), "once"
    says(shown, 0.25, 0.3, "152 tokens")


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["algorithm.rollout_correction.bypass_mode=true"], "algorithm.rollout_correction.bypass_mode"),
        ([f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.min_p=0.1"], f"{ROLLOUT}.top_p, {ROLLOUT}.min_p"),
        ([f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8"], f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype"),
        ([f"+{ROLLOUT}.engine_kwargs.vllm.quantization_config={{a: b}}"], "quantization_config"),
        ([f"{ROLLOUT}.dtype=float16"], "KeyError: 'float16'"),
    ],
)
def test_a_run_says_why_its_engines_are_not_judged(tmp_path: Path, groups: Groups, overrides: list, why: str) -> None:
    trainer = make_trainer(tmp_path, groups, f"{AGREEMENT}=stop", *overrides)
    shown = shown_by(trainer)
    trainer.fit()
    assert not any("training/agreement/mean" in row for row in history(trainer))
    says(shown, why)
    measured = {"timing_s/old_log_prob", "training/rollout_probs_diff_max"} & history(trainer)[-1].keys()
    assert len(measured) == (0 if "bypass_mode" in why else 2), "with bypass_mode nothing is compared"


def test_tokens_of_older_weights_are_not_judged(tmp_path: Path, groups: Groups) -> None:
    trainer = make_trainer(tmp_path, groups)
    shown = shown_by(trainer)
    trainer.sync_weights()
    batch = trainer.rollout()
    trainer.weight_version += 1
    trainer.compare_engines(batch)
    says(shown, "no token", "present weights")
    assert trainer.metrics.keys().isdisjoint({"training/agreement/mean"})


def test_a_health_rule_stops_the_run_after_its_step_is_logged(tmp_path: Path, groups: Groups) -> None:
    """Trainer and sampler differ by e^-1 - e^-1.25 = 0.081 a token; every step so, and two in a row are asked for."""
    rule = "trainer.health.rollout_mismatch"
    rules = (f"{rule}.action=stop", f"{rule}.steps=2", "trainer.health.ppo_kl.action=off")
    trainer = make_trainer(tmp_path, groups, *rules)
    told = ("health/rollout_mismatch", "step 2", "2 steps", "training/rollout_probs_diff_mean", "0.0814")
    with refuses(HealthError, *told, f"{tmp_path}/run/global_step_2"):
        trainer.fit()
    assert [row.get("health/rollout_mismatch") for row in history(trainer)] == [None, 0.0, 1.0]
    assert all("health/ppo_kl" not in row for row in history(trainer))
    assert (tmp_path / "run/rollouts/2.jsonl").is_file()


def test_samples_and_checkpoints_are_written(finished: GRPOTrainer) -> None:
    """test_freq=2, save_freq=2, and both after the last step."""
    run_dir = finished.run_dir
    rows = trained_rows(run_dir, 1)
    assert len(rows) == 16
    assert rows[0].keys() == {"step", "uid", "input", "output", "gts", "score", "advantage", "half", "row"}
    assert [row["half"] for row in rows] == [row["score"] / 2 for row in rows], "what the function says besides"
    assert sum(row["advantage"] for row in rows[:4]) == pytest.approx(0, abs=1e-6)
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert sorted(p.name for p in run_dir.glob("global_step_*")) == ["global_step_2", "global_step_3"]
    assert (run_dir / "validation/0.jsonl").is_file()
    for step in (2, 3):
        metrics = read_state(run_dir / f"global_step_{step}").metrics
        assert metrics["val-core/arithmetic/reward/mean@1"] == 8
        assert all(name.startswith("val-") for name in metrics)


def test_a_run_goes_on_where_it_stopped(finished: GRPOTrainer, groups: Groups, tmp_path: Path) -> None:
    folder = finished.run_dir / "global_step_2"
    trainer = make_trainer(tmp_path, groups, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}")
    assert trainer.saver.last == folder
    trainer.fit()
    assert [row["step"] for row in history(trainer)] == [3]
    first, second = ([row["uid"] for row in trained_rows(run.run_dir, 3)] for run in (finished, trainer))
    assert first == second
    assert history(trainer)[0]["training/weight_version"] == history(finished)[3]["training/weight_version"]


def test_a_metric_that_validation_does_not_give_is_named_at_once(groups: Groups, tmp_path: Path) -> None:
    unknown = "trainer.keep_best_metric=val-core/arithmetic/acc/mean@1"
    trainer = make_trainer(tmp_path, groups, unknown)
    with refuses(ConfigError, unknown, "val-core/arithmetic/reward/mean@1"):
        trainer.fit()
    assert trainer.step == 0


def bytes_on_driver(tmp_path: Path, groups: Groups, length: int) -> int:
    """Bytes of everything workers returned to the driver in one step."""
    trainer = make_trainer(tmp_path, groups, "trainer.log_rollouts=false", length=length)
    received, value = 0, WorkerGroup.value

    async def counting(self: WorkerGroup, call: Call) -> object:
        nonlocal received
        answer = await value(self, call)
        received += len(cloudpickle.dumps(answer))
        return answer

    trainer.sync_weights()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerGroup, "value", counting)
        batch = trainer.compute_targets(trainer.rollout())
        trainer.update(batch)
    assert batch["response_length"].max() == length + 3
    return received


@pytest.mark.deep
def test_bytes_on_the_driver_do_not_grow_with_response_length(groups: Groups, tmp_path: Path) -> None:
    short, long = (bytes_on_driver(tmp_path, groups, length) for length in (8, 4000))
    assert short > 1000
    # The reference takes its rows in one to four batches, as they come: up to 1.5 kB. One column of 16 x 4,000 tokens
    # would be 64 kB at least.
    assert abs(long - short) < 2_000, (short, long)


def test_a_reward_function_that_raises_is_shown(groups: Groups, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, groups, "data.shuffle=false", bad=2)
    trainer.sync_weights()
    with refuses(RewardError, "16 responses", "reward.max_failure_rate=0.01", "ValueError: no such") as caught:
        trainer.rollout()
    (note,) = caught.value.__notes__
    says(note, "'rollout'", "step 1")


def test_a_few_failures_are_counted_and_shown(groups: Groups, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, groups, "data.shuffle=false", "reward.max_failure_rate=0.5", bad=2)
    shown = shown_by(trainer)
    trainer.sync_weights()
    batch = trainer.rollout()
    assert trainer.metrics["reward/failures"] == 4, "one group"
    assert trainer.metrics["reward/failure_rate"] == 4 / 16
    assert np.isnan(batch["score"]).sum() == 4
    says(shown[0], "4 responses", "reward.failure_score=null", "ValueError: no such")
    batch = trainer.compute_targets(batch)
    masks = batch.fetch(("response_mask",))["response_mask"].rows()
    assert [bool(row.any()) for row in masks] == (~np.isnan(batch["score"])).tolist()
    metrics = batch_metrics(batch)
    assert metrics["critic/zero_variance_groups"] == 1 / 4
    assert metrics["critic/score/min"] > 0
    assert metrics["critic/rewards/mean"] == metrics["critic/score/mean"]


@pytest.mark.deep
def test_a_reward_process_that_hangs_ends_the_step(groups: Groups, tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("SCORER_START_S", "SCORER_RESTART_S"):
        monkeypatch.setattr(pump, name, 0.0)
    with spawned("reward", StuckRewardWorker, [()]) as reward:
        limits = ("reward.timeout_s=0.2", "trainer.max_worker_restarts=0")
        trainer = make_trainer(tmp_path, groups | {"reward": reward}, *limits)
        trainer.sync_weights()
        with pytest.raises(RewardError, match=r"step1-prompt\d+ .*'arithmetic'.* reward worker 0 .*\b0\.8 s"):
            trainer.rollout()


@pytest.mark.deep
def test_iterative_grpo_moves_the_reference_and_saves_it(tmp_path: Path, groups: Groups) -> None:
    """3 steps, every 2nd: once, after step 2. The checkpoint after step 3 has it."""
    groups["ref"].call_all("forget", "forget")
    key = "actor_rollout_ref.ref.ref_model"
    overrides = (f"{key}_sync_steps=2", f"{key}_mixup_alpha=0.6", "trainer.save_freq=3")
    trainer = make_trainer(tmp_path, groups, *overrides)
    trainer.fit()
    assert groups["ref"].call_all("seen", "seen") == [[0.6]]
    assert (tmp_path / "run" / "global_step_3" / "ref" / "rank0").is_file()
    assert make_trainer(tmp_path, groups, *overrides).step == 3


def test_on_policy_the_old_log_probs_are_the_updates_own(tmp_path: Path, groups: Groups) -> None:
    """One mini-batch, one epoch: no pass before the update; the diagnostics are the same as with one."""
    trainer = make_trainer(tmp_path, groups, "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    trainer.fit()
    step = history(trainer)[1]
    assert "timing_s/old_log_prob" not in step
    assert step["training/rollout_probs_diff_mean"] == pytest.approx(np.exp(-1) - np.exp(-1.25))
    batch = trainer.update(trainer.compute_targets(trainer.rollout())).fetch(("responses", "old_log_probs"))
    assert batch["old_log_probs"].lengths.tolist() == batch["responses"].lengths.tolist(), "each row has its own"


def test_validation_samples_in_its_own_way(tmp_path: Path, groups: Groups) -> None:
    """All of val_kwargs reach the engine, each prompt with a seed of its own, the same in every validation."""
    settings = ("do_sample=true", "temperature=0.7", "top_p=0.8", "top_k=20", "n=3")
    overrides = [f"{ROLLOUT}.val_kwargs.{setting}" for setting in settings]
    trainer, shown, asked = make_trainer(tmp_path, groups, *overrides, "trainer.log_val_generations=2"), [], []
    trainer.trackers.log_samples = lambda samples, step: shown.append(samples)
    trainer.sync_weights()
    groups["rollout"].call_all("test", "take_asked")
    for _ in range(2):
        trainer.validate()
        asked.append(dict(each for part in groups["rollout"].call_all("test", "take_asked") for each in part))
    assert asked[0] == asked[1]
    samplings = asked[0].values()
    assert {(s.n, s.temperature, s.top_p, s.top_k, s.max_tokens) for s in samplings} == {(3, 0.7, 0.8, 20, 64)}
    assert len({sampling.seed for sampling in samplings}) == 4
    metrics = {name.removeprefix("val-core/arithmetic/reward/"): v for name, v in trainer.metrics.items()}
    assert (metrics["mean@3"], metrics["best@3/mean"]) == (9, 10), "responses of 8, 9 and 10 characters"
    first, second = shown
    assert first == second
    assert len(first) == 2
    assert first[0].keys() == {"step", "uid", "input", "output", "gts", "score", "half", "row"}
