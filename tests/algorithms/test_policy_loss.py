import math

import pytest
import torch

from grpo_dist.algorithms import compute_policy_loss
from grpo_dist.errors import BatchError, ConfigError
from tests.golden import cases

CLIP = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0}


@pytest.mark.parametrize("case", cases("policy_loss", ("vanilla",)))
def test_equals_verl_in_loss_gradient_and_metrics(case: dict) -> None:
    inputs = {name: torch.tensor(value) for name, value in case["inputs"].items()}
    log_probs = inputs["log_prob"].requires_grad_()
    loss, metrics = compute_policy_loss(
        "vanilla",
        old_log_probs=inputs["old_log_prob"],
        log_probs=log_probs,
        advantages=inputs["advantages"],
        response_mask=inputs["response_mask"],
        loss_agg_mode=case["config"]["loss_agg_mode"],
        config=case["config"],
        rollout_is_weights=inputs.get("rollout_is_weights"),
    )
    loss.backward()
    torch.testing.assert_close(loss.detach(), torch.tensor(case["outputs"]["loss"]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(log_probs.grad, torch.tensor(case["outputs"]["grad"]), rtol=1e-5, atol=1e-6)
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx(case["outputs"]["metrics"], rel=1e-5, abs=1e-6)


def one_token(ratio: float, advantage: float, config: dict) -> tuple[float, float]:
    """Loss of one token, and its gradient with respect to the log-prob."""
    log_prob = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss, _ = compute_policy_loss(
        "vanilla",
        old_log_probs=torch.zeros(1, 1),
        log_probs=log_prob,
        advantages=torch.tensor([[advantage]]),
        response_mask=torch.ones(1, 1),
        loss_agg_mode="token-mean",
        config=config,
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


def test_mistakes_are_named() -> None:
    batch = {"old_log_probs": torch.zeros(1, 2), "log_probs": torch.zeros(1, 2), "response_mask": torch.ones(1, 2)}
    with pytest.raises(BatchError, match="advantages"):
        compute_policy_loss("vanilla", **batch, advantages=torch.zeros(1, 3), loss_agg_mode="token-mean")
    with pytest.raises(ConfigError, match="did you mean 'vanilla'"):
        compute_policy_loss("vanila", **batch, advantages=torch.zeros(1, 2), loss_agg_mode="token-mean")
