"""What another config would have pushed, on a run made by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.counterfactual import CLEAR, LEAST_UNITS, verdict
from grpo_dist.cli.entry import main as entry
from grpo_dist.config.run_code import FLAG
from grpo_dist.config.schema import RunConfig
from grpo_dist.plan.commands import load_config
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.parquet import write_parquet
from grpo_dist.trainer.checkpoint.config_changes import saved_config
from grpo_dist.trainer.recorded_step import Recorded, read_step
from grpo_dist.trainer.replay import gradient_products, rescore, reupdate, reward_worker, target_sums
from tests.messages import says
from tests.trainer.test_replay import CORRECTION, NOWHERE, OPTIM, USUAL, recorded, rows, with_targets

GROUPS = 12
FUNCTIONS = {
    "mine": "int(solution_str[-1:].isdigit())",
    "negated": "1 - int(solution_str[-1:].isdigit())",
    "random": "__import__('zlib').crc32(solution_str.encode()) % 1009",
    "failing": "1 / int(not solution_str.startswith('0'))",
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two steps of a run of twelve groups of four responses in two mini-batches; of the second no weights are
    kept. Scores are 1 where a response ends with a digit.
    """
    folder = tmp_path_factory.mktemp("run")
    for name, score in FUNCTIONS.items():
        (folder / f"{name}.py").write_text(f"def compute_score(solution_str, **more):\n    return float({score})\n")
    config = load_config(
        [
            *USUAL,
            f"{OPTIM}.lr=1e-6",
            f"data.train_batch_size={GROUPS}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS // 2}",
            "actor_rollout_ref.rollout.n=4",
            f"trainer.default_local_dir={folder}",
            f"custom_reward_function.path={folder / 'mine.py'}",
            rows(folder, GROUPS + 1),
        ]
    )[0]
    (folder / "rollouts").mkdir()
    for step in (1, 2):
        made = sampled(config, step)
        with reward_worker(config) as worker:
            scores, failures = rescore(made, worker)
        assert not failures
        made = with_columns(made, scores)
        if step == 1:  # whose weights are known
            made = with_columns(made, reupdate(with_targets(made))[0])
        made = with_targets(made)
        assert 0.2 < made.data["score"].mean() < 0.8
        write_parquet(made.data, folder / "rollouts" / f"{step}.parquet")
        (folder / "rollouts" / f"{step}.jsonl").touch()
    (folder / "config.yaml").write_text(saved_config(config))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    return folder


def with_columns(made: Recorded, columns: DataProto) -> Recorded:
    return replace(made, data=DataProto({**made.data.batch, **columns.batch}, made.data.non_tensor_batch))


def sampled(config: RunConfig, step: int) -> Recorded:
    """A step's responses: three bytes each, of which half are digits."""
    tokens = torch.randint(46, 66, (4 * GROUPS, 3), generator=torch.Generator().manual_seed(step))
    same = lambda value, dtype: Ragged.from_rows([[value] * 3] * len(tokens), dtype)  # noqa: E731
    data = DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([[5, 6]] * len(tokens), torch.int32),
            "responses": Ragged.from_rows(list(tokens), torch.int32),
            "response_mask": same(1, torch.int8),
            "weight_versions": same(1, torch.int32),
            "rollout_log_probs": same(-3.0, torch.float32),
            "old_log_probs": same(-3.0, torch.float32),
            "score": torch.zeros(len(tokens)),
            "truncated": torch.zeros(len(tokens), dtype=torch.int64),
        },
        {"uid": [f"step{step}-prompt{i // 4}" for i in range(len(tokens))], "failure": [""] * len(tokens)},
    )
    return Recorded(NOWHERE, step, config, data, {})


def compared(
    capsys: pytest.CaptureFixture[str], run_dir: Path, *arguments: str, function: str = "mine"
) -> tuple[dict[str, list[str]], str]:
    """The columns of the table, and what stands below."""
    reward = f"custom_reward_function.path={run_dir / function}.py"
    assert entry(["replay", str(run_dir), *arguments, reward, FLAG]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    names = re.split(r"\s{2,}", head.strip())
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
    table = [row for row in cells if len(row) == len(names)]
    return {name: [row[i] for row in table] for i, name in enumerate(names)}, "\n".join(lines[len(table) :])


CANNOT = verdict({}, {}, by_gradient=False).partition(":")[0]


@pytest.mark.deep
def test_the_same_config_pushes_the_same(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the second step no weights are kept: its gradients are not there, and the reason is told."""
    table, told = compared(capsys, run_dir, "--steps", "1:2")
    assert table["step"] == ["1", "2", "all"]
    assert table["changed scores"][:2] == [f"0 of {4 * GROUPS}"] * 2
    assert table["correlation"] == ["1.00 [1.00, 1.00]"] * 3
    assert table["cosine"] == ["1.00 [1.00, 1.00]", "-", "1.00 [1.00, 1.00]"]
    assert table["effective size"] == table["other effective size"]
    says(told, "step 2", "trainer.save_freq")
    assert CANNOT not in told


def test_the_negated_reward_pushes_the_other_way(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, told = compared(capsys, run_dir, "1", function="negated")
    assert table["correlation"] == table["cosine"] == ["-1.00 [-1.00, -1.00]"] * 2
    assert table["changed scores"][0] == f"{4 * GROUPS} of {4 * GROUPS}"
    assert CANNOT not in told
    assert "another" in told


def test_an_unrelated_reward(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, told = compared(capsys, run_dir, "--steps", ":", "--no-update", function="random")
    value, low, high = (float(number) for number in re.findall(r"-?\d\.\d+", table["correlation"][2]))
    assert low < 0 < high
    assert abs(value) < 0.3
    assert (CANNOT in told) == (high >= CLEAR)


def test_responses_without_a_score_are_left_out_and_counted(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [
        bytes(int(token) - 3 for token in row)
        for row in read_step(run_dir / "rollouts" / "1.parquet")["responses"].rows()
    ]
    lost = sum(text.startswith(b"0") for text in texts)
    assert lost > 0
    table, told = compared(capsys, run_dir, "--steps", ":1", "--no-update", function="failing")
    assert table["step"] == ["1", "all"]
    says(told, "step 1", f"{lost} of {4 * GROUPS}")
    says(told, "ZeroDivisionError")


@pytest.mark.deep
def test_another_loss_shows_in_the_gradients_alone(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There are two mini-batches with weights: too few to tell."""
    key = "actor_rollout_ref.actor.kl_loss_coef=0.3", "actor_rollout_ref.actor.loss_agg_mode=token-sum"
    table, told = compared(capsys, run_dir, "1", *key)
    assert table["correlation"][0] == "1.00 [1.00, 1.00]"
    assert table["cosine"][0].startswith("1.00"), "it is longer only"
    says(told, CANNOT.split()[-1], LEAST_UNITS)
    _, told = compared(capsys, run_dir, "2", *key)
    says(told.splitlines()[-1], "trainer.save_freq")
    assert CANNOT in told


def test_a_config_that_needs_what_is_not_recorded(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, told = compared(capsys, run_dir, "--steps", "1:2", "actor_rollout_ref.actor.top_entropy_quantile=0.2")
    says(told, f"all {4 * GROUPS}", "old_entropies")
    assert CANNOT in told.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--steps", "2:3", "algorithm.gamma=0.5"], ["2:3", "1:2"]),
        (["--steps", "0:1", "algorithm.gamma=0.5", "--steps", "2:1"], ["2:1", "1:2"]),
        (["1", "actor_rollout_ref.rollout.temperature=0.5"], ["actor_rollout_ref.rollout.temperature: 1.0 -> 0.5"]),
        (["--steps", "1:2", "actor_rollout_ref.rollout.n=8"], ["actor_rollout_ref.rollout.n: 4 -> 8"]),
        (["1", "algorithm.filter_groups.enable=true"], ["algorithm.filter_groups.enable: false -> true"]),
        (["2", "algorithm.gamma=0.5", "--update"], ["step 2", "trainer.save_freq"]),
        (["--steps", "1:2"], ["STEP", "key=value"]),
        ([], ["STEP"]),
        (["algorithm.gamma=0.5", "algorithm.lam=0.5"], ["STEP"]),
        (["1", "--steps", "1:2", "algorithm.gamma=0.5"], ["1"]),
    ],
)
def test_what_cannot_be_compared(
    arguments: list[str], named: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry(["replay", str(run_dir), *arguments, FLAG]) == 2
    says(capsys.readouterr().err, *named)


def test_gradients_are_those_of_the_run() -> None:
    """Of each mini-batch at the weights that those before have made."""
    made = recorded()
    own, both, other = gradient_products(made, made.data)
    _, metrics = reupdate(made)
    assert len(own) == 2
    assert np.sqrt(both).mean() == pytest.approx(metrics["actor/grad_norm"], rel=1e-5)
    assert own.tolist() == pytest.approx(both.tolist())
    assert own.tolist() == pytest.approx(other.tolist())


def test_weights_and_masks_count_in_a_push() -> None:
    """A token with the weight 0, and one that a config leaves out, are not pushed."""
    kept = recorded("algorithm.adv_estimator=grpo")
    changed = replace(kept, ran=kept.config, config=recorded(f"{CORRECTION}.m2_threshold=0.04").config)
    weights = Ragged.from_rows([[1.0, 0, 1]] * 2 + [[0.5] * 3] * 2, torch.float32)
    mask = Ragged.from_rows([[1, 1, 0]] + [[1] * 3] * 3, torch.int8)
    targets = DataProto.from_dict(
        {"advantages": kept.data["advantages"], "response_mask": mask, "rollout_is_weights": weights}
    )
    sums, left_out = target_sums(changed, kept.data, targets)
    assert left_out == 0
    a = 0.5**0.5  # advantages of the scores 1 and 0
    assert sums[0].tolist() == [6, 6], "tokens that train by one of both"
    assert sums[1:3] == pytest.approx(np.array([[0, 0], [a - 2 * a, 0]]), abs=1e-5)
    assert sums[5] == pytest.approx(a * a * np.array([1 + 2, 3]), abs=1e-5)
