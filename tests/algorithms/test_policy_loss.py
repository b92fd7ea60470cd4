"""Policy losses on numbers worked out on paper; tests/fuzz has verl's, and their formulas on random batches."""

import math

import pytest
import torch
from torch import Tensor

from grpo_dist.algorithms import compute_policy_loss
from grpo_dist.algorithms.policy_loss import POLICY_LOSS, token_selection
from grpo_dist.errors import BatchError, ConfigError
from tests.messages import refuses
from tests.worker_settings import objective_settings

CLIP = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0}


def loss_of(
    name: str, old: Tensor, log_probs: Tensor, advantages: Tensor, mask: Tensor | None = None, **config: object
) -> tuple[Tensor, dict[str, Tensor]]:
    columns = {"old_log_probs": old, "log_probs": log_probs, "advantages": advantages}
    columns["response_mask"] = torch.ones_like(old) if mask is None else mask
    return compute_policy_loss(columns, objective_settings(loss_mode=name, **config))


HALF = math.log(0.5)
HIGHER = CLIP | {"clip_ratio_high": 0.6}


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "config", "loss", "gradient"),
    [
        ("vanilla", 1.0, 2.0, CLIP, -2.0, -2.0),  # on policy: plain policy gradient
        ("vanilla", 1.5, 2.0, CLIP, -2.4, 0.0),  # good and already likelier: clipped at 1.2
        ("vanilla", 0.5, 2.0, CLIP, -1.0, -1.0),  # good and less likely: pulled back
        ("vanilla", 0.5, -2.0, CLIP, 1.6, 0.0),  # bad and already less likely: clipped at 0.8
        ("vanilla", 2.0, -2.0, CLIP, 4.0, 4.0),  # bad and likelier: pushed down
        ("vanilla", 5.0, -2.0, CLIP, 6.0, 0.0),  # dual clip: at most 3 * |A|
        # clip-higher moves the upper range alone
        ("vanilla", 1.5, 2.0, HIGHER, -3.0, -3.0),
        ("vanilla", 0.5, -2.0, HIGHER, 1.6, 0.0),
        # -A log pi
        ("gpg", 1.5, 2.0, {}, -2 * (HALF + math.log(1.5)), -2.0),
        # -clip(3, 0.8, 1.2) A log pi, the weight is no variable: the gradient survives the clip
        ("cispo", 3.0, 2.0, CLIP, -1.2 * 2 * (HALF + math.log(3)), -2.4),
        # tau 1, ratio 1: sigmoid(0) * 4 = 2; derivative 4 * 1/4 * ratio = 1
        ("sapo", 1.0, 2.0, {}, -4.0, -2.0),
        # A < 0 has tau 2: sigmoid(0) * 4 / 2 = 1; derivative 4 / 2 * 2 / 4 * ratio = 1
        ("sapo", 1.0, -3.0, {"tau_neg": 2.0}, 3.0, 3.0),
        # -(A log pi - beta / 2 ln(2)^2); gradient -A + beta ln 2
        ("dro", 2.0, 3.0, {"dro_beta": 0.5}, -(0 - 0.25 * math.log(2) ** 2), -3 + 0.5 * math.log(2)),
        # p goes from 0.5 to 0.6 and to 0.75: inside and outside of 0.2; bad tokens may fall
        ("dppo_tv", 1.2, 2.0, CLIP, -2 * 1.2 * math.log(0.6), -2.4),
        ("dppo_tv", 1.5, 2.0, CLIP, 0.0, 0.0),
        ("dppo_tv", 1.5, -2.0, CLIP, 2 * 1.5 * math.log(0.75), 3.0),
        # KL of Bernoulli 0.5 and 0.75: ln(2/3)/2 + ln(2)/2 = 0.1438
        ("dppo_kl", 1.5, 2.0, CLIP | {"clip_ratio": 0.15}, -2 * 1.5 * math.log(0.75), -3.0),
        ("dppo_kl", 1.5, 2.0, CLIP | {"clip_ratio": 0.14}, 0.0, 0.0),
        # one token: the sequence's ratio is its own; clipped at 1.2
        ("gspo", 1.1, 2.0, CLIP, -2.2, -2.2),
        ("gspo", 1.5, 2.0, CLIP, -2.4, 0.0),
        # the log-ratio is clipped, at 0.2
        ("geo_mean", 1.5, 2.0, CLIP, -2 * math.exp(0.2), 0.0),
        ("geo_mean", 1.1, 2.0, CLIP, -2.2, -2.2),
        # one token has covariance 0 and is the share 1 of all: -A ratio + coef |log ratio|
        ("kl_cov", 2.0, 3.0, {"kl_cov_ratio": 1.0, "ppo_kl_coef": 0.5}, -6 + 0.5 * math.log(2), -6 + 0.5),
        # its covariance 0 is not above the lower bound 1: the clipped surrogate
        ("clip_cov", 1.5, 2.0, CLIP, -2.4, 0.0),
        # a good response is imitated whatever its ratio; a bad one by min(ratio, 1)
        ("topr", 0.5, 2.0, {}, -2 * 2 * HALF, -2.0),
        ("topr", 0.5, -2.0, {}, 0.5 * 2 * 2 * HALF, 1.0),
        ("topr", 1.5, -2.0, {}, 2 * (HALF + math.log(1.5)), 2.0),
        # weights 2^2 e^(3 (1 - 2)) and 0.5^3 e^(2 (1 - 0.5))
        ("vespo", 2.0, 3.0, {}, 0.0, -3 * 4 * math.exp(-3)),
        ("vespo", 0.5, -2.0, {}, 2 * 2 * HALF * math.e / 8, 2 * math.e / 8),
    ],
)
def test_a_token_by_hand(name: str, ratio: float, advantage: float, config: dict, loss: float, gradient: float) -> None:
    """The old policy gave the token 1/2."""
    log_prob = torch.tensor([[HALF + math.log(ratio)]], requires_grad=True)
    found, _ = loss_of(name, torch.full((1, 1), HALF), log_prob, torch.tensor([[advantage]]), **config)
    found.backward()
    assert (found.item(), log_prob.grad.item()) == pytest.approx((loss, gradient), abs=1e-5)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_counts_tokens_whose_ratio_is_truncated(name: str) -> None:
    """Probabilities 0.01 to 0.05, ratio 5, inside; 0.1 to 0.9, ratio 9, outside; 0.5 to 0.55; and one off the mask."""
    old, new = torch.tensor([[[0.01, 0.1, 0.5, 0.01]], [[0.05, 0.9, 0.55, 0.05]]]).log()
    _, metrics = loss_of(name, old, new, torch.ones(1, 4), torch.tensor([[1.0, 1.0, 1.0, 0.0]]), **CLIP)
    assert float(metrics["actor/pg_clipfrac"]) == pytest.approx(1 / 3)
    assert float(metrics["actor/pg_clipfrac_lower"]) == pytest.approx(1 / 3)


# --- covariance ------------------------------------------------------------------------------------------------------
LOG_PROBS = torch.tensor([[-1.0, -3.0, 9.0], [-1.0, -3.0, -2.0]])
ADVANTAGES = torch.tensor([[2.0, 2.0, 9.0], [-2.0, -2.0, 0.0]])
SEEN = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
CLIP_COV = {"clip_cov_ratio": 0.2, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}


def selection(name: str, **config: float) -> Tensor | None:
    return token_selection(name, log_probs=LOG_PROBS, advantages=ADVANTAGES, response_mask=SEEN, config=config)


def test_which_tokens_covariances_select() -> None:
    """Means -2 and 0: covariances 2, -2 / -2, 2, 0. One of five; all ratios are 1, where the plain clip holds none."""
    assert selection("vanilla") is None
    torch.manual_seed(0)
    picks = [selection("clip_cov", **CLIP_COV) for _ in range(50)]
    assert {int(pick.sum()) for pick in picks} == {1}
    assert torch.stack(picks).any(0).tolist() == [[True, False, False], [False, True, False]]
    assert not selection("clip_cov", **CLIP_COV | {"clip_cov_lb": 3.0}).any()
    _, metrics = loss_of("clip_cov", LOG_PROBS, LOG_PROBS, ADVANTAGES, SEEN, **CLIP, **CLIP_COV)
    assert float(metrics["actor/pg_clipfrac"]) == float(metrics["actor/selected"]) == pytest.approx(0.2)
    assert "actor/pg_clipfrac_lower" not in metrics, "verl has none"


# --- all of them -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", POLICY_LOSS.names())
def test_huge_ratios_masked_nans_bf16_and_empty_rows(name: str) -> None:
    nan, inf = float("nan"), float("inf")
    log_probs = torch.tensor([[-1.0, -200.0, 0.0], [-3.0, -1.0, -2.0], [-1.0, -1.0, -1.0]])
    log_probs = log_probs.to(torch.bfloat16).requires_grad_()
    old = torch.tensor([[-1.0, -1.0, nan], [-300.0, -1.0, -2.0], [inf] * 3])
    advantages = torch.tensor([[1.0, 1.0, nan], [-1.0, -1.0, -1.0], [nan] * 3])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    loss, metrics = loss_of(name, old, log_probs, advantages, mask)
    loss.backward()
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss)
    assert torch.isfinite(log_probs.grad).all()
    assert not log_probs.grad[mask == 0].any()
    assert all(math.isfinite(value) for value in metrics.values())


def test_mistakes_are_named() -> None:
    zeros = torch.zeros(1, 2)
    with refuses(BatchError, "advantages (1, 3)", "old_log_probs (1, 2)"):
        loss_of("vanilla", zeros, zeros, torch.zeros(1, 3))
    with refuses(ConfigError, "actor_rollout_ref.actor.policy_loss.loss_mode=vanila", "'vanilla'"):
        loss_of("vanila", zeros, zeros, zeros)
