"""What the summary says of a run, and the sentence about idle roles, by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from grpo_dist.plan.commands import load_config
from grpo_dist.plan.plan import make_plan
from grpo_dist.terminal import as_typed
from grpo_dist.tracking.summary import format_seconds, format_summary, sparkline, who_waited
from tests.messages import says

VAL = "val-core/arithmetic/acc/mean@1"


def row(step, reward, length=20.0, **more):
    timings = {"timing_s/step": 4.0, "timing_s/gen": 2.0, "timing_s/update_actor": 1.0, "perf/tokens_per_s": 100.0}
    return {"step": step, "critic/score/mean": reward, "response_length/mean": length} | timings | more


def entry(text, label):
    (line,) = [line.strip() for line in text.splitlines() if line.strip().startswith(label)]
    return line.removeprefix(label).split()


def summary(history, tmp_path, hf_model=None, seconds=192.0, flags=None, job=None, why="", first_step=0):
    flags = dict.fromkeys(("eval", "generate", "serve"), "") if flags is None else flags
    more = {"hf_model": hf_model, "flags": flags, "job": job, "first_step": first_step}
    return format_summary(history, run_dir=tmp_path, seconds=seconds, why=why, **more)


def test_the_first_line_says_how_far_it_came_and_why_it_ended(tmp_path):
    history = [row(step, 0.1 * step) for step in range(1, 7)]
    says(summary(history, tmp_path, why="acc is 0.95").splitlines()[0], "6 training steps", "acc is 0.95")
    resumed = summary(history, tmp_path, first_step=5)
    says(resumed.splitlines()[0], "6 training steps", "2 of them")
    assert entry(resumed, "reward")[:3] == ["0.1", "->", "0.6"], "it is of the whole run"
    assert "of them" not in summary(history, tmp_path, first_step=1)
    finished, metrics = summary([], tmp_path, seconds=8.31).splitlines()
    says(finished, "0 training steps", "8.3 s")
    assert metrics == f"  metrics               {tmp_path / 'metrics.jsonl'}"


def test_parts_of_the_reward_and_one_that_stood_still(tmp_path):
    parts = [{"reward_extra/right/mean": 0.0, "reward_extra/short/mean": -0.1 * left} for left in (3, 2, 1)]
    history = [row(step, part["reward_extra/short/mean"], **part) for step, part in enumerate(parts, 1)]
    text = summary(history, tmp_path)
    assert entry(text, "short") == ["-0.3", "->", "-0.1"]
    (sentence,) = [line for line in text.splitlines() if "right at 0" in line]
    assert "short" not in sentence
    assert "right at" not in summary(history[:1], tmp_path)
    history[2]["reward_extra/right/mean"] = 0.5
    assert "right at" not in summary(history, tmp_path)


def test_groups_of_equal_scores_train_nothing(tmp_path):
    def told(*shares):
        history = [row(step, 0.0, **{"critic/zero_variance_groups": share}) for step, share in enumerate(shares, 1)]
        return [line for line in summary(history, tmp_path).splitlines() if "rollout.n" in line]

    (sentence,) = told(1.0, 0.95, 0.75)
    says(sentence, "90%")
    assert not told(1.0, 0.85, 0.75)
    assert not told()


def test_before_after_and_best(tmp_path):
    history = [{"step": 0, VAL: 0.31}, row(1, 0.3, 31.25), row(2, 0.5, **{VAL: 0.84}), row(3, 0.8, 24.0, **{VAL: 0.82})]
    text = summary(history, tmp_path, Path("/models/final"))
    says(text.splitlines()[0], "3 training steps", "3 min", "12 s")
    assert entry(text, "validation accuracy") == ["0.31", "->", "0.82", "(best", "0.84", "at", "step", "2)"]
    assert entry(text, "reward") == ["0.3", "->", "0.8", "▁▄█"]
    assert entry(text, "response length") == ["31.2", "->", "24"]
    assert entry(text, "tokens/s") == ["100"]
    assert entry(text, "metrics") == [str(tmp_path / "metrics.jsonl")]
    assert entry(text, "model (Hugging Face)") == ["/models/final"]
    assert "tensorboard" not in text


def test_it_ends_with_what_to_do_next(tmp_path):
    folder = tmp_path / "my run"
    (folder / "tensorboard").mkdir(parents=True)
    text = summary([row(1, 0.3)], folder, Path("/models/final"))
    says(text, "1 training step", f"tensorboard --logdir '{folder}/tensorboard'")
    assert [line.strip().split("  ")[-1].strip() for line in text.splitlines()[-4:]] == [
        f"{as_typed('grpo-dist')} {command}"
        for command in (f"report '{folder}'", f"eval '{folder}' --base", f"generate '{folder}'", f"serve '{folder}'")
    ]
    of_own_code = summary([row(1, 0.3)], folder, Path("/models/final"), flags={"eval": " --trust-run-code"})
    assert f"grpo-dist eval '{folder}' --base --trust-run-code" in of_own_code
    assert of_own_code.count("--trust-run-code") == 1
    assert "grpo-dist serve" not in of_own_code, "it is told what can use the model"
    without_model = summary([row(1, 0.3)], folder)
    assert "grpo-dist report" in without_model
    assert "grpo-dist serve" not in without_model
    of_sft = summary([{"step": 1, "timing_s/step": 1.0, "sft/loss": 2.0}], folder, Path("/models/final"))
    assert "grpo-dist eval" not in of_sft, "it has no reward to evaluate with"


def test_time_table_has_mean_seconds_shares_and_the_rest(tmp_path):
    # Step 0 only validates: its time belongs to no step.
    validated = {"step": 0, VAL: 0.1, "timing_s/testing": 50.0}
    history = [validated, row(1, 0.3), row(2, 0.5, **{"timing_s/save_checkpoint": 0.8})]
    text = summary(history, tmp_path)
    says(text, "per step", "2)")
    assert entry(text, "gen ") == ["2.00", "s", "50%"]
    assert entry(text, "update_actor") == ["1.00", "s", "25%"]
    assert entry(text, "save_checkpoint") == ["0.40", "s", "10%"]
    assert entry(text, "other") == ["1.00", "s", "25%"], "a step does not count the checkpoint"
    assert entry(text, "step ") == ["4.00", "s", "100%"]
    assert "testing" not in text
    order = [text.index(phase) for phase in ("gen ", "update_actor", "save_checkpoint", "other")]
    assert order == sorted(order)


def test_phases_that_overlap_and_tokens_per_second_by_the_time_of_steps(tmp_path):
    text = summary([row(1, 0.3, **{"timing_s/ref": 1.5})], tmp_path)
    says(text, "per step", "overlap)")
    assert "other" not in text
    history = [row(1, 0.1, **{"timing_s/step": 1.0}), row(2, 0.1, **{"timing_s/step": 9.0, "perf/tokens_per_s": 200.0})]
    assert entry(summary(history, tmp_path), "tokens/s") == ["190"]


def test_several_validation_sources_get_a_line_each(tmp_path):
    history = [
        {"step": 0, "val-core/a/acc/mean@1": 0.1, "val-core/b/acc/mean@1": 0.2, "val-core/a/acc/best@8": 0.9},
        {"step": 5, "val-core/a/acc/mean@1": 0.3, "val-core/b/acc/mean@1": math.nan},
    ]
    text = summary(history, tmp_path)
    assert entry(text, "a/acc/mean@1") == ["0.1", "->", "0.3", "(best", "0.3", "at", "step", "5)"]
    assert entry(text, "b/acc/mean@1") == ["0.2", "->", "nan", "(best", "0.2", "at", "step", "0)"]
    assert "best@8" not in text


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        (range(8), 40, "▁▂▃▄▅▆▇█"),
        ([0, 0, 10, 10], 2, "▁█"),
        ([3, 3, 3], 40, "▁▁▁"),
        ([0, math.nan, 7], 40, "▁ █"),
        ([], 40, ""),
        ([math.nan], 40, ""),
        (range(8000), 8, "▁▂▃▄▅▆▇█"),
    ],
)
def test_sparkline(values, width, line):
    assert sparkline(list(values), width) == line


def test_format_seconds():
    told = {8.31: "8.3 s", 59.99: "60.0 s", 60: "1 min 00 s", 192: "3 min 12 s", 3599.7: "1 h 00 min"}
    assert {seconds: format_seconds(seconds) for seconds in told} == told


def test_it_says_which_role_waited(tmp_path):
    idle = {"perf/idle/actor": 0.5, "perf/idle/rollout": 0.25}
    history = [row(step, 0.3, **idle) for step in (1, 2, 3)]
    config, _ = load_config([])
    assert "from step 3 on" in summary(history, tmp_path, job=make_plan(config))
    assert "idle" not in summary(history, tmp_path), "a job of one role"


NO_KL = "actor_rollout_ref.actor.use_kl_loss=false"  # 4 actor ranks and 4 engines on GPUs of their own
SPLIT = ("cluster.actor_world_size=4", "cluster.rollout_world_size=4")


def steps(*, count: int = 4, **idle: float) -> list[dict[str, float]]:
    """The first two steps show the opposite, since they hold compilation."""
    rows = []
    for step in range(1, count + 1):
        shares = {f"perf/idle/{role}": share if step > 2 else 1 - share for role, share in idle.items()}
        rows.append({"step": step, "timing_s/step": 2.0, **shares})
    return rows


def sentence(rows: list[dict[str, float]], *overrides: str) -> str:
    return who_waited(rows, make_plan(load_config(list(overrides))[0]))


@pytest.mark.parametrize(
    ("actor", "rollout", "overrides", "parts"),
    [
        (0.03, 0.45, (), ("fewer engines", "more actor", *SPLIT, "ranks 3%", "engines 45%")),
        (0.45, 0.03, (), ("fewer actor", "more engines", *SPLIT, "ranks 45%", "engines 3%")),
        (0.10, 0.15, (), ("balanced",)),
        (0.50, 0.45, (), ("trainer.max_staleness=0 -> 1",)),
        (0.30, 0.25, ("trainer.max_staleness=1",), ("trainer.max_staleness=1 -> 2",)),
        (0.03, 0.45, ("cluster.rollout_world_size=1",), ("more GPUs", "actor ranks", "cluster.rollout_world_size=1")),
        (0.45, 0.03, ("cluster.actor_world_size=1",), ("more GPUs", "engines", "cluster.actor_world_size=1")),
    ],
)
def test_roles_with_gpus_of_their_own(
    actor: float, rollout: float, overrides: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    text = sentence(steps(actor=actor, rollout=rollout), "cluster=node8", NO_KL, *overrides)
    says(text, "step 3", *parts)


def test_roles_that_share_gpus() -> None:
    """Of the GPUs of actor and reference, 50 % and 30 % of the time are used: 20 % are idle."""
    text = sentence(steps(actor=0.5, ref=0.7, rollout=0.05), "cluster=node8")
    says(text, "ref 20%", "engines 5%", "balanced")
    rows = steps(actor=0.5, rollout=0.45)
    says(sentence(rows, "cluster=single_gpu"), "cluster.colocate=all", "no split")
    text = sentence(rows)
    says(text, "cores", "no split")
    assert "cluster." not in text


def test_steps_count_by_their_seconds_and_the_first_two_do_not() -> None:
    rows = steps(count=2, actor=0.5, rollout=0.5)
    assert sentence(rows) == sentence([{"step": 0, "val-core/x": 0.5}, *rows]) == ""
    for step, seconds, share in ((3, 3.0, 0.2), (4, 1.0, 0.6)):
        rows.append({"step": step, "timing_s/step": seconds, "perf/idle/actor": share, "perf/idle/rollout": 0.3})
    says(sentence(rows), "ranks 30%", "engines 30%")
    assert sentence([{"step": step, "timing_s/step": 1.0} for step in range(1, 9)]) == ""
