"""The rules of a healthy run: one function each, which looks at the metrics of a step.

A rule gets the step's metrics, what was seen before, and `trainer.health`. It returns a `Look`, or None where its
metric was not measured. A new rule is a function here, an entry of `RULES`, and a section of `HealthConfig` (and of
grpo.yaml) under the same name. How often a rule must be broken, and what happens then, is in health.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median

from grpo_dist.config.schema_health import HealthConfig

KL = ("actor/kl_loss", "actor/reward_kl_penalty")
ENTROPY = ("actor/entropy", "rollout_corr/rollout_log_ppl")  # exact; estimated from the tokens that were sampled
START_STEPS = 5  # one batch alone is a noisy measure of where entropy starts
MOST_NAMED = 5

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Look:
    """What a rule found in one step.

    Attributes:
        broken: whether the rule is broken in this step.
        seen: the metric, its value and the limit.
        cause: what that most likely comes from.
        advice: what to do.
    """

    broken: bool
    seen: str
    cause: str
    advice: str


@dataclass
class Past:
    """What the steps of this process have shown so far, the current one included.

    Attributes:
        window: gradient norms to keep, besides the current one.
        grad_norms: the last of them.
        first_entropies: those of the first `START_STEPS` steps, nats.
        lowest: lowest score of a response.
        highest: highest score of a response.
    """

    window: int
    grad_norms: deque[float] = field(default_factory=deque)
    first_entropies: list[float] = field(default_factory=list)
    lowest: float = math.inf
    highest: float = -math.inf

    def add(self, metrics: Metrics) -> None:
        """Take in a step. Numbers that are not finite are left out."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        if "actor/grad_norm" in finite:
            self.grad_norms.append(finite["actor/grad_norm"])
            if len(self.grad_norms) > self.window + 1:
                self.grad_norms.popleft()
        if len(self.first_entropies) < START_STEPS and (name := _first(finite, ENTROPY)):
            self.first_entropies.append(finite[name])
        self.lowest = min(self.lowest, finite.get("critic/score/min", math.inf))
        self.highest = max(self.highest, finite.get("critic/score/max", -math.inf))

    def progress(self, metrics: Metrics) -> float:
        """How far the mean score is from the lowest (0) to the highest (1) score seen; 0 counts as seen."""
        low, high = min(0.0, self.lowest), max(0.0, self.highest)
        return (metrics["critic/score/mean"] - low) / (high - low) if high > low else 0.0


Rule = Callable[[Metrics, Past, HealthConfig], Look | None]


def kl(metrics: Metrics, past: Past, config: HealthConfig) -> Look | None:
    """The policy stays near the reference."""
    name, limit = _first(metrics, KL), config.kl.threshold
    if name is None:
        return None
    return Look(
        metrics[name] > limit,
        f"{name} is {metrics[name]:.3g} nats per token, above {limit:g}",
        "the policy runs away from the reference: its steps are too large, or the KL weighs too little",
        "lower actor.optim.lr, or raise actor.kl_loss_coef (algorithm.kl_ctrl.kl_coef); read rollouts/ for broken text",
    )


def ppo_kl(metrics: Metrics, past: Past, config: HealthConfig) -> Look | None:
    """An update moves the policy a little at a time: clipping trusts no more."""
    limit = config.ppo_kl.threshold
    if "actor/ppo_kl" not in metrics:
        return None
    return Look(
        abs(metrics["actor/ppo_kl"]) > limit,
        f"actor/ppo_kl is {metrics['actor/ppo_kl']:.3g} nats per token, beyond +-{limit:g}",
        "the optimizer steps on one batch carry the policy far from the one that the batch was judged by",
        "lower actor.optim.lr or actor.ppo_epochs, or raise actor.ppo_mini_batch_size (fewer steps for each batch)",
    )


def grad_norm(metrics: Metrics, past: Past, config: HealthConfig) -> Look | None:
    """The gradient norm, before clipping, is of the size it had in the last steps."""
    rule, earlier = config.grad_norm, list(past.grad_norms)[:-1]
    if "actor/grad_norm" not in metrics:
        return None
    norm = metrics["actor/grad_norm"]
    limits: dict[str, float] = {}
    if rule.threshold is not None:
        limits["trainer.health.grad_norm.threshold"] = rule.threshold
    if len(earlier) >= rule.window // 2:
        usual = median(earlier)
        limits[f"the median of the {len(earlier)} steps before is {usual:.3g}"] = max(rule.factor * usual, rule.floor)
    passed = [f"{limit:.3g} ({what})" for what, limit in limits.items() if norm > limit]
    return Look(
        bool(passed),
        f"actor/grad_norm is {norm:.3g}, above {' and '.join(passed)}",
        "a batch of outliers (very long responses, huge rewards, old samples), or a policy that comes apart",
        "if it goes on: lower actor.optim.lr or actor.grad_clip; look at critic/rewards/* and rollouts/ of this step",
    )


def entropy(metrics: Metrics, past: Past, config: HealthConfig) -> Look | None:
    """The policy goes on trying different things until the task is solved."""
    rule, name = config.entropy, _first(metrics, ENTROPY)
    if name is None or "critic/score/mean" not in metrics:
        return None
    started = len(past.first_entropies) == START_STEPS
    start = fmean(past.first_entropies) if past.first_entropies else 0.0
    limit = max(rule.floor, rule.share_of_start * start if started else 0.0)
    return Look(
        started and metrics[name] < limit and past.progress(metrics) < config.solved,
        f"{name} is {metrics[name]:.3g} nats per token, below {limit:.3g}; it began at {start:.3g}, and the mean score "
        f"{metrics['critic/score/mean']:.3g} is not the best one",
        "the policy is sure of itself before the task is solved: all responses are alike, and nothing new is found",
        "raise actor.clip_ratio_high (0.28), actor.entropy_coeff or rollout.temperature, or lower actor.optim.lr",
    )


def zero_variance(metrics: Metrics, past: Past, config: HealthConfig) -> Look | None:
    """Groups whose responses differ in score: only they teach anything."""
    limit, solved = config.zero_variance.threshold, config.solved
    if "critic/zero_variance_groups" not in metrics or "critic/score/mean" not in metrics:
        return None
    share, score = metrics["critic/zero_variance_groups"], past.progress(metrics)
    if score >= solved:
        cause = "the prompts are too easy by now: nearly all responses earn the best score"
        advice = "nothing is wrong if this is the goal; to go on, train on harder prompts, or stop here"
    elif 1 - score >= solved:
        cause = "the prompts are too hard: nearly all responses earn the lowest score (or the reward cannot read them)"
        advice = (
            "take easier prompts or a stronger model, raise rollout.n, or give part of the reward for part of the work"
        )
    else:
        cause = "some prompts are always solved and the others never"
        advice = "filter the prompts by difficulty, raise rollout.n, or sample until groups differ (filter_groups)"
    mean = f"the mean score is {metrics['critic/score/mean']:.3g}"
    seen = f"in {share:.0%} of the groups all responses score the same, more than {limit:.0%}; {mean}"
    return Look(share > limit, seen, cause, advice)


def truncation(metrics: Metrics, past: Past, config: HealthConfig) -> Look | None:
    """Responses end by themselves."""
    limit = config.truncation.threshold
    if "response_length/clip_ratio" not in metrics:
        return None
    return Look(
        metrics["response_length/clip_ratio"] > limit,
        f"{metrics['response_length/clip_ratio']:.0%} of the responses were cut off at data.max_response_length, more "
        f"than {limit:.0%}",
        "responses need more room, or the policy rambles or does not know how to end one (chat template, stop)",
        "raise data.max_response_length, or set reward.overlong_buffer.enable or algorithm.mask_truncated_responses",
    )


def rollout_mismatch(metrics: Metrics, past: Past, config: HealthConfig) -> Look | None:
    """Engine and trainer give the same tokens the same probabilities."""
    name, limit = "training/rollout_probs_diff_mean", config.rollout_mismatch.threshold
    if name not in metrics:
        return None
    return Look(
        metrics[name] > limit,
        f"{name} is {metrics[name]:.3g}, above {limit:g}: engine and trainer disagree about the same tokens",
        "top_p, top_k or min_p cut the distribution, types differ (rollout.dtype, actor.fsdp_config.dtype), the engine "
        "holds other weights than the policy, or responses are old (trainer.max_staleness)",
        "mend what differs; algorithm.rollout_correction.rollout_is=token weighs what is left",
    )


def reward_failures(metrics: Metrics, past: Past, config: HealthConfig) -> Look | None:
    """The reward function scores every response."""
    limit = config.reward_failures.threshold
    if "reward/failure_rate" not in metrics:
        return None
    return Look(
        metrics["reward/failure_rate"] > limit,
        f"the reward function failed on {metrics['reward/failure_rate']:.2%} of the responses, more than {limit:.2%}",
        "it raises on unusual text, is too slow for reward.timeout_s, or a service behind it does not answer",
        "the message about unscored responses shows the first one; these responses train with reward.failure_score",
    )


def no_reward(metrics: Metrics, past: Past, config: HealthConfig) -> Look | None:
    """Some response has earned something since the start."""
    if "critic/score/max" not in metrics:
        return None
    return Look(
        past.lowest == past.highest <= config.no_reward.threshold,
        f"every response since the start of this run scored {past.highest:g}",
        "the reward function does not find the answers (format, parsing, ground_truth), or the task is out of reach",
        "read a few responses in rollouts/, and score one by hand; show the format in the prompt, or reward it",
    )


def non_finite(metrics: Metrics, past: Past, config: HealthConfig) -> Look | None:
    """Every metric is a finite number."""
    names = [f"{name}={value:g}" for name, value in metrics.items() if not math.isfinite(value)]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return Look(
        bool(names),
        f"{', '.join(names[:MOST_NAMED])}{more} not finite",
        "a reward function that returned nan, a division by 0, or log-probs that overflow",
        "find the metric in docs/metrics.md, and what makes it; do not trust the step that it came from",
    )


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        kl,
        ppo_kl,
        grad_norm,
        entropy,
        zero_variance,
        truncation,
        rollout_mismatch,
        reward_failures,
        no_reward,
        non_finite,
    )
}


def _first(metrics: Metrics, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in metrics), None)
