"""A*-PO as an estimator: the gradient is that of the paper's squared loss."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_dist.algorithms import compute_advantage, policy_objective
from grpo_dist.algorithms.settings import TargetSettings
from grpo_dist.algorithms.targets import compute_targets
from tests.worker_settings import objective_settings


@pytest.mark.parametrize(("beta", "value"), [(1.0, math.log((math.e**2 + 3) / 4)), (1e-3, 2 - 1e-3 * math.log(4))])
def test_the_value_by_hand(beta: float, value: float) -> None:
    """Scores 2, 0, 0, 0; near beta = 0 the best one's, where exp(2000) would overflow."""
    rewards = torch.tensor([[2.0], [0], [0], [0]])
    arguments = {"token_level_rewards": rewards, "response_mask": torch.ones(4, 1), "index": ["a"] * 4}
    advantages, _ = compute_advantage("a2po", **arguments, config={"a2po_beta": beta})
    assert advantages.flatten().tolist() == pytest.approx([2 - value, -value, -value, -value])


def test_the_gradient_is_that_of_the_squared_loss() -> None:
    """(b log(pi / pi_ref) - (r - V))^2 of 6 responses, V by importance sampling from the reference; 2 b times ours."""
    generator, b = torch.Generator().manual_seed(0), 0.3
    log_probs = (-2 + 0.3 * torch.randn(6, 4, generator=generator)).requires_grad_()
    reference = -2 + 0.3 * torch.randn(6, 4, generator=generator)
    mask = (torch.rand(6, 4, generator=generator) > 0.2).float()
    scores = torch.tensor([1.0, 0, 0, 1, 1, 0])
    ratios = ((log_probs - reference) * mask).sum(-1)
    weights = (scores / b - ratios.detach()).exp()  # pi_ref / pi * exp(r / b)
    value = b * torch.cat([weights[:3].mean().expand(3), weights[3:].mean().expand(3)]).log()
    (expected,) = torch.autograd.grad((b * ratios - (scores - value)).square().mean(), log_probs)
    columns = {"token_level_scores": scores[:, None] * torch.eye(4)[3], "response_mask": mask}
    columns |= {"old_log_probs": log_probs.detach(), "rollout_log_probs": log_probs.detach()}
    settings = TargetSettings("a2po", {"a2po_beta": b}, kl_penalty="k1")
    targets, _ = compute_targets(
        columns | {"ref_log_probs": reference}, settings, index=list("aaabbb"), truncated=torch.zeros(6), kl_coef=b
    )
    loss, _ = policy_objective(
        {**columns, **targets, "log_probs": log_probs},
        objective_settings(loss_mode="gpg", loss_agg_mode="seq-mean-token-sum", use_kl_loss=False),
        global_tokens=mask.sum(),
        global_sequences=6,
    )
    (found,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(2 * b * found, expected, rtol=1e-4, atol=1e-6)
