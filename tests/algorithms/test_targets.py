"""What a batch's scores become before an update, on numbers worked out on paper."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_dist.algorithms import compute_advantage
from grpo_dist.algorithms.advantage.inputs import agent_id
from grpo_dist.algorithms.settings import TargetSettings
from grpo_dist.algorithms.targets import answers, compute_targets, high_entropy, turn_states
from grpo_dist.plugins.names import (
    ADV_ESTIMATORS,
    EQUAL_SCORES_ADV_ESTIMATORS,
    SCORELESS_ADV_ESTIMATORS,
    TOKEN_ADV_ESTIMATORS,
)

# Two responses to one prompt, 2 and 3 tokens, scores 1 and 0; the second was cut short.
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.int8)
COLUMNS = {
    "token_level_scores": torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
    "response_mask": MASK,
    "rollout_log_probs": torch.full((2, 3), -1.0),
    "old_log_probs": torch.full((2, 3), -1.5),
    "ref_log_probs": torch.full((2, 3), -2.0),
    "old_entropies": torch.tensor([[0.1, 0.5, 9.0], [0.3, 0.2, 0.4]]),
}
ROWS: dict[str, Any] = {"index": ["a", "a"], "truncated": torch.tensor([0, 1])}
TOKEN_METRICS = {f"critic/{what}/{how}" for what in ("advantages", "returns") for how in ("mean", "max", "min")}
CRITIC_METRICS = {"critic/vf_explained_var", "critic/values/mean", "critic/values/max", "critic/values/min"}
PLAIN = {"norm_adv_by_std_in_grpo": False}
WITHOUT_OLD = {name: values for name, values in COLUMNS.items() if name != "old_log_probs"}


def grpo(columns: dict[str, Tensor] = COLUMNS, kl_coef: float = 0.0, **settings: Any) -> tuple[dict, dict]:
    return compute_targets(columns, TargetSettings("grpo", PLAIN, **settings), **ROWS, kl_coef=kl_coef)


def test_without_options_only_advantages_are_made() -> None:
    out, metrics = grpo()
    assert out.keys() == {"token_level_rewards", "advantages", "returns", "response_mask"}
    torch.testing.assert_close(out["advantages"], torch.tensor([[0.5], [-0.5]]) * MASK)
    assert metrics["rollout_corr/kl"] == pytest.approx(0.5)
    for name in ("critic/advantages", "critic/returns"):
        assert metrics[f"{name}/mean"] == pytest.approx(-0.1)
        assert (metrics[f"{name}/max"], metrics[f"{name}/min"]) == (0.5, -0.5)
    assert not TOKEN_METRICS & grpo(COLUMNS | {"response_mask": MASK * 0})[1].keys()


def test_a_critics_values_are_what_gae_compares_with() -> None:
    """Values 0.5, 0.25 and 0, 1, 0, lam 0: deltas 0.25 - 0.5, 1 - 0.25 and 1 - 0, 0 - 1, 0 - 0; padding has no say."""
    settings, values = TargetSettings("gae", {"lam": 0.0}, has_values=True), torch.tensor([[0.5, 0.25, 9], [0, 1, 0]])
    assert "values" in settings.columns

    def gae(**columns: Tensor) -> tuple[dict[str, Tensor], dict[str, float]]:
        return compute_targets(COLUMNS | {"values": values} | columns, settings, **ROWS)

    out, metrics = gae()
    assert out["returns"].tolist() == [[0.25, 1, 0], [1, 0, 0]]
    deltas, returns = torch.tensor([-0.25, 0.75, 1.0, -1.0, 0.0]), torch.tensor([0.25, 1.0, 1.0, 0.0, 0.0])
    torch.testing.assert_close(out["advantages"][MASK > 0], (deltas - deltas.mean()) / deltas.std())
    explained = (1 - deltas.var() / (returns.var() + 1e-5)).item()
    expected = {"vf_explained_var": explained, "values/mean": 0.35, "values/max": 1, "values/min": 0}
    assert {name: metrics[f"critic/{name}"] for name in expected} == pytest.approx(expected)
    of_zeros, metrics = compute_targets(COLUMNS, TargetSettings("gae"), **ROWS)
    assert of_zeros["returns"].tolist() == [[1, 1, 0], [0, 0, 0]]
    assert not metrics.keys() & CRITIC_METRICS
    # One token has a mean, but no variance; equal returns that are foreseen count as explained.
    assert not CRITIC_METRICS & gae(response_mask=MASK * 0)[1].keys()
    found = gae(response_mask=torch.tensor([[1.0, 0, 0], [0, 0, 0]]))[1]
    assert CRITIC_METRICS & found.keys() == CRITIC_METRICS - {"critic/vf_explained_var"}
    nothing = dict.fromkeys(("values", "token_level_scores"), torch.zeros(2, 3))
    assert gae(**nothing)[1]["critic/vf_explained_var"] == 1


def test_of_distillation_only_the_kl_is_left() -> None:
    """k1 is 0.5 on every token, and the score of the first response does not count."""
    settings = TargetSettings("distill", {"gamma": 0.0}, kl_penalty="k1")
    out, metrics = compute_targets(COLUMNS, settings, **ROWS, kl_coef=2.0)
    for name in ("token_level_rewards", "advantages"):
        torch.testing.assert_close(out[name], -1.0 * MASK)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    without, _ = compute_targets(COLUMNS, TargetSettings("distill"), **ROWS)
    assert not without["advantages"].any(), "the loss has the KL then"


def test_the_kl_in_the_reward_and_its_metric() -> None:
    """k1 is 0.5 on every token; with coefficient 0.1 the rewards sum to 1 - 0.1 and -0.15, and differ by 1.05."""
    out, metrics = grpo(kl_coef=0.1, kl_penalty="k1")
    torch.testing.assert_close(out["token_level_rewards"], torch.tensor([[-0.05, 0.95, 0.0], [-0.05, -0.05, -0.05]]))
    torch.testing.assert_close(out["advantages"][:, 0], torch.tensor([0.525, -0.525]))
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    # 0.5 on each of the first one's two tokens, 1 on the other's three: 0.75, where the tokens' mean is 0.8.
    columns = COLUMNS | {"ref_log_probs": torch.tensor([[-2.0] * 3, [-2.5] * 3])}
    assert grpo(columns, kl_penalty="k1")[1]["actor/reward_kl_penalty"] == pytest.approx(0.75)
    masked = TargetSettings("grpo", PLAIN, kl_penalty="k1", mask_truncated=True)
    assert compute_targets(columns, masked, **ROWS)[1]["actor/reward_kl_penalty"] == pytest.approx(0.5)
    nothing = compute_targets(columns, masked, index=["a", "a"], truncated=torch.ones(2))[1]
    assert "actor/reward_kl_penalty" not in nothing, "no KL was measured, and no controller is told of one"


def test_truncated_and_rejected_responses_do_not_train() -> None:
    out, _ = grpo(mask_truncated=True)
    assert out["response_mask"].tolist() == [[1, 1, 0], [0, 0, 0]]
    torch.testing.assert_close(out["advantages"], torch.tensor([[0.5, 0.5, 0], [0, 0, 0]]))
    # Every ratio is e^-0.5 = 0.61.
    out, _ = grpo(rollout_correction={"rollout_is": "token"})
    torch.testing.assert_close(out["rollout_is_weights"][MASK == 1], torch.full((5,), math.exp(-0.5)))
    out, _ = grpo(rollout_correction={"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": math.exp(1.2)})
    assert out["response_mask"].tolist() == [[1, 1, 0], [0, 0, 0]], "the products are e^-1 and e^-1.5"


@pytest.mark.parametrize(
    ("threshold", "correction", "weights"),
    [
        (0.2, {}, [1, 1, 0, 0, 0]),
        (0.2, {"rollout_is": "token"}, [math.exp(-0.5), math.exp(-0.5), 0, 0, 0]),
        (0.26, {}, [1] * 5),
    ],
)
def test_the_second_moment_gives_weight_0(threshold: float, correction: dict, weights: list[float]) -> None:
    """Advantages 0.5 and -0.5, lambda -0.5 on all five tokens: the three of the second response go its way."""
    out, metrics = grpo(m2_threshold=threshold, rollout_correction=correction)
    assert out["rollout_is_weights"][MASK == 1].tolist() == pytest.approx(weights)
    assert torch.equal(out["response_mask"], MASK.float()), "they still count"
    assert metrics["rollout_corr/m2_masked_fraction"] == pytest.approx(weights.count(0) / 5)


@pytest.mark.parametrize("source", ["rollout", "update"])
def test_without_old_log_probs_nothing_is_compared(source: str) -> None:
    """Zeros would be no measurement. Bypass takes the sampler's; on policy the update brings them."""
    out, metrics = grpo(WITHOUT_OLD, old_log_probs_from=source)
    assert torch.equal(out["advantages"], grpo()[0]["advantages"])
    assert ("old_log_probs" in out) == (source == "rollout")
    if source == "rollout":
        assert torch.equal(out["old_log_probs"], COLUMNS["rollout_log_probs"])
    assert metrics.keys() == TOKEN_METRICS


def test_only_tokens_of_high_entropy_earn_an_advantage() -> None:
    """40 % of 5 tokens are those with 0.5 and 0.4; the masked 9.0 is not one."""
    out, _ = grpo(top_entropy_quantile=0.4)
    torch.testing.assert_close(out["advantages"], torch.tensor([[0.0, 0.5, 0.0], [0.0, 0.0, -0.5]]))
    assert out["response_mask"].tolist() == MASK.tolist(), "all tokens still count in the loss"
    assert not high_entropy(COLUMNS["old_entropies"], MASK * 0, 0.4).any()


def test_selected_tokens_are_reproducible() -> None:
    covariances = torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 1.0]])
    columns = COLUMNS | {"old_log_probs": covariances - 3}
    options = {"clip_cov_ratio": 0.2, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}
    settings = TargetSettings("grpo", PLAIN, loss_mode="clip_cov", loss_options=options)
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 3, *range(20))]
    made = [compute_targets(columns, settings, **ROWS, generator=generator)[0] for generator in generators]
    picks = [columns["selected_tokens"] for columns in made]
    assert torch.equal(picks[0], picks[1])
    assert {int(pick.sum()) for pick in picks} == {1}
    assert len({tuple(pick.flatten().tolist()) for pick in picks}) > 2


@pytest.mark.parametrize(
    ("settings", "columns"),
    [
        (TargetSettings("grpo"), ("old_log_probs",)),
        (TargetSettings("gigpo"), ("old_log_probs", "responses", "predecessors")),
        (TargetSettings("optimal_token_baseline"), ("old_log_probs", "old_gradient_norms")),
        (TargetSettings("grpo_process", kl_penalty="k1"), ("old_log_probs", "ref_log_probs", "step_mask")),
        (TargetSettings("grpo", top_entropy_quantile=0.2), ("old_log_probs", "old_entropies")),
        (TargetSettings("grpo", old_log_probs_from="rollout"), ()),
        (TargetSettings("grpo", old_log_probs_from="update"), ()),
    ],
)
def test_columns_are_those_that_are_read(settings: TargetSettings, columns: tuple[str, ...]) -> None:
    assert settings.columns == ("token_level_scores", "response_mask", "rollout_log_probs", *columns)


# --- tokens that an environment put in ---------------------------------------------------------------------------
ENVIRONMENT_MASK = torch.tensor([[1, 0, 0, 1, 0], [1, 1, 0, 1, 1]], dtype=torch.int8)
ENVIRONMENT_ENDS = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 0, 0, 1]])


def random_columns(mask: Tensor, ends: Tensor, scores: Tensor, noise: float | None = None) -> dict[str, Tensor]:
    """Columns of all estimators with the scores on the responses' ends; `noise` is what other tokens hold."""
    names = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "old_entropies", "old_gradient_norms", "values")
    found = {name: torch.rand(mask.shape, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(names)}
    if noise is not None:
        found = {name: values.where(mask > 0, noise) for name, values in found.items()}
    found |= {"responses": torch.arange(mask.numel()).reshape(mask.shape) // 7, "response_mask": mask}
    return found | {"step_mask": ends, "token_level_scores": torch.where(ends > 0, scores[:, None], 0.0)}


@pytest.mark.parametrize("estimator", ADV_ESTIMATORS)
def test_the_reward_reaches_every_sampled_token_and_no_other(estimator: str) -> None:
    options = PLAIN | {"gamma": 0.9, "lam": 0.95}
    correction = {"rollout_is": "sequence", "rollout_rs": "seq_max_k2", "rollout_rs_threshold": 5.0}
    all_of_it = {"kl_penalty": "k1", "rollout_correction": correction, "top_entropy_quantile": 0.9}
    more = {"reward_baselines": torch.tensor([0.2, 0.2]), "reward_components": {"right": torch.tensor([1.0, 0.0])}}

    def made(noise: float, **settings: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
        columns = random_columns(ENVIRONMENT_MASK, ENVIRONMENT_ENDS, torch.tensor([1.0, 0.0]), noise)
        return compute_targets(columns, TargetSettings(estimator, options, **settings), **ROWS, **more)

    (plain, metrics), (noisy, told) = made(0.0, **all_of_it), made(-30.0, **all_of_it)
    for name, values in plain.items():
        on_mask = (tensor.where(ENVIRONMENT_MASK > 0, 0.0) for tensor in (values, noisy[name]))
        assert torch.equal(*on_mask), name
    assert told == metrics
    assert (noisy["advantages"][ENVIRONMENT_MASK == 0] == 0).all()
    credited = made(-30.0)[0]["advantages"][0][ENVIRONMENT_MASK[0] == 1] > 0
    assert credited.all() != (estimator in SCORELESS_ADV_ESTIMATORS), "the first turn is credited too"


def test_groups_of_equal_scores_are_left_out() -> None:
    """Scores 1, 1 and 4, 2: the first group trains nothing and is in no mean, neither of prompts nor of deviations."""
    columns = {"response_mask": torch.ones(4, 2), "rollout_log_probs": torch.zeros(4, 2)}
    columns["token_level_scores"] = torch.tensor([[0.0, 1], [0, 1], [0, 4], [0, 2]])
    settings = TargetSettings("scale_rl", old_log_probs_from="rollout", mask_equal_groups=True, by_prompt=True)
    out, _ = compute_targets(columns, settings, index=list("aabb"), truncated=torch.zeros(4))
    assert out["response_mask"].tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert out["prompt_weights"].tolist() == [[0, 0], [0, 0], [0.25, 0.25], [0.25, 0.25]]
    torch.testing.assert_close(out["advantages"][:, 0], torch.tensor([0, 0, 0.5**0.5, -(0.5**0.5)]), rtol=0, atol=1e-5)


A, B = agent_id("black"), agent_id("white")
GAME, PAIR = [[A, A, B, B]] * 2, [[A, A, 0, 0], [A, A, B, B]]
WON = [[0.0, 1, 0, -1], [0, -1, 0, 1]]


@pytest.mark.parametrize(
    ("estimator", "scores", "agents", "trains"),
    [
        *((name, WON, GAME, [4, 4]) for name in ("grpo", "rae", "grpo_process", "opo")),
        ("grpo", [[0.0, 1, 0, 0], [0, 1, 0, 1]], PAIR, [0, 0]),  # as good, with a second agent in one of them
        ("grpo", WON, None, [0, 0]),
        ("grpo_process", [[0.0, 1, 0, 0], [0, 0, 0, 1]], None, [4, 4]),  # other steps of the same sum
        ("grpo_process", [[0.0, 1, 0, 1]] * 2, None, [0, 0]),
        ("opo", [[0.0, 0.1, 0, 0], [0, 0, 0, 0.1]], None, [0, 0]),  # whose baseline is rounded
        ("a2po", [[0.0, 0.1, 0, 0], [0, 0, 0, 0.1]], None, [0, 0]),
    ],
)
def test_a_group_teaches_nothing_where_its_estimator_says_so(estimator, scores, agents, trains) -> None:
    """Not by sums of episodes, which agents and steps may share; the KL in the reward is no score."""
    columns = {"token_level_scores": torch.tensor(scores), "response_mask": torch.ones(2, 4)}
    columns |= {"rollout_log_probs": torch.zeros(2, 4), "ref_log_probs": torch.rand(2, 4)}
    columns["step_mask"] = torch.tensor([[0.0, 1, 0, 1]] * 2)
    if agents is not None:
        columns["agent_ids"] = torch.tensor(agents)
    more = {"old_log_probs_from": "rollout", "mask_equal_groups": True, "by_agent": agents is not None}
    for kl_penalty in (None, "k1"):
        settings = TargetSettings(estimator, {"a2po_beta": 0.5}, kl_penalty=kl_penalty, **more)
        out, _ = compute_targets(columns, settings, index=["g"] * 2, truncated=torch.zeros(2), kl_coef=0.1)
        assert out["response_mask"].sum(-1).tolist() == trains


@pytest.mark.parametrize("estimator", ADV_ESTIMATORS)
def test_which_estimators_teach_groups_of_equal_scores_or_tell_tokens_apart(estimator: str) -> None:
    """Group a has equal scores, b has not; the last token has all of the reward."""
    generator, mask = torch.Generator().manual_seed(3), torch.tensor([[1.0, 1, 0]] * 3 + [[1.0, 1, 1]])
    rewards = torch.tensor([[0, 0.7, 0], [0, 0.7, 0], [0, 0.1, 0], [0, 0, 0.7]])
    columns = {name: torch.rand(4, 3, generator=generator) for name in ("values", "entropies", "gradient_norms")}
    columns |= {"step_mask": torch.tensor([[0.0, 1, 1]] * 4) * mask, "reward_baselines": torch.full((4,), 0.5)}
    columns |= {"turn_states": torch.tensor([[1, -2, 0]] * 3 + [[1, -3, 0]])}
    components = {"x": rewards.sum(-1)}
    arguments = {"token_level_rewards": rewards, "response_mask": mask, "index": list("aabb"), **columns}
    advantages, _ = compute_advantage(estimator, **arguments, reward_components=components)
    assert (advantages[:2].abs().max() > 1e-6) == (estimator in EQUAL_SCORES_ADV_ESTIMATORS)
    apart = [values[keep > 0].std() > 1e-6 for values, keep in zip(advantages, mask, strict=True)]
    of_kl = estimator in SCORELESS_ADV_ESTIMATORS  # which each token has of its own
    assert (any(apart) or of_kl) == (estimator in TOKEN_ADV_ESTIMATORS)


def test_only_answers_to_the_policys_turns_are_observed() -> None:
    """Of a row that begins with a prompt's end, and in which a branch begins anew: the words behind the first turn."""
    columns = {name: torch.zeros(1, 6) for name in ("token_level_scores", "rollout_log_probs")}
    columns["response_mask"] = torch.tensor([[0, 1, 0, 0, 1, 0]])
    columns["predecessors"] = torch.tensor([[-1, 0, 1, -5, 3, -1]])
    settings = TargetSettings("rae", old_log_probs_from="rollout", observations=True)
    assert settings.columns[3:] == ("predecessors",)
    out, _ = compute_targets(columns, settings, index=["g"], truncated=torch.zeros(1))
    assert out["observation_mask"].tolist() == [[0, 0, 1, 0, 0, 0]]


# A row with branches, and two tokens of padding: a turn of two tokens, "9", a turn that is sampled twice, a prompt of a
# sub-agent and its turn, "8" as another answer to the first turn, a turn that is cut in two by another try at its end,
# and what follows a history in which the first turn is written in another way.
TOKENS = torch.tensor([[5, 6, 9, 7, 4, 1, 9, 2, 8, 3, 3, 6, 9, 7, 0, 0]])
SAMPLED = torch.tensor([[1, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 0, 0]])
FOLLOWS = torch.tensor([[-1, 0, 1, 2, 2, -3, 5, 6, 1, 8, 9, 9, 0, 12, -1, -1]])


def test_turns_and_their_states_in_branches() -> None:
    """A turn is not joined with another try at it, and its state is what was put in on its own path."""
    states = turn_states(TOKENS, SAMPLED, FOLLOWS)
    #        begin  9: twice    1 9   8: cut behind 3, and another end       9, behind a part of a turn
    wanted = [1, 1, 0, 2, -2, 0, 0, 3, 0, 4, -5, -5, 0, 2, 0, 0]
    assert states.tolist() == [wanted], "9 behind a turn is one state, 1 9 from the very beginning another"
    into_the_prompt = FOLLOWS.where(FOLLOWS != -3, -2)
    assert turn_states(TOKENS, SAMPLED, into_the_prompt)[0, 7] not in (0, 2), "no answer to a turn"


def test_what_answers_a_turn_is_no_prompt() -> None:
    assert answers(SAMPLED, FOLLOWS).nonzero()[:, 1].tolist() == [2, 8]
    longer = torch.tensor([[-1, 0, 1, 2, 2, 3, 5, 6, 1, 8, 9, 9, 2, 12, -1, -1]])
    assert answers(SAMPLED, longer).nonzero()[:, 1].tolist() == [2, 5, 6, 8, 12], "behind a turn; on from an answer"
    sampled = torch.tensor([[0, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 0]])
    assert answers(sampled).tolist() == [[0, 0, 1, 1, 0, 1], [0, 1, 0, 1, 1, 1]], "nor what begins a row"


# --- responses that could not be scored ------------------------------------------------------------------------------
# Group a: -3, none, -2, -1; group b: none, 5; group c: none, none. Three tokens each, of which one is an environment's.
NAN = math.nan
SCORES = torch.tensor([-3.0, NAN, -2, -1, NAN, 5, NAN, NAN])
INDEX, N = list("aaaabbcc"), len(SCORES)
ALL = list(range(N))
WORDS = torch.ones(N, 3, dtype=torch.int8)
WORDS[0, 1] = 0
BY_SCORE = sorted(set(ADV_ESTIMATORS) - set(SCORELESS_ADV_ESTIMATORS))


def targets(
    scores: Tensor, settings: TargetSettings, rows: list[int], **more: Any
) -> tuple[dict[str, Tensor], dict[str, float]]:
    columns = random_columns(WORDS, torch.tensor([[0, 0, 1]] * N), scores)
    more |= {"index": [INDEX[i] for i in rows], "scored": ~scores[rows].isnan(), "truncated": torch.zeros(len(rows))}
    more |= {"generator": torch.Generator().manual_seed(1), "kl_coef": 0.1}
    return compute_targets({name: values[rows] for name, values in columns.items()}, settings, **more)


def test_where_the_greedy_response_failed_nothing_trains() -> None:
    baselines, settings = torch.tensor([0.5] * 4 + [NAN] * 2 + [0.5] * 2), TargetSettings("remax")
    out, _ = targets(SCORES, settings, ALL, reward_baselines=baselines)
    expected = torch.tensor([-3.5, 0, -2.5, -1.5, 0, 0, 0, 0])[:, None]
    torch.testing.assert_close(out["advantages"], expected * WORDS, rtol=0, atol=5e-6)
    assert torch.equal(out["response_mask"], WORDS * (expected != 0).float())


@pytest.mark.parametrize("estimator", BY_SCORE)
def test_everything_is_as_if_failed_ones_had_not_been_sampled(estimator: str) -> None:
    """Bit for bit, with all that comes between scores and loss; and the metrics too."""
    options: dict[str, Any] = {"kl_penalty": "k1", "top_entropy_quantile": 0.6, "has_values": estimator == "gae"}
    options |= {"rollout_correction": {"rollout_is": "sequence", "rollout_is_batch_normalize": True}}
    options |= {"loss_mode": "kl_cov", "loss_options": {"kl_cov_ratio": 0.3}}
    settings, left = TargetSettings(estimator, {"gamma": 0.9, "lam": 0.95}, **options), [0, 2, 3, 5]
    components = torch.tensor([1.0, NAN, 0, 3, NAN, 2, NAN, NAN])
    more = {"reward_baselines": torch.full((N,), 0.5), "reward_components": {"right": components}}
    scores = SCORES + 4 if estimator == "maxrl" else SCORES  # which learns from positive means alone
    out, metrics = targets(scores, settings, ALL, **more)
    part = {"reward_baselines": torch.full((4,), 0.5), "reward_components": {"right": components[left]}}
    alone, expected = targets(scores, settings, left, **part)
    assert metrics == expected
    assert out.keys() == alone.keys()
    assert alone["advantages"].any()
    gone = SCORES.isnan()
    for name, values in out.items():
        assert torch.equal(values[left], alone[name].float()), name
        if name != "token_level_rewards":
            assert not values[gone].any(), name
    assert out["token_level_rewards"][gone].sum(-1).isnan().all(), "they have no reward"


@pytest.mark.parametrize("estimator", BY_SCORE)
def test_where_all_have_failed_nothing_trains(estimator: str) -> None:
    more = {"reward_baselines": torch.full((N,), NAN), "reward_components": {"right": torch.full((N,), NAN)}}
    settings = TargetSettings(estimator, kl_penalty="k1", top_entropy_quantile=0.6)
    out, metrics = targets(torch.full((N,), NAN), settings, ALL, **more)
    for name in ("response_mask", "advantages", "returns"):
        assert not out[name].any(), name
    assert not any(name.startswith(("critic/", "rae/")) for name in metrics), "nothing moves a baseline"
    assert torch.tensor(list(metrics.values())).isfinite().all()


def test_where_scores_do_not_train_a_response_needs_none() -> None:
    out, _ = targets(SCORES, TargetSettings("distill", {"gamma": 0.0}, kl_penalty="k1"), ALL)
    assert torch.equal(out["response_mask"], WORDS.float())
    assert out["advantages"][SCORES.isnan()].any()
