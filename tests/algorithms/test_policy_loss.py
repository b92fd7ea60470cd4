import math

import pytest
import torch

from grpo_dist.algorithms import compute_policy_loss
from grpo_dist.algorithms.policy_loss import POLICY_LOSS, token_selection
from grpo_dist.errors import BatchError, ConfigError
from tests.golden import cases
from tests.messages import refuses
from tests.worker_settings import objective_settings

CLIP = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0}


# clip_cov picks at random: verl's has no reproducible case. It has no topr and no vespo.
IN_GOLDEN = sorted(set(POLICY_LOSS.names()) - {"clip_cov", "topr", "vespo"})


@pytest.mark.parametrize("case", cases("policy_loss", tuple(IN_GOLDEN)))
def test_equals_verl_in_loss_gradient_and_metrics(case: dict) -> None:
    """geo_mean: verl ignores loss_agg_mode and always takes the mean over sequences, which is how it is called here."""
    inputs = {name: torch.tensor(value) for name, value in case["inputs"].items()}
    log_probs = inputs["log_prob"].requires_grad_()
    mode = "seq-mean-token-mean" if case["name"] == "geo_mean" else case["config"]["loss_agg_mode"]
    columns = inputs | {"log_probs": log_probs, "old_log_probs": inputs["old_log_prob"]}
    loss, metrics = compute_policy_loss(
        columns, objective_settings(**case["config"] | {"loss_mode": case["name"], "loss_agg_mode": mode})
    )
    loss.backward()
    torch.testing.assert_close(loss.detach(), torch.tensor(case["outputs"]["loss"]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(log_probs.grad, torch.tensor(case["outputs"]["grad"]), rtol=1e-5, atol=1e-6)
    ours_alone = {"gpg": {"actor/ppo_kl"}}.get(case["name"], {"actor/selected"})  # verl's gpg reports nothing
    found = {k: float(v) for k, v in metrics.items() if k not in ours_alone}
    assert found == pytest.approx(case["outputs"]["metrics"], rel=1e-5, abs=1e-6)


def one_token(
    ratio: float, advantage: float, config: dict, name: str = "vanilla", old: float = 0.0
) -> tuple[float, float]:
    """Loss of one token, and its gradient with respect to the log-prob."""
    log_prob = torch.tensor([[old + math.log(ratio)]], requires_grad=True)
    loss, _ = compute_policy_loss(
        {
            "old_log_probs": torch.full((1, 1), old),
            "log_probs": log_prob,
            "advantages": torch.tensor([[advantage]]),
            "response_mask": torch.ones(1, 1),
        },
        objective_settings(loss_mode=name, **config),
    )
    loss.backward()
    return loss.item(), log_prob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: plain policy gradient
        (1.5, 2.0, -2.4, 0.0),  # good and already likelier: clipped at 1.2
        (0.5, 2.0, -1.0, -1.0),  # good and less likely: pulled back
        (0.5, -2.0, 1.6, 0.0),  # bad and already less likely: clipped at 0.8
        (2.0, -2.0, 4.0, 4.0),  # bad and likelier: pushed down
        (5.0, -2.0, 6.0, 0.0),  # dual clip: at most 3 * |A|
    ],
)
def test_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert one_token(ratio, advantage, CLIP) == pytest.approx((loss, gradient), abs=1e-5)


def test_clip_higher_moves_only_the_upper_range() -> None:
    higher = CLIP | {"clip_ratio_high": 0.6}
    assert one_token(1.5, 2.0, higher) == pytest.approx((-3.0, -3.0))
    assert one_token(0.5, -2.0, higher) == pytest.approx((1.6, 0.0))


HALF = math.log(0.5)


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "config", "loss", "gradient"),
    [
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
def test_losses_by_hand(name: str, ratio: float, advantage: float, config: dict, loss: float, gradient: float) -> None:
    assert one_token(ratio, advantage, config, name, old=HALF) == pytest.approx((loss, gradient), abs=1e-5)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_counts_tokens_whose_ratio_is_truncated(name: str) -> None:
    """Probabilities 0.01 to 0.05, ratio 5, inside; 0.1 to 0.9, ratio 9, outside; 0.5 to 0.55; and one off the mask."""
    _, metrics = compute_policy_loss(
        {
            "old_log_probs": torch.tensor([[0.01, 0.1, 0.5, 0.01]]).log(),
            "log_probs": torch.tensor([[0.05, 0.9, 0.55, 0.05]]).log(),
            "advantages": torch.ones(1, 4),
            "response_mask": torch.tensor([[1.0, 1.0, 1.0, 0.0]]),
        },
        objective_settings(loss_mode=name, **CLIP),
    )
    assert float(metrics["actor/pg_clipfrac"]) == pytest.approx(1 / 3)
    assert float(metrics["actor/pg_clipfrac_lower"]) == pytest.approx(1 / 3)


def test_clip_cov_reports_the_tokens_it_leaves_out() -> None:
    """One of five is selected. All ratios are 1, where the plain clip holds none."""
    _, metrics = compute_policy_loss(
        {"old_log_probs": LOG_PROBS, "log_probs": LOG_PROBS, "advantages": ADVANTAGES, "response_mask": SEEN},
        objective_settings(loss_mode="clip_cov", **CLIP, clip_cov_ratio=0.2, clip_cov_lb=1.0, clip_cov_ub=5.0),
    )
    assert float(metrics["actor/pg_clipfrac"]) == float(metrics["actor/selected"]) == pytest.approx(0.2)
    assert "actor/pg_clipfrac_lower" not in metrics, "verl has none"


def test_gspo_and_geo_mean_take_the_sequences_ratio() -> None:
    """Log-ratios 0.3 and -0.1: mean 0.1, inside 0.2; geo_mean clips the first: mean 0.05. Half the gradient each."""
    for name, mean in {"gspo": 0.1, "geo_mean": 0.05}.items():
        log_probs = torch.tensor([[0.3, -0.1, 5.0]], requires_grad=True)
        loss, _ = compute_policy_loss(
            {
                "old_log_probs": torch.zeros(1, 3),
                "log_probs": log_probs,
                "advantages": torch.tensor([[2.0, 2.0, 0.0]]),
                "response_mask": torch.tensor([[1.0, 1.0, 0.0]]),
            },
            objective_settings(loss_mode=name, loss_agg_mode="seq-mean-token-mean", **CLIP),
        )
        loss.backward()
        assert loss.item() == pytest.approx(-2 * math.exp(mean))
        halves = -math.exp(mean)
        expected = [halves, halves, 0] if name == "gspo" else [0, halves, 0]
        assert log_probs.grad.flatten().tolist() == pytest.approx(expected)


def test_topr_and_vespo_weigh_by_the_whole_response() -> None:
    """Log-ratios ln 2 and -ln 8, the product 1/4; the third token does not train."""
    ratios = torch.tensor([[2.0, 1 / 8, 5.0]])
    vespo = (1 / 4) ** 3 * math.exp(2 * (1 - 1 / 4))
    for name, weight in {"topr": 1 / 4, "vespo": vespo}.items():
        log_probs = (ratios.log() - 3).requires_grad_()
        loss, _ = compute_policy_loss(
            {
                "old_log_probs": torch.full((1, 3), -3.0),
                "log_probs": log_probs,
                "advantages": torch.full((1, 3), -2.0),
                "response_mask": torch.tensor([[1.0, 1.0, 0.0]]),
            },
            objective_settings(loss_mode=name, loss_agg_mode="token-sum"),
        )
        loss.backward()
        assert log_probs.grad[0].tolist() == pytest.approx([2 * weight, 2 * weight, 0], rel=1e-5)


# --- covariance ------------------------------------------------------------------------------------------------------
LOG_PROBS = torch.tensor([[-1.0, -3.0, 9.0], [-1.0, -3.0, -2.0]])
ADVANTAGES = torch.tensor([[2.0, 2.0, 9.0], [-2.0, -2.0, 0.0]])
SEEN = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])


def test_kl_cov_selects_the_highest_covariances() -> None:
    """Means -2 and 0: covariances 2, -2 / -2, 2, 0; the masked 9 counts for nothing. The share 0.4 of 5 tokens is 2."""
    options = {"log_probs": LOG_PROBS, "advantages": ADVANTAGES, "response_mask": SEEN}
    selected = token_selection("kl_cov", **options, config={"kl_cov_ratio": 0.4})
    assert selected.tolist() == [[True, False, False], [False, True, False]]
    assert token_selection("kl_cov", **options, config={"kl_cov_ratio": 1e-4}).sum() == 1
    assert token_selection("vanilla", **options, config={}) is None


def test_clip_cov_selects_at_random_between_the_bounds() -> None:
    options = {"log_probs": LOG_PROBS, "advantages": ADVANTAGES, "response_mask": SEEN}
    config = {"clip_cov_ratio": 0.2, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
    torch.manual_seed(0)
    picks = [token_selection("clip_cov", **options, config=config) for _ in range(50)]
    assert {int(pick.sum()) for pick in picks} == {1}
    assert torch.stack(picks).any(0).tolist() == [[True, False, False], [False, True, False]]
    assert not token_selection("clip_cov", **options, config=config | {"clip_cov_lb": 3.0}).any()


def test_a_given_selection_makes_micro_batches_add_up() -> None:
    """Selected once for the batch, the loss of kl_cov is the same however it is cut; row by row it would not be."""
    config = {"kl_cov_ratio": 0.4, "ppo_kl_coef": 1.0}
    selected = token_selection("kl_cov", log_probs=LOG_PROBS, advantages=ADVANTAGES, response_mask=SEEN, config=config)

    def loss(rows: slice) -> float:
        value, _ = compute_policy_loss(
            {
                "old_log_probs": LOG_PROBS[rows] + 0.1,
                "log_probs": LOG_PROBS[rows],
                "advantages": ADVANTAGES[rows],
                "response_mask": SEEN[rows],
                "selected_tokens": selected[rows],
            },
            objective_settings(loss_mode="kl_cov", **config),
            global_tokens=5,
        )
        return value.item()

    assert loss(slice(0, 1)) + loss(slice(1, 2)) == pytest.approx(loss(slice(0, 2)), rel=1e-5)


# --- all of them -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", POLICY_LOSS.names())
def test_huge_ratios_masked_nans_bf16_and_empty_rows(name: str) -> None:
    """The loss and its gradient stay finite, and what is off the mask has no say."""
    log_probs = torch.tensor([[-1.0, -200.0, 0.0], [-3.0, -1.0, -2.0], [-1.0, -1.0, -1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    log_probs = log_probs.to(torch.bfloat16).requires_grad_()
    old = torch.tensor([[-1.0, -1.0, float("nan")], [-300.0, -1.0, -2.0], [float("inf")] * 3])
    loss, metrics = compute_policy_loss(
        {
            "old_log_probs": old,
            "log_probs": log_probs,
            "advantages": torch.tensor([[1.0, 1.0, float("nan")], [-1.0, -1.0, -1.0], [float("nan")] * 3]),
            "response_mask": mask,
        },
        objective_settings(loss_mode=name),
    )
    loss.backward()
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss)
    assert torch.isfinite(log_probs.grad).all()
    assert not log_probs.grad[mask == 0].any()
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", POLICY_LOSS.names())
def test_on_policy_the_gradient_is_the_policy_gradient(name: str) -> None:
    """At ratio 1 every loss has the gradient -A of each token's log-prob, over the count."""
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -1.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0], [-2.0, -2.0]])
    loss, _ = compute_policy_loss(
        {
            "old_log_probs": log_probs.detach(),
            "log_probs": log_probs,
            "advantages": advantages,
            "response_mask": torch.ones(2, 2),
        },
        objective_settings(loss_mode=name, loss_agg_mode="token-sum", clip_cov_lb=10.0, clip_cov_ub=11.0),
    )
    loss.backward()
    torch.testing.assert_close(log_probs.grad, -advantages)


def test_mistakes_are_named() -> None:
    batch = {"old_log_probs": torch.zeros(1, 2), "log_probs": torch.zeros(1, 2), "response_mask": torch.ones(1, 2)}
    with refuses(BatchError, "advantages (1, 3)", "old_log_probs (1, 2)"):
        compute_policy_loss({**batch, "advantages": torch.zeros(1, 3)}, objective_settings())
    with refuses(ConfigError, "actor_rollout_ref.actor.policy_loss.loss_mode=vanila", "'vanilla'"):
        compute_policy_loss({**batch, "advantages": torch.zeros(1, 2)}, objective_settings(loss_mode="vanila"))
