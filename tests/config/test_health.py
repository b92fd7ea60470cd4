"""The health rules on paper numbers: each fires above its limit, after so many steps, and not on a run that learns."""

import math
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config.load import readable_config
from grpo_dist.config.schema_health import RULES, START_STEPS, HealthConfig, HealthMonitor, Judgement
from grpo_dist.errors import HealthError
from grpo_dist.plan.commands import load_config
from tests.config.read_back import read_back
from tests.messages import refuses, says

DEFAULTS = load_config([])[0].trainer.health
MEAN, KL, PPO_KL, NORM = "critic/score/mean", "actor/kl_loss", "actor/ppo_kl", "actor/grad_norm"
ENTROPY, SAME, CUT = "rollout_corr/rollout_log_ppl", "critic/zero_variance_groups", "response_length/clip_ratio"
MISMATCH, FAILED = "training/rollout_probs_diff_mean", "reward/failure_rate"
APART = "training/agreement/of_limit"

# A step of a run that learns.
HEALTHY = {KL: 0.03, PPO_KL: 0.001, NORM: 0.4, ENTROPY: 0.5, SAME: 0.2, CUT: 0.05, MISMATCH: 0.01, APART: 0.01}
HEALTHY |= {FAILED: 0.0, "critic/score/min": 0.0, "critic/score/mean": 0.5, "critic/score/max": 1.0}
# 25 steps of the built-in job with seed 1; the last column is the logarithm of rollout_ppl.
BUILTIN = {
    MEAN: ".48 .46 .61 .65 .65 .66 .69 .71 .73 .74 .76 .82 .85 .82 .85 .84 .94 .91 .90 .86 .89 .95 .96 .93 .93",
    SAME: ".31 .12 .22 .12 .25 .25 .22 .09 .12 .19 .12 .31 .25 .22 .41 .31 .66 .53 .44 .28 .47 .69 .75 .50 .50",
    KL: ".00 .01 .03 .04 .04 .03 .03 .05 .04 .04 .04 .04 .04 .04 .04 .05 .03 .03 .04 .04 .04 .03 .03 .03 .03",
    NORM: ".47 .65 .54 .54 .42 .34 .30 .42 .47 .39 .45 .42 .27 .29 .40 .37 .29 .34 .32 .28 .23 .16 .22 .29 .26",
    ENTROPY: ".06 .08 .09 .08 .08 .07 .07 .08 .07 .06 .08 .07 .06 .06 .06 .06 .03 .03 .04 .05 .04 .02 .03 .03 .03",
}
# What it comes to when it goes on: solved, with a mistake now and then.
SOLVED = {MEAN: 0.99, SAME: 0.95, ENTROPY: 0.0004, NORM: 0.01, KL: 0.04}


def config(repeat_every: int = DEFAULTS.repeat_every, solved: float = DEFAULTS.solved, **rules: dict) -> HealthConfig:
    """The defaults, with changes: `kl={"steps": 1}`."""
    values: dict[str, Any] = DEFAULTS.model_dump() | {"repeat_every": repeat_every, "solved": solved}
    return HealthConfig.model_validate(values | {name: values[name] | change for name, change in rules.items()})


def run(monitor: HealthMonitor, *steps: dict[str, float], first: int = 1) -> list[Judgement]:
    return [monitor.judge(HEALTHY | change, first + i) for i, change in enumerate(steps)]


def broken(judgements: list[Judgement], rule: str) -> list[float]:
    return [judgement.metrics[f"health/{rule}"] for judgement in judgements]


def texts(judgements: list[Judgement]) -> list[str]:
    return [text for judgement in judgements for text in judgement.warnings]


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
    validation = HealthMonitor(DEFAULTS).judge({"val-core/arithmetic/acc/mean@1": 0.3}, 0)
    assert validation == Judgement({"health/non_finite": 0.0}), "no metric, no judgement"
    off = {name: {"action": "off"} for name in RULES}
    assert HealthMonitor(config(**off)).judge(dict.fromkeys(HEALTHY, math.nan), 1) == Judgement()


def scores(lowest: float, mean: float, highest: float) -> dict[str, float]:
    return {"critic/score/min": lowest, "critic/score/mean": mean, "critic/score/max": highest}


WARM: list[dict] = [{}] * START_STEPS
LOW = {ENTROPY: 0.001}
FIXED = {"threshold": 2.0}
EXACT = [{"actor/entropy": value} for value in (*[0.5] * START_STEPS, 0.3, 0.29)]
Case = tuple[str, dict[str, Any], list[dict[str, float]], list[int], list[object]]
# Rule, its changed settings, changes of healthy steps; the steps in which it is then broken, and parts of the message.
CASES: dict[str, Case] = {
    "steps in a row are in a row": ("kl", {}, [{KL: 5.0}, {KL: 5.0}, {}, {KL: 5.0}, {KL: 5.0}], [], []),
    # the median of 0.4 counts once half of 20 steps are there, and the limit is 4
    "norm, too early": ("grad_norm", {}, [*[{}] * 9, {NORM: 4.01}], [], []),
    "norm, half of the window": ("grad_norm", {}, [*[{}] * 10, {NORM: 4.01}], [11], [4.01, 4, "10 steps", 0.4]),
    "norm at the limit": ("grad_norm", {}, [*[{}] * 30, {NORM: 4.0}, {NORM: 4.0}], [], []),
    "norm up to the floor": ("grad_norm", {}, [*[{NORM: 0.001}] * 20, {NORM: 1.0}, {NORM: 1.01}], [22], []),
    # (0.4 + 40) / 2 = 20.2 after two; with three 40s among the last four the median is 40
    "norm at a new level": ("grad_norm", {"window": 4}, [{}, {}, {}, {}, *[{NORM: 40.0}] * 4], [5, 6], []),
    "norm, fixed": ("grad_norm", FIXED, [{NORM: 2.0}, {NORM: 2.01}], [2], ["2 (trainer.health.grad_norm.threshold)"]),
    # it begins at 0.5, so 0.05 is the limit
    "entropy at the limit": ("entropy", {}, [*WARM, *[{ENTROPY: 0.05}] * 9], [], []),
    "entropy below": ("entropy", {}, [*WARM, *[{ENTROPY: 0.049}] * 3], [8], [ENTROPY, "0.049 nats", 0.05, 0.5]),
    "entropy, too early": ("entropy", {"steps": 1}, [{ENTROPY: 0.0}] * (START_STEPS - 1), [], []),
    "entropy of a solved task": ("entropy", {}, [*WARM, *[LOW | scores(0, 0.9, 1)] * 3], [], []),
    "entropy of one nearly solved": ("entropy", {}, [*WARM, *[LOW | scores(0, 0.89, 1)] * 3], [8], []),
    "entropy, solved is -0.1": ("entropy", {}, [scores(-1, 0, 0)] * 5 + [LOW | scores(-1, -0.1, 0)] * 3, [], []),
    "entropy, -0.11 is not": ("entropy", {}, [scores(-1, 0, 0)] * 5 + [LOW | scores(-1, -0.11, 0)] * 3, [8], []),
    "entropy, no score known": ("entropy", {}, [*WARM, *[LOW | scores(0, math.nan, 1)] * 9], [], []),
    "entropy, its exact value first": ("entropy", {"floor": 0.3, "share_of_start": 0.0, "steps": 1}, EXACT, [7], []),
    "groups too easy": ("zero_variance", {}, [{SAME: 0.95} | scores(0, 0.9, 1)] * 5, [5], ["95%", "too easy"]),
    "groups of both kinds": ("zero_variance", {}, [{SAME: 0.95}] * 5, [5], ["95%", "always solved"]),
    "groups too hard": ("zero_variance", {}, [{SAME: 0.95} | scores(0, 0.1, 1)] * 5, [5], ["95%", "too hard"]),
    "no reward from the start": ("no_reward", {}, [scores(0, 0, 0)] * 10, [10], ["step 10", "start", 0]),
    "a reward at the start": ("no_reward", {}, [{}, *[scores(0, 0, 0)] * 30], [], []),
    "all solved": ("no_reward", {}, [scores(1, 1, 1)] * 30, [], []),
    "penalties that differ": ("no_reward", {}, [scores(-1, -0.5, -0.2)] * 30, [], []),
    "a point for the format": ("no_reward", {"threshold": 0.1, "steps": 2}, [scores(0.1, 0.1, 0.1)] * 2, [2], []),
    "not finite": ("non_finite", {}, [{"x": math.nan, KL: math.inf}, {}], [1], ["x=nan", f"{KL}=inf"]),
    "engines at the limit": ("agreement", {"action": "warn"}, [{APART: 1.0}], [], []),
    "engines above it": ("agreement", {"action": "warn"}, [{APART: 1.01}, {}], [1], ["grpo-dist agreement"]),
    "engines above twice of it": ("agreement", {"action": "warn", "threshold": 2}, [{APART: 2.0}], [], []),
    "many not finite": ("non_finite", {}, [{f"m{i}": math.nan for i in range(7)}], [1], ["m4=nan", 2]),
}
for rule, metric, limit in (
    ("kl", KL, 1.0),
    ("ppo_kl", PPO_KL, 0.1),
    ("ppo_kl", PPO_KL, -0.1),
    ("zero_variance", SAME, 0.9),
    ("truncation", CUT, 0.3),
    ("rollout_mismatch", MISMATCH, 0.05),
    ("reward_failures", FAILED, 0.005),
):
    in_a_row, above = getattr(DEFAULTS, rule).steps, {metric: math.nextafter(limit, math.copysign(2, limit))}
    CASES[f"{rule} at {limit}"] = (rule, {}, [{metric: limit}] * 20, [], [])
    steps, parts = [*[above] * (in_a_row + 1), {metric: limit}], [f"health/{rule}", f"step {in_a_row}"]
    CASES[f"{rule} above {limit}"] = (rule, {}, steps, [in_a_row, in_a_row + 1], parts)


@pytest.mark.parametrize(("rule", "settings", "steps", "expected", "parts"), CASES.values(), ids=CASES)
def test_a_rule_is_broken_above_its_limit_for_so_many_steps(
    rule: str, settings: dict[str, Any], steps: list[dict[str, float]], expected: list[int], parts: list[object]
) -> None:
    others = {name: {"action": "off"} for name in RULES if name != rule}
    judgements = run(HealthMonitor(config(**others, **{rule: settings})), *steps)
    assert [1 + i for i, value in enumerate(broken(judgements, rule)) if value] == expected
    assert len(texts(judgements)) == bool(expected), "said once"
    if expected:
        says(texts(judgements)[0], f"health/{rule}", f"step {expected[0]}", *parts)
        assert all(f"\n  {line}: " in texts(judgements)[0] for line in ("likely", "try"))
    together = run(HealthMonitor(config(**{rule: settings})), *steps)
    assert broken(together, rule) == broken(judgements, rule), "whatever the other rules do"


def test_a_step_without_the_metric_ends_the_row_unless_another_one_has_it() -> None:
    monitor, far = HealthMonitor(DEFAULTS), HEALTHY | {KL: 5.0}
    silent = {name: value for name, value in HEALTHY.items() if name != KL}
    steps = [far, far, silent, far, far, silent, far, far, far]
    judged = [monitor.judge(metrics, 1 + i).metrics.get("health/kl") for i, metrics in enumerate(steps)]
    assert judged == [0, 0, None, 0, 0, None, 0, 0, 1]
    monitor = HealthMonitor(config(kl={"steps": 1}))
    assert "health/kl" not in monitor.judge(silent, 1).metrics
    assert monitor.judge(silent | {"actor/reward_kl_penalty": 1.5}, 2).metrics["health/kl"] == 1


def test_nan_spoils_no_window_and_there_is_no_flood() -> None:
    nothing = dict.fromkeys(HEALTHY, math.nan)
    steps = {name: {"steps": 1} for name in RULES}
    judgements = run(HealthMonitor(config(**steps)), nothing, *[{}] * 30, nothing)
    for judgement in (judgements[0], judgements[-1]):
        assert [name for name, value in judgement.metrics.items() if value] == ["health/non_finite"]
    assert texts(judgements[1:-1]) == []
    # Told when it breaks, and every 10 steps; also where it breaks again and again.
    for steps, told in (([{KL: 2.0}] * 25, [1, 11, 21]), ([{}, {KL: 2.0}] * 12, [2, 12, 22])):
        judgements = run(HealthMonitor(config(repeat_every=10, kl={"steps": 1})), *steps)
        assert [i + 1 for i, judgement in enumerate(judgements) if judgement.warnings] == told
    assert broken(judgements, "kl") == [0.0, 1.0] * 12, "the metric has every step"


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
    columns = {name: [float(value) for value in values.split()] for name, values in BUILTIN.items()}
    steps = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    steps = [step | {"response_length/clip_ratio": 0.0, "training/rollout_probs_diff_mean": 3e-7} for step in steps]
    monitor = HealthMonitor(DEFAULTS)
    assert len(steps) == 25
    assert texts(run(monitor, *steps)) == []
    (hint,) = texts(run(monitor, *[SOLVED, SOLVED | {"actor/grad_norm": 0.5}] * 15, first=26))
    says(hint, "health/zero_variance", "step 30", "5 steps", "too easy", "nothing")
