"""The health rules on paper numbers: each fires above its limit, after so many steps, and not on a run that learns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config.load import load_config, readable_config
from grpo_dist.config.schema_health import RULES, HealthConfig
from grpo_dist.errors import ConfigError, HealthError
from grpo_dist.trainer.health import START_STEPS, HealthMonitor, Judgement
from tests.config.read_back import read_back
from tests.messages import refuses, says

DEFAULTS = load_config([])[0].trainer.health
# A step of a run that learns.
HEALTHY = {
    "actor/kl_loss": 0.03,
    "actor/ppo_kl": 0.001,
    "actor/grad_norm": 0.4,
    "rollout_corr/rollout_log_ppl": 0.5,
    "critic/score/mean": 0.5,
    "critic/score/min": 0.0,
    "critic/score/max": 1.0,
    "critic/zero_variance_groups": 0.2,
    "response_length/clip_ratio": 0.05,
    "training/rollout_probs_diff_mean": 0.01,
    "reward/failure_rate": 0.0,
}
# 25 steps of the built-in job with seed 1; the last column is the logarithm of rollout_ppl.
BUILTIN = {
    "critic/score/mean": (
        "0.484 0.461 0.613 0.645 0.645 0.656 0.688 0.707 0.734 0.738 0.758 0.824 0.848 0.816 0.852 0.844 0.938 0.914 "
        "0.895 0.863 0.891 0.949 0.957 0.926 0.93"
    ),
    "critic/zero_variance_groups": (
        "0.312 0.125 0.219 0.125 0.25 0.25 0.219 0.0938 0.125 0.188 0.125 0.312 0.25 0.219 0.406 0.312 0.656 0.531 "
        "0.438 0.281 0.469 0.688 0.75 0.5 0.5"
    ),
    "actor/kl_loss": (
        "0 0.0066 0.0268 0.035 0.0409 0.0343 0.0307 0.0465 0.0442 0.0397 0.0397 0.0402 0.0414 0.0441 0.0444 0.0451 "
        "0.0251 0.027 0.039 0.039 0.0402 0.0277 0.0334 0.0323 0.028"
    ),
    "actor/grad_norm": (
        "0.474 0.647 0.535 0.542 0.418 0.335 0.303 0.423 0.472 0.389 0.446 0.416 0.271 0.294 0.398 0.372 0.288 0.335 "
        "0.319 0.285 0.233 0.156 0.22 0.286 0.262"
    ),
    "rollout_corr/rollout_log_ppl": (
        "0.0574 0.0761 0.089 0.0774 0.0762 0.0708 0.073 0.0848 0.0727 0.0644 0.0757 0.0664 0.061 0.0567 0.0576 0.0565 "
        "0.031 0.0269 0.0418 0.0491 0.0412 0.0234 0.0282 0.0346 0.0317"
    ),
}
# What it comes to when it goes on: solved, with a mistake now and then.
SOLVED = {
    "critic/score/mean": 0.99,
    "critic/zero_variance_groups": 0.95,
    "rollout_corr/rollout_log_ppl": 0.0004,
    "actor/grad_norm": 0.01,
    "actor/kl_loss": 0.04,
}


def config(repeat_every: int = DEFAULTS.repeat_every, solved: float = DEFAULTS.solved, **rules: dict) -> HealthConfig:
    """The defaults, with changes: `kl={"steps": 1}`."""
    values: dict[str, Any] = DEFAULTS.model_dump() | {"repeat_every": repeat_every, "solved": solved}
    return HealthConfig.model_validate(values | {name: values[name] | change for name, change in rules.items()})


def run(monitor: HealthMonitor, *steps: dict[str, float], first: int = 1) -> list[Judgement]:
    """Judge healthy steps with changes."""
    return [monitor.judge(HEALTHY | change, first + i) for i, change in enumerate(steps)]


def broken(judgements: list[Judgement], rule: str) -> list[float]:
    return [judgement.metrics[f"health/{rule}"] for judgement in judgements]


def texts(judgements: list[Judgement]) -> list[str]:
    return [text for judgement in judgements for text in judgement.warnings]


def test_the_table_has_a_row_for_each_rule() -> None:
    assert set(RULES) == HealthConfig.model_fields.keys() - {"repeat_every", "solved"}
    assert set(RULES) == set(DEFAULTS.model_dump()) - {"repeat_every", "solved"}


def test_a_config_names_only_what_it_changes() -> None:
    health = load_config(["trainer.health.kl.action=stop", "trainer.health.grad_norm={window: 4, threshold: 2}"])[0]
    changed = health.trainer.health
    assert changed.kl == DEFAULTS.kl.model_copy(update={"action": "stop"})
    assert changed.grad_norm == DEFAULTS.grad_norm.model_copy(update={"window": 4, "threshold": 2.0})
    assert changed.entropy == DEFAULTS.entropy
    assert read_back(readable_config(health)) == health


def test_a_healthy_run_is_silent() -> None:
    judgements = run(HealthMonitor(DEFAULTS), *[{}] * 60)
    assert texts(judgements) == []
    assert judgements[-1].metrics == {f"health/{name}": 0.0 for name in RULES}


@pytest.mark.parametrize(
    ("rule", "metric", "limit", "sign"),
    [
        ("kl", "actor/kl_loss", 1.0, 1),
        ("ppo_kl", "actor/ppo_kl", 0.1, 1),
        ("ppo_kl", "actor/ppo_kl", 0.1, -1),
        ("zero_variance", "critic/zero_variance_groups", 0.9, 1),
        ("truncation", "response_length/clip_ratio", 0.3, 1),
        ("rollout_mismatch", "training/rollout_probs_diff_mean", 0.05, 1),
        ("reward_failures", "reward/failure_rate", 0.005, 1),
    ],
)
def test_above_the_threshold_for_so_many_steps(rule: str, metric: str, limit: float, sign: int) -> None:
    steps = getattr(DEFAULTS, rule).steps
    at, above = {metric: sign * limit}, {metric: sign * math.nextafter(limit, 2)}
    judgements = run(HealthMonitor(DEFAULTS), *[at] * 20)
    assert texts(judgements) == []
    assert sum(broken(judgements, rule)) == 0
    judgements = run(HealthMonitor(DEFAULTS), *[above] * (steps + 1), at)
    assert broken(judgements, rule) == [0.0] * (steps - 1) + [1.0, 1.0, 0.0]
    assert len(texts(judgements)) == 1
    says(texts(judgements)[0], f"health/{rule}", f"step {steps}")
    assert "\n  likely: " in texts(judgements)[0]
    assert f"\n  try: {texts(judgements)[0].partition('  try: ')[2]}" in texts(judgements)[0]
    other = [name for name in RULES if name != rule and judgements[steps].metrics[f"health/{name}"]]
    assert other == []


def test_steps_in_a_row_are_in_a_row() -> None:
    far = {"actor/kl_loss": 5.0}
    assert sum(broken(run(HealthMonitor(DEFAULTS), far, far, {}, far, far), "kl")) == 0


def test_a_step_without_the_metric_ends_the_row() -> None:
    """Three steps in a row are too many; steps 3 and 6 do not say."""
    monitor, far = HealthMonitor(DEFAULTS), HEALTHY | {"actor/kl_loss": 5.0}
    silent = {name: value for name, value in HEALTHY.items() if name != "actor/kl_loss"}
    steps = [far, far, silent, far, far, silent, far, far, far]
    found = [monitor.judge(metrics, 1 + i).metrics.get("health/kl") for i, metrics in enumerate(steps)]
    assert found == [0, 0, None, 0, 0, None, 0, 0, 1]


def test_kl_in_the_reward_counts_where_there_is_none_in_the_loss() -> None:
    metrics = {name: value for name, value in HEALTHY.items() if name != "actor/kl_loss"}
    monitor = HealthMonitor(config(kl={"steps": 1}))
    assert "health/kl" not in monitor.judge(metrics, 1).metrics
    assert monitor.judge(metrics | {"actor/reward_kl_penalty": 1.5}, 2).metrics["health/kl"] == 1


def test_no_metric_no_judgement() -> None:
    """A step of validation only."""
    judgement = HealthMonitor(DEFAULTS).judge({"val-core/arithmetic/acc/mean@1": 0.3}, 0)
    assert judgement == Judgement({"health/non_finite": 0.0})


def test_gradient_norm_against_its_median() -> None:
    """0.4 before, so 4.0 is the limit; half of 20 steps must be there first."""
    calm: list[dict] = [{}]
    for warm_up, found in ((9, 0.0), (10, 1.0)):
        judgements = run(HealthMonitor(DEFAULTS), *calm * warm_up, {"actor/grad_norm": 4.01})
        assert broken(judgements, "grad_norm")[-1] == found
    says(texts(judgements)[0], 4.01, 4, "10 steps", 0.4)
    at = run(HealthMonitor(DEFAULTS), *calm * 30, {"actor/grad_norm": 4.0}, {"actor/grad_norm": 4.0})
    assert sum(broken(at, "grad_norm")) == 0


def test_gradient_norm_below_the_floor_is_never_too_large() -> None:
    """A solved task has a median near 0, and one group that teaches is a hundred times that."""
    solved: list[dict] = [{"actor/grad_norm": 0.001}]
    judgements = run(HealthMonitor(DEFAULTS), *solved * 20, {"actor/grad_norm": 1.0}, {"actor/grad_norm": 1.01})
    assert broken(judgements, "grad_norm")[-2:] == [0.0, 1.0]


def test_gradient_norm_gets_used_to_a_new_level() -> None:
    """Window of 4: 0.4 0.4 0.4 0.4 | 40 40: the median is 0.4, then 0.4; with three 40s among the last four, 40."""
    monitor = HealthMonitor(config(grad_norm={"window": 4}))
    judgements = run(monitor, {}, {}, {}, {}, *[{"actor/grad_norm": 40.0}] * 4)
    assert broken(judgements, "grad_norm") == [0.0] * 4 + [1.0, 1.0, 0.0, 0.0], "(0.4 + 40) / 2 = 20.2 after two"


def test_gradient_norm_with_a_limit_of_its_own() -> None:
    monitor = HealthMonitor(config(grad_norm={"threshold": 2.0}))
    judgements = run(monitor, {"actor/grad_norm": 2.0}, {"actor/grad_norm": 2.01})
    assert broken(judgements, "grad_norm") == [0.0, 1.0], "from the first step on"
    assert "above 2 (trainer.health.grad_norm.threshold)" in texts(judgements)[0]


def test_entropy_far_below_its_start() -> None:
    """It starts at 0.5, so 0.05 is the limit."""
    name, start = "rollout_corr/rollout_log_ppl", [{}] * START_STEPS
    assert sum(broken(run(HealthMonitor(DEFAULTS), *start, *[{name: 0.05}] * 9), "entropy")) == 0
    judgements = run(HealthMonitor(DEFAULTS), *start, *[{name: 0.049}] * 3)
    assert broken(judgements, "entropy") == [0.0] * (START_STEPS + 2) + [1.0]
    says(texts(judgements)[0], name, "0.049 nats", 0.05, 0.5)
    assert sum(broken(run(HealthMonitor(DEFAULTS), *[{name: 0.0}] * START_STEPS), "entropy")[:-1]) == 0, "warm-up"


def test_entropy_may_fall_once_the_task_is_solved() -> None:
    name, start = "rollout_corr/rollout_log_ppl", [{}] * START_STEPS
    for score, found in ((0.9, 0.0), (0.89, 1.0)):
        low = {name: 0.001, "critic/score/mean": score}
        assert broken(run(HealthMonitor(DEFAULTS), *start, *[low] * 3), "entropy")[-1] == found
    # scores between -1 and 0: solved is -0.1
    for score, found in ((-0.1, 0.0), (-0.11, 1.0)):
        low = {name: 0.001, "critic/score/mean": score, "critic/score/min": -1.0, "critic/score/max": 0.0}
        first = dict.fromkeys(("critic/score/max", "critic/score/mean"), 0.0) | {"critic/score/min": -1.0}
        assert broken(run(HealthMonitor(DEFAULTS), *[first] * START_STEPS, *[low] * 3), "entropy")[-1] == found


def test_entropy_has_a_floor_and_its_exact_value_comes_first() -> None:
    monitor = HealthMonitor(config(entropy={"floor": 0.3, "share_of_start": 0.0, "steps": 1}))
    judgements = run(monitor, *[{"actor/entropy": 0.5}] * START_STEPS, {"actor/entropy": 0.3}, {"actor/entropy": 0.29})
    assert broken(judgements, "entropy")[-2:] == [0.0, 1.0]


@pytest.mark.parametrize(("score", "cause"), [(0.9, "too easy"), (0.5, "always solved"), (0.1, "too hard")])
def test_groups_that_teach_nothing_are_too_easy_or_too_hard(score: float, cause: str) -> None:
    step = {"critic/zero_variance_groups": 0.95, "critic/score/mean": score}
    (text,) = texts(run(HealthMonitor(DEFAULTS), *[step] * 5))
    says(text, "95%", cause)


def test_equal_scores_from_the_start_are_no_reward() -> None:
    zero = {f"critic/score/{name}": 0.0 for name in ("mean", "min", "max")}
    judgements = run(HealthMonitor(config(zero_variance={"action": "off"})), *[zero] * 10)
    assert broken(judgements, "no_reward") == [0.0] * 9 + [1.0]
    says(texts(judgements)[0], "health/no_reward", "step 10", "start", 0)
    once = run(HealthMonitor(DEFAULTS), {}, *[zero] * 30)
    assert sum(broken(once, "no_reward")) == 0, "something was earned at the start"
    one = {f"critic/score/{name}": 1.0 for name in ("mean", "min", "max")}
    assert sum(broken(run(HealthMonitor(DEFAULTS), *[one] * 30), "no_reward")) == 0, "all solved"
    penalties = {"critic/score/mean": -0.5, "critic/score/min": -1.0, "critic/score/max": -0.2}
    assert sum(broken(run(HealthMonitor(DEFAULTS), *[penalties] * 30), "no_reward")) == 0, "scores differ"
    little = {f"critic/score/{name}": 0.1 for name in ("mean", "min", "max")}
    monitor = HealthMonitor(config(no_reward={"threshold": 0.1, "steps": 2}))
    assert broken(run(monitor, little, little), "no_reward") == [0.0, 1.0], "everyone's point for the format"


def test_a_metric_that_is_not_finite_is_named() -> None:
    judgements = run(HealthMonitor(DEFAULTS), {"reward_extra/x/mean": math.nan, "actor/loss": math.inf}, {})
    assert broken(judgements, "non_finite") == [1.0, 0.0]
    says(texts(judgements)[0], "reward_extra/x/mean=nan", "actor/loss=inf")
    many = run(HealthMonitor(DEFAULTS), {f"m{i}": math.nan for i in range(7)})
    says(texts(many)[0], "m4=nan", 2)


def test_nan_spoils_no_window() -> None:
    nothing = dict.fromkeys(HEALTHY, math.nan)
    judgements = run(HealthMonitor(DEFAULTS), nothing, *[{}] * 30)
    assert [name for name, value in judgements[0].metrics.items() if value] == ["health/non_finite"]
    assert texts(judgements[1:]) == []


def test_no_flood() -> None:
    """Told when it breaks, and every 10 steps; also where it breaks again and again."""
    monitor = HealthMonitor(config(repeat_every=10, kl={"steps": 1}))
    told = [i + 1 for i, judgement in enumerate(run(monitor, *[{"actor/kl_loss": 2.0}] * 25)) if judgement.warnings]
    assert told == [1, 11, 21]
    monitor = HealthMonitor(config(repeat_every=10, kl={"steps": 1}))
    judgements = run(monitor, *[{}, {"actor/kl_loss": 2.0}] * 12)
    assert [i + 1 for i, judgement in enumerate(judgements) if judgement.warnings] == [2, 12, 22]
    assert broken(judgements, "kl") == [0.0, 1.0] * 12, "the metric has every step"


def test_off_is_silent() -> None:
    off = {name: {"action": "off"} for name in RULES}
    judgement = HealthMonitor(config(**off)).judge(dict.fromkeys(HEALTHY, math.nan), 1)
    assert judgement == Judgement()


def test_stop_stops_and_names_the_checkpoint() -> None:
    monitor = HealthMonitor(config(kl={"action": "stop", "steps": 2}, truncation={"steps": 2}))
    judgements = run(monitor, *[{"actor/kl_loss": 2.0, "response_length/clip_ratio": 1.0}] * 2)
    shown: list[str] = []
    judgements[0].tell(shown.append, None)
    assert shown == []
    with refuses(HealthError, "health/kl", "step 2", "2 steps", "actor/kl_loss", "run/global_step_1") as caught:
        judgements[1].tell(shown.append, Path("run/global_step_1"))
    assert caught.value.exit_code == 1
    assert len(shown) == 1
    assert "health/truncation" in shown[0], "what only warns is still shown"
    with refuses(HealthError, "no checkpoint"):
        judgements[1].tell(shown.append, None)
    assert judgements[1].metrics["health/kl"] == 1


def test_the_built_in_job_gets_a_hint_at_most() -> None:
    """It learns, then it has learnt: entropy falls to nothing, and nearly all groups agree."""
    columns = {name: [float(value) for value in values.split()] for name, values in BUILTIN.items()}
    steps = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    steps = [step | {"response_length/clip_ratio": 0.0, "training/rollout_probs_diff_mean": 3e-7} for step in steps]
    monitor = HealthMonitor(DEFAULTS)
    assert len(steps) == 25
    assert texts(run(monitor, *steps)) == []
    (hint,) = texts(run(monitor, *[SOLVED, SOLVED | {"actor/grad_norm": 0.5}] * 15, first=26))
    says(hint, "health/zero_variance", "step 30", "5 steps", "too easy", "nothing")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("+trainer.health.kll.action=stop", ["trainer.health.kll.action:"]),
        ("trainer.health.kl.action=halt", ["trainer.health.kl.action=halt"]),
        ("trainer.health.kl.threshold=-1", ["trainer.health.kl.threshold=-1", "0"]),
        ("trainer.health.truncation.threshold=1.5", ["trainer.health.truncation.threshold=1.5", "1"]),
        ("trainer.health.grad_norm.factor=1", ["trainer.health.grad_norm.factor=1", "greater"]),
        ("trainer.health.grad_norm.window=1", ["trainer.health.grad_norm.window=1", "2"]),
    ],
)
def test_mistakes_in_the_section_are_named(override: str, parts: list[str]) -> None:
    with refuses(ConfigError, *parts):
        load_config([override])
