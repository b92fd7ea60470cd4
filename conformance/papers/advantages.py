"""Advantage estimators: (batch, options) -> (advantages, returns); the score of a row without tokens counts too."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.papers import Rows, Undecided, by_token, masked, mean

Options = Mapping[str, Any]
Estimator = Callable[["Batch", Options], tuple[Rows, Rows]]
GROUP_EPS, WHITEN_EPS = 1e-6, 1e-8  # verl's
# Below this spread whitened numbers are rounding, enlarged.
LEAST_SPREAD = 0.1


@dataclass(frozen=True)
class Batch:
    """What an estimator sees: rewards and mask of each token, the group of each row, and what only some read.

    `entropies` and `norms` are the policy's before the update (RL-ZVP, OTB), `baselines` the scores of the greedy
    responses (remax), `steps` the last tokens of steps (process supervision), `states` what each turn begins from, on
    its tokens (GiGPO), `components` the scores of each row by name (GDPO).
    """

    rewards: Rows
    masks: Rows
    index: list[Any] = field(default_factory=list)
    values: Rows = field(default_factory=list)
    entropies: Rows = field(default_factory=list)
    norms: Rows = field(default_factory=list)
    states: Rows = field(default_factory=list)
    baselines: list[float] = field(default_factory=list)
    steps: Rows = field(default_factory=list)
    components: dict[str, list[float]] = field(default_factory=dict)

    @property
    def scores(self) -> list[float]:
        return [sum(row) for row in self.rewards]

    def group(self, i: int) -> list[int]:
        """The rows that answer the same prompt as row i, itself among them."""
        return [j for j, label in enumerate(self.index) if label == self.index[i]]

    def group_scores(self, i: int) -> list[float]:
        return [self.scores[j] for j in self.group(i)]

    @property
    def centred(self) -> list[float]:
        """Each score less the mean of its group."""
        return [score - mean(self.group_scores(i)) for i, score in enumerate(self.scores)]


def sample_std(values: list[float]) -> float:
    """With n - 1; 0 of one number."""
    squares = sum((value - mean(values)) ** 2 for value in values)
    return math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else 0.0


def spread(batch: Batch, per_row: list[float]) -> tuple[Rows, Rows]:
    """One number per response, on each of its trained tokens."""
    rows = [[value * m for m in mask] for value, mask in zip(per_row, batch.masks, strict=True)]
    return rows, rows


def whiten(rows: Rows, masks: Rows) -> Rows:
    """To mean 0 and variance 1 over the trained tokens of the batch."""
    tokens = [value for row, mask in zip(rows, masks, strict=True) for value in masked(row, mask)]
    centre, deviation = mean(tokens), sample_std(tokens)
    if 1e-12 < deviation < LEAST_SPREAD:
        raise Undecided(f"a spread of {deviation}")
    return by_token(lambda value, m: (value - centre) / math.sqrt(deviation**2 + WHITEN_EPS) * m, rows, masks)


def scale_of(scores: list[float], options: Options) -> float:
    """What a group's centred scores are divided by; Dr. GRPO (arXiv 2503.20783) has none."""
    return sample_std(scores) + GROUP_EPS if options["norm_adv_by_std_in_grpo"] else 1.0


def grpo(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """DeepSeekMath (arXiv 2402.03300), section 4.1.2: (r - mean) / std."""
    scales = [scale_of(batch.group_scores(i), options) for i in range(len(batch.scores))]
    return spread(batch, [value / scale for value, scale in zip(batch.centred, scales, strict=True)])


def grpo_passk(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """Pass@k (arXiv 2503.19595): the best of a group earns its lead over the second best, the others nothing."""
    advantages = []
    for i, score in enumerate(batch.scores):
        group = sorted(batch.group_scores(i), reverse=True)
        lead = score - group[1] if len(group) > 1 and score == group[0] else 0.0
        advantages.append(lead / scale_of(group, options))
    return spread(batch, advantages)


def rloo(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """RLOO (arXiv 2402.14740): r - mean of the others' r."""
    advantages = []
    for i, score in enumerate(batch.scores):
        others = [batch.scores[j] for j in batch.group(i) if j != i]
        advantages.append(score - mean(others) if others else 0.0)
    return spread(batch, advantages)


def opo(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """OPO (arXiv 2505.23585): r - sum(length r) / sum(length) over the group."""
    advantages = []
    for i, score in enumerate(batch.scores):
        lengths, scores = [sum(batch.masks[j]) for j in batch.group(i)], batch.group_scores(i)
        weighed = sum(length * s for length, s in zip(lengths, scores, strict=True))
        alone = len(scores) == 1
        advantages.append(0.0 if alone or not sum(lengths) else score - weighed / sum(lengths))
    return spread(batch, advantages)


def gpg(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """GPG (arXiv 2504.02546): alpha (r - mean) / F_norm; alpha as verl's, N / number of scores not 0."""
    alpha = len(batch.scores) / max(1, sum(score != 0 for score in batch.scores))
    return spread(batch, [alpha * value / options["f_norm"] for value in batch.centred])


def maxrl(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """MaxRL (arXiv 2602.02710): (r - mean) / mean; nothing where the mean is not positive."""
    values = []
    for i, score in enumerate(batch.scores):
        centre = mean(batch.group_scores(i))
        if 0 < abs(centre) < LEAST_SPREAD:
            raise Undecided(f"a mean of {centre}")
        values.append((score - centre) / centre if centre > 0 else 0.0)
    return spread(batch, values)


def lite_ppo(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """Lite PPO (arXiv 2508.08221): the mean is the group's, the standard deviation that of all rewards of the batch."""
    scale = sample_std(batch.scores) + GROUP_EPS
    return spread(batch, [value / scale for value in batch.centred])


def scale_rl(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """ScaleRL (arXiv 2510.13786): r - mean of the group, divided by the deviation of these over what trains."""
    centred = batch.centred
    scale = sample_std([value for value, mask in zip(centred, batch.masks, strict=True) if any(mask)])
    if scale < LEAST_SPREAD and max(map(abs, centred)) > 0:
        raise Undecided(f"a spread of {scale}")
    return spread(batch, [value / (scale + GROUP_EPS) for value in centred])


def rl_zvp(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """RL-ZVP (arXiv 2509.21880): GRPO; with one score in the group alpha H if it is right, alpha (H - max H) if not."""
    rows, _ = grpo(batch, options)
    for i, score in enumerate(batch.scores):
        group = batch.group_scores(i)
        if len(group) > 1 and min(group) == max(group):
            own = masked(batch.entropies[i], batch.masks[i])
            least = 0.0 if score > 0 else max(own, default=0.0)
            pairs = zip(batch.entropies[i], batch.masks[i], strict=True)
            rows[i] = [options["zvp_alpha"] * (entropy - least) * m for entropy, m in pairs]
    return rows, rows


def returns_to_go(rewards: list[float], mask: list[float], gamma: float) -> list[float]:
    """G_t = r_t + gamma G_{t+1}; what lies between two trained tokens takes no time."""
    returns, following = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            returns[t] = following = rewards[t] + gamma * following
        else:
            following += rewards[t]
    return returns


def all_returns(batch: Batch, gamma: float) -> Rows:
    return [returns_to_go(*row, gamma) for row in zip(batch.rewards, batch.masks, strict=True)]


def reinforce_plus_plus(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """REINFORCE++ (arXiv 2501.03262): the return to go, whitened over the batch."""
    returns = all_returns(batch, options["gamma"])
    return whiten(returns, batch.masks), returns


def distill(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """Policy gradient (MiniLLM, arXiv 2306.08543, eq. 3, without its mixing): the return to go, as it is."""
    returns = all_returns(batch, options["gamma"])
    return returns, returns


def reinforce_plus_plus_baseline(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """REINFORCE++-baseline (arXiv 2501.03262): r - mean of the group, whitened over the batch."""
    advantages = whiten(spread(batch, batch.centred)[0], batch.masks)
    return advantages, advantages


def remax(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """ReMax (arXiv 2310.10505): the return to go less the greedy response's score."""
    returns = all_returns(batch, 1.0)
    baselines, _ = spread(batch, batch.baselines)
    return by_token(lambda g, baseline, m: (g - baseline) * m, returns, baselines, batch.masks), returns


def gae_row(
    rewards: list[float], values: list[float], mask: list[float], options: Options
) -> tuple[list[float], list[float]]:
    """GAE (arXiv 1506.02438): A_t = sum_l (gamma lam)^l delta_{t+l}; returns A + V.

    The trained tokens are the steps; a step's reward that comes later than its token, before the next one, belongs to
    what follows the token.
    """
    gamma, lam = options["gamma"], options["lam"]
    steps = [t for t in range(len(rewards)) if mask[t]]
    ends = [*steps, len(rewards)][1:]
    deltas = []
    for k, (t, end) in enumerate(zip(steps, ends, strict=True)):
        next_value = values[steps[k + 1]] if k + 1 < len(steps) else 0.0
        deltas.append(rewards[t] + gamma * (sum(rewards[t + 1 : end]) + next_value) - values[t])
    advantages, returns = [0.0] * len(rewards), [0.0] * len(rewards)
    for k, t in enumerate(steps):
        advantages[t] = sum((gamma * lam) ** power * delta for power, delta in enumerate(deltas[k:]))
        returns[t] = advantages[t] + values[t]
    return advantages, returns


def gae(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """GAE, whitened over the trained tokens of the batch as in verl."""
    rows = zip(batch.rewards, batch.values, batch.masks, strict=True)
    pairs = [gae_row(rewards, values, mask, options) for rewards, values, mask in rows]
    return whiten([advantages for advantages, _ in pairs], batch.masks), [returns for _, returns in pairs]


def step_rewards(rewards: list[float], mask: list[float], ends: list[float]) -> list[tuple[int, float]]:
    """(last token, reward) of each step; what lies behind the last step is its own, and no step at all is one."""
    last = [t for t, is_end in enumerate(ends) if is_end]
    last = last or [t for t, counts in enumerate(mask) if counts][-1:] or [len(rewards) - 1]
    starts, stops = [0, *(t + 1 for t in last[:-1])], [*(t + 1 for t in last[:-1]), len(rewards)]
    return [(t, sum(rewards[start:stop])) for t, start, stop in zip(last, starts, stops, strict=True)]


def grpo_process(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """DeepSeekMath (arXiv 2402.03300), section 4.1.3: the normalised rewards of the steps that are still to end."""
    steps = [step_rewards(*row) for row in zip(batch.rewards, batch.masks, batch.steps, strict=True)]
    advantages = []
    for i, mask in enumerate(batch.masks):
        group = [reward for j in batch.group(i) for _, reward in steps[j]]
        scale, alone = scale_of(group, options), len(batch.group(i)) == 1
        normalised = [(end, 0.0 if alone else (reward - mean(group)) / scale) for end, reward in steps[i]]
        advantages.append([m * sum(value for end, value in normalised if end >= t) for t, m in enumerate(mask)])
    return advantages, advantages


def a2po(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """A*-PO (arXiv 2505.20686), eq. 4: r - V, V = beta ln E exp(r / beta)."""
    beta = options["a2po_beta"]
    groups = [batch.group_scores(i) for i in range(len(batch.scores))]
    values = [beta * math.log(mean([math.exp(score / beta) for score in group])) for group in groups]
    return spread(batch, [score - value for score, value in zip(batch.scores, values, strict=True)])


def rae(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """SPIRAL (arXiv 2506.24119): the reward less the moving average of the agent's; here there is one agent, 0."""
    return spread(batch, [score - options["agent_baselines"][0] for score in batch.scores])


def optimal_token_baseline(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """OTB (arXiv 2602.07078): G_t - sum G_t W_t / sum W_t over the group's t-th trained tokens, W_t = sum of norms."""
    returns = all_returns(batch, 1.0)
    trained = [[t for t, counts in enumerate(mask) if counts] for mask in batch.masks]
    advantages = [[0.0] * len(mask) for mask in batch.masks]
    for i, tokens in enumerate(trained):
        for place, t in enumerate(tokens):
            peers = [j for j in batch.group(i) if len(trained[j]) > place]
            weights = [sum(batch.norms[j][u] for u in trained[j][: place + 1]) for j in peers]
            products = [w * returns[j][trained[j][place]] for w, j in zip(weights, peers, strict=True)]
            advantages[i][t] = returns[i][t] - (sum(products) / sum(weights) if sum(weights) else 0.0)
    return advantages, returns


def gigpo(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """GiGPO (arXiv 2505.10978), eq. 3 to 8: GRPO's advantage plus w times that of the turn among those of its state."""
    rows, _ = grpo(batch, options)
    turns = []  # (row, tokens, state, return)
    for i, states in enumerate(batch.states):
        starts = [t for t, state in enumerate(states) if state and not (t and states[t - 1])]
        following = 0.0
        for k in reversed(range(len(starts))):
            start, stop = starts[k] if k else 0, [*starts, len(states)][k + 1]
            following = sum(batch.rewards[i][start:stop]) + options["gamma"] * following
            turns.append((i, range(start, stop), states[starts[k]], following))
    for i, tokens, state, value in turns:
        peers = [other for j, _, s, other in turns if s == state and batch.index[j] == batch.index[i]]
        scale = scale_of(peers, options)
        for t in tokens:
            rows[i][t] += options["step_advantage_w"] * (value - mean(peers)) / scale * batch.masks[i][t]
    return rows, rows


def gdpo(batch: Batch, options: Options) -> tuple[Rows, Rows]:
    """GDPO (arXiv 2601.05242): each component normalised in its group, their weighted sum whitened over the batch.

    A component that is nan does not apply to the response.
    """
    totals = [0.0] * len(batch.rewards)
    for weight, scores in zip(options["gdpo_reward_weights"], batch.components.values(), strict=True):
        for i, score in enumerate(scores):
            group = [scores[j] for j in batch.group(i) if not math.isnan(scores[j])]
            if not math.isnan(score) and sample_std(group) > 0:
                totals[i] += weight * (score - mean(group)) / sample_std(group)
    rows, _ = spread(batch, totals)
    whitened = whiten(rows, batch.masks)
    return whitened, whitened


NAMED = (
    grpo, grpo_passk, rloo, opo, gpg, maxrl, lite_ppo, scale_rl, rl_zvp, reinforce_plus_plus,
    reinforce_plus_plus_baseline, remax, distill, gae, grpo_process, gdpo, a2po, rae, optimal_token_baseline, gigpo,
)  # fmt: skip
ESTIMATORS: dict[str, Estimator] = {estimator.__name__: estimator for estimator in NAMED}
