"""Steps computed again, from batches made by hand. Steps of a real run: tests/e2e/test_using_the_model.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.targets import compute_targets
from grpo_dist.cli.replay import Difference, first_difference, retarget, reupdate
from grpo_dist.config.run_code import FLAG
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import load_config
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.parquet import write_parquet
from grpo_dist.rewards.scorer import OutputLines
from grpo_dist.runs import Recorded, read_recorded
from grpo_dist.trainer.checkpoint.config_changes import saved_config
from grpo_dist.workers.targets import TargetMaker
from tests.cli.conftest import Call
from tests.messages import refuses, says

NAN = float("nan")


def batch(scores: list[float], *advantages: list[float]) -> dict[str, Any]:
    return {"score": torch.tensor(scores), "advantages": Ragged.from_rows([*advantages], torch.float32)}


def test_the_first_difference_by_column_row_and_token() -> None:
    made = batch([1.0, NAN, 200.0], [0.5], [], [1.0, 2.0])
    near = batch([1.0005, NAN, 200.1], [0.5], [], [1.0, 2.0])
    for computed, tolerance, expected in (
        (made, 0.0, None),
        (near, 1e-3, None),
        (near, 1e-4, Difference("score", 1.0, float(torch.tensor(1.0005)), 0)),
        (batch([1.0, NAN, 200.0], [0.5], [], [1.0, 3.0]), 1e-3, Difference("advantages", 2.0, 3.0, 2, 1)),
        (batch([1.0, NAN, 0.0], [7.0], [], [1.0, 3.0]), 1e-3, Difference("score", 200.0, 0.0, 2)),
        ({"values": torch.ones(3)}, 0.0, None),  # the run has no such column
    ):
        assert first_difference(made, computed, tolerance) == expected
    found = first_difference(made, batch([1.0, 0.0, 200.0], [0.5], [], [1.0, 2.0]), 1e-3)
    assert found is not None
    assert (found.name, found.row, found.computed) == ("score", 1, 0.0), "a missing number differs"
    update = {"actor/loss": 0.5, "actor/grad_norm": 2.0, "timing_s/step": 1.0}
    assert first_difference(update, {"actor/loss": 0.5, "actor/grad_norm": 2.0, "actor/lr": 1e-3}, 1e-4) is None
    assert first_difference(update, {"actor/grad_norm": 2.1}, 1e-2) == Difference("actor/grad_norm", 2.0, 2.1)


def test_what_was_sampled_is_in_the_mask_whatever_was_left_out_since() -> None:
    versions, mask = [[3, 3], [2, -1, 3]], [[0, 0], [1, 0, 0]]
    columns = {"weight_versions": Ragged.from_rows(versions, torch.int32)}
    columns["response_mask"] = Ragged.from_rows(mask, torch.int8)
    made = Recorded(Path("/nowhere"), 1, load_config([])[0], DataProto.from_dict(columns), {})
    assert [row.tolist() for row in made.sampled["response_mask"].rows()] == [[1, 1], [1, 0, 1]]
    assert made.data["response_mask"].values.tolist() == [0, 0, 1, 0, 0]


# --- whole steps, by hand ------------------------------------------------------------------------------------------
CORRECTION = "algorithm.rollout_correction"
OPTIM = "actor_rollout_ref.actor.optim"
NOWHERE = Path("/nowhere")
USUAL = (
    "data.train_batch_size=2 actor_rollout_ref.actor.ppo_mini_batch_size=1 actor_rollout_ref.rollout.n=2 "
    f"actor_rollout_ref.actor.use_kl_loss=false {OPTIM}.lr=1e-3 trainer.total_training_steps=5"
).split()


def recorded(
    *overrides: str, scores: tuple[float, ...] = (1, 0, 0, 1), metrics: dict[str, float] | None = None, **columns: Any
) -> Recorded:
    """The first step of two prompts with two responses of three tokens each, and its targets as a run computes them."""
    config = load_config([*USUAL, f"trainer.default_local_dir={NOWHERE}", *overrides])[0]
    tokens = lambda value, dtype=torch.float32: Ragged.from_rows([[value] * 3] * 4, dtype)  # noqa: E731
    data = DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([[5, 6]] * 2 + [[7, 8]] * 2, torch.int32),
            "responses": Ragged.from_rows([[5, 6, i] for i in range(9, 13)], torch.int32),
            "response_mask": tokens(1, torch.int8),
            "weight_versions": tokens(1, torch.int32),
            "rollout_log_probs": tokens(-3.0),
            "old_log_probs": tokens(-3.0),
            "token_level_scores": Ragged.from_rows([[0, 0, score] for score in scores], torch.float32),
            "score": torch.tensor(scores, dtype=torch.float32),
            "truncated": torch.zeros(4, dtype=torch.int64),
            **columns,
        },
        {"uid": ["step1-prompt0"] * 2 + ["step1-prompt1"] * 2, "failure": [""] * 4},
    )
    return with_targets(Recorded(NOWHERE, 1, config, data, metrics or {}))


def with_targets(made: Recorded) -> Recorded:
    """What the run's reward process adds; it works on the batch as it was sampled, and its mask takes the place."""
    settings, data = made.plan.targets, made.data
    names = ("token_level_scores", "response_mask", "rollout_log_probs", *settings.columns)
    out, _ = compute_targets(
        {name: data[name].to_padded(0) for name in names},
        settings,
        index=data["uid"],
        truncated=data["truncated"],
        kl_coef=made.metrics.get("actor/reward_kl_penalty_coeff", 0.0),
        reward_baselines=data.batch.get("reward_baseline"),
    )
    mask = {"response_mask": out.pop("response_mask").to(torch.int8)}
    columns = {name: Ragged.from_padded(value, data["responses"].lengths) for name, value in (out | mask).items()}
    columns["advantage_mean"] = out["advantages"].sum(-1) / mask["response_mask"].sum(-1).clamp_min(1)
    whole = DataProto({**data.batch, **columns}, data.non_tensor_batch)
    return replace(made, data=whole)


class Worker(TargetMaker):
    components, overlong_penalty = {}, None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.printed = OutputLines()


def again(made: Recorded) -> DataProto:
    return retarget(made, Worker(), DataProto.from_dict({"score": made.data["score"]}))


def test_a_run_whose_tokens_were_drafted_is_not_replayed(tmp_path: Path) -> None:
    rollout = "actor_rollout_ref.rollout"
    key = f"{rollout}.engine_kwargs.vllm.speculative_config"
    made = recorded(f"{key}={{method: ngram}}", f"{rollout}.deterministic=false")
    with refuses(ConfigError, tmp_path, key):
        read_recorded(written(made, tmp_path), 1)


# --- targets -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "overrides",
    [
        [f"{CORRECTION}.rollout_is=sequence"],
        [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_batch_normalize=true"],
        [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_batch_normalize=true", "truncated"],
        ["algorithm.adv_estimator=reinforce_plus_plus"],
    ],
)
def test_targets_begin_with_the_tokens_that_were_sampled(overrides: list[str]) -> None:
    """The run has left out tokens since, of the second response (its ratio is e) and of the last (1.65)."""
    reject = [f"{CORRECTION}.rollout_rs='token_k1,seq_mean_k1'", f"{CORRECTION}.rollout_rs_threshold='1.5,0.75_1.5'"]
    apart = Ragged.from_rows([[-3.0, -3.0 + d, -3.0] for d in (0.0, 1.0, -0.2, 0.5)], torch.float32)
    cut = {"truncated": torch.tensor([1, 0, 0, 0])} if "truncated" in overrides else {}
    keys = [each for each in overrides if "=" in each] + (["algorithm.mask_truncated_responses=true"] if cut else [])
    made = recorded(*reject, *keys, old_log_probs=apart, **cut)
    left = made.data["response_mask"].to_padded(0).tolist()
    assert left == [[0, 0, 0] if cut else [1, 1, 1], [0, 0, 0], [1, 1, 1], [1, 0, 1]]
    assert first_difference(made.data.batch, again(made).batch, 0.0) is None


def test_advantages_that_need_what_is_not_recorded() -> None:
    for key, missing in (
        ("algorithm.adv_estimator=remax", "reward_baseline"),
        ("algorithm.use_kl_in_reward=true", "ref_log_probs"),
        ("actor_rollout_ref.actor.top_entropy_quantile=0.2", "old_entropies"),
    ):
        made = replace(recorded(), config=load_config([*USUAL, key])[0])
        with refuses(ConfigError, NOWHERE, "step 1", missing):
            again(made)


def test_the_coefficient_of_the_kl_penalty_is_the_steps(tmp_path: Path) -> None:
    """Rewards are scores less the coefficient times the sum of the log-ratios, which is 0.3 here."""
    name = "actor/reward_kl_penalty_coeff"
    keys = ("algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=k1", "algorithm.kl_ctrl.type=adaptive")
    made = recorded(*keys, metrics={name: 0.5}, ref_log_probs=Ragged.from_rows([[-3.1] * 3] * 4, torch.float32))
    run_dir = written(made, tmp_path)
    found = again(read_recorded(run_dir, 1))
    assert found["reward"].tolist() == pytest.approx([0.85, -0.15, -0.15, 0.85], abs=1e-5)
    (run_dir / "metrics.jsonl").write_text('{"step": 7}\n')
    with refuses(ConfigError, "step 1", "algorithm.kl_ctrl.type=adaptive", name, run_dir / "metrics.jsonl"):
        again(read_recorded(run_dir, 1))


def test_another_config_is_refused(tmp_path: Path, call: Call) -> None:
    changes = {
        "algorithm.adv_estimator=rloo": "algorithm.adv_estimator: grpo -> rloo",
        "custom_reward_function.path=other.py": "custom_reward_function.path: null -> other.py",
        "+custom_reward_function.reward_kwargs.a=1": "custom_reward_function.reward_kwargs.a: (not set) -> 1",
        "actor_rollout_ref.rollout.n=8": "actor_rollout_ref.rollout.n: 2 -> 8",
    }
    same = "data.train_batch_size=2"
    told = call("replay", written(recorded(), tmp_path), "1", same, *changes, FLAG, code=2).err
    says(told, *changes.values(), "check-env", "eval")
    assert "train_batch_size" not in told


# --- the update ----------------------------------------------------------------------------------------------------
def written(made: Recorded, run_dir: Path) -> Path:
    (run_dir / "rollouts").mkdir()
    (run_dir / "config.yaml").write_text(saved_config(made.config))
    (run_dir / "metrics.jsonl").write_text(json.dumps({"step": 1, **made.metrics}) + "\n")
    write_parquet(made.data, run_dir / "rollouts" / "1.parquet")
    return run_dir


def own(folder: Path, num_rows: int = 3, score: float = 0.0) -> list[str]:
    """The keys of training rows, of which the last one is too long, and of a reward function that has one score."""
    (folder / "scorer.py").write_text(f"def compute_score(solution_str, **more):\n    return {score}\n")
    texts = [f"{i}+1=?" for i in range(num_rows - 1)] + ["1+" * 200]
    table = [{"prompt": text, "data_source": "mine", "ground_truth": "2"} for text in texts]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    return [f"data.train_files={folder}/rows.jsonl", f"custom_reward_function.path={folder}/scorer.py"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"{OPTIM}.lr_warmup_steps_ratio=0.5"], (1 / 5 + 2 / 5) / 2),  # 5 steps of 2 updates, 5 of 10 to warm up
        ([f"{OPTIM}.lr_scheduler_type=linear", "rows"], (1 + 7 / 8) / 2),  # 9 rows less one, 2 a step: 4 steps
        # nothing to lay out, and no rows are read
        pytest.param(["trainer.total_training_steps=null"], 1, marks=pytest.mark.deep),
    ],
)
def test_learning_rates_are_those_of_a_run_of_its_length(overrides: list[str], expected: float, tmp_path: Path) -> None:
    if "rows" in overrides:
        counted = ["trainer.total_training_steps=null", "trainer.total_epochs=1", "data.max_prompt_length=99"]
        overrides = [overrides[0], *own(tmp_path, 9), *counted]
    made = recorded(*overrides, metrics={"actor/lr": 1e-3 * expected})
    _, metrics = reupdate(made)
    assert metrics["actor/lr"] == pytest.approx(1e-3 * expected)
    assert metrics["actor/grad_norm"] > 0
    if expected < 0.5:
        with refuses(ConfigError, "step 1", "actor/lr", "0.002", "trainer.total_training_steps", OPTIM):
            reupdate(replace(made, metrics={"actor/lr": 2e-3}))


def test_shuffled_mini_batches_have_the_order_of_their_step() -> None:
    """With this seed prompts 0 and 1 change places in the second and third step, and do not in the first."""
    seed, shuffle = "trainer.seed=17", "actor_rollout_ref.actor.shuffle=true"
    orders = [np.random.default_rng([17, step, 0]).permutation(2).tolist() for step in range(3)]
    assert orders == [[0, 1], [1, 0], [1, 0]]
    losses = [reupdate(recorded(seed, *more))[1]["actor/loss"] for more in ((), (shuffle,))]
    assert losses[0] == losses[1]


def test_in_bypass_mode_sampled_log_probs_are_not_compared(tmp_path: Path, call: Call) -> None:
    made = recorded(f"{CORRECTION}.bypass_mode=true", *own(tmp_path), scores=(0, 0, 0, 0))
    run_dir = written(made, tmp_path)
    told = call("replay", run_dir, "1", FLAG).out
    says(told, f"{CORRECTION}.bypass_mode=true", "log-probs", "step 1", run_dir / "metrics.jsonl")
    assert "old_log_probs" in told.partition("before the update")[0], "as targets they are compared"
    assert reupdate(made)[0].columns() == {}
    exact, _ = reupdate(recorded())
    assert exact["old_log_probs"].values.isfinite().all()


def test_a_bonus_that_moves_has_the_steps_own_weight() -> None:
    moves = recorded("actor_rollout_ref.actor.entropy_target=0.2", "actor_rollout_ref.actor.entropy_coeff=0.1")
    losses = [
        reupdate(replace(moves, metrics={"actor/entropy_coeff": weight}))[1]["actor/loss"] for weight in (0.0, 0.1, 0.2)
    ]
    assert losses[0] - losses[1] == pytest.approx(losses[1] - losses[2], rel=1e-3)
    assert losses[0] - losses[1] > 0.01
    with refuses(ConfigError, "step 1", "actor/entropy_coeff", "entropy_target", "entropy_coeff"):
        reupdate(moves)


def test_while_the_critic_warms_up_the_policy_stands_still(tmp_path: Path, call: Call) -> None:
    values = Ragged.from_rows([[0.5] * 3] * 4, torch.float32)
    keys = ("algorithm.adv_estimator=gae", "critic.model.path=builtin:tiny-qwen3", "trainer.critic_warmup=1")
    made = recorded(*keys, *own(tmp_path), scores=(0, 0, 0, 0), values=values)
    old, metrics = reupdate(made)
    assert metrics == {}
    exact = DataProto({**made.data.batch, **old.batch}, made.data.non_tensor_batch)
    run_dir = written(replace(made, data=exact), tmp_path)
    says(call("replay", run_dir, "1", FLAG).out, "stands still", "1 steps")


def test_greedy_scores_are_as_recorded(tmp_path: Path, call: Call) -> None:
    reject = (f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=1.5")
    keys = ("algorithm.adv_estimator=remax", *own(tmp_path, score=1.0), *reject)
    last_apart = Ragged.from_rows([[-3.0, -3.0, -4.0]] * 4, torch.float32)
    columns = {"reward_baseline": torch.tensor([1.0, 1, 2, 2]), "old_log_probs": last_apart}
    made = recorded(*keys, scores=(1, 1, 1, 1), **columns)
    assert made.data["response_mask"].to_padded(0).tolist() == [[1, 1, 0]] * 4
    assert made.data["advantage_mean"].tolist() == [0, 0, -1, -1]
    assert "advantages: as recorded" in call("replay", written(made, tmp_path), "1", FLAG, "--no-update").out
