"""Which gradient the ways of distillation have, in expectation over all responses of a tiny policy.

The policy writes two tokens of three, so each of its nine responses is there, weighed with its probability: what
sampling finds on average, without noise.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from grpo_dist.algorithms import kl_penalty, policy_objective
from grpo_dist.algorithms.targets import TargetSettings, compute_targets
from tests.worker_settings import objective_settings

V = 3
RESPONSES = torch.tensor(list(product(range(V), repeat=2)))
N = len(RESPONSES)


def logits(seed: int) -> Tensor:
    """(1 + V, V): of the first token, and of the second one behind each first one."""
    return torch.randn(1 + V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(table: Tensor) -> Tensor:
    """(N, 2, V) log-softmax at each token of each response."""
    log_softmax = torch.log_softmax(table, -1)
    return torch.stack([log_softmax[0].expand(N, V), log_softmax[1 + RESPONSES[:, 0]]], 1)


def of_tokens(table: Tensor) -> Tensor:
    """(N, 2) log-probs of the responses' tokens."""
    return rows(table).gather(2, RESPONSES.unsqueeze(2)).squeeze(2)


def between_responses(policy: Tensor, teacher: Tensor) -> Tensor:
    """KL(policy || teacher) of whole responses."""
    log_p, log_q = of_tokens(policy).sum(1), of_tokens(teacher).sum(1)
    return (log_p.exp() * (log_p - log_q)).sum()


def at_sampled_states(policy: Tensor, teacher: Tensor, *, reverse: bool = True) -> Tensor:
    """The KL of each next token, over the states that the policy samples, which stand still."""
    states = of_tokens(policy).sum(1).exp().detach().unsqueeze(1)
    p, q = (rows(table) for table in ((policy, teacher) if reverse else (teacher, policy)))
    return (states * (p.exp() * (p - q)).sum(2)).sum()


def objective(policy: Tensor, teacher: Tensor, *, kl_loss_type: str | None, advantages: Tensor) -> Tensor:
    """The loss that the trainer takes, each response as often as the policy writes it."""
    log_probs, mask = of_tokens(policy), torch.ones(N, 2)
    weights = log_probs.sum(1).exp().detach()
    exact = None if kl_loss_type != "full" else kl_penalty("full", rows(policy), rows(teacher)).double()
    columns = {"log_probs": log_probs, "old_log_probs": log_probs.detach(), "advantages": advantages}
    columns |= {"response_mask": mask, "ref_log_probs": of_tokens(teacher)}
    columns |= {} if exact is None else {"exact_kl": exact}
    settings = objective_settings(
        loss_agg_mode="token-sum",
        use_kl_loss=kl_loss_type is not None,
        kl_loss_type=kl_loss_type or "",
        kl_loss_coef=1.0,
    )
    rows_of = [{name: values[i : i + 1] for name, values in columns.items()} for i in range(N)]
    losses = [policy_objective(row, settings, global_tokens=1, global_sequences=1)[0] for row in rows_of]
    return (weights * torch.stack(losses)).sum()


def advantages(policy: Tensor, teacher: Tensor, *, gamma: float, kl_in_reward: bool) -> Tensor:
    log_probs = of_tokens(policy).detach()
    columns = {
        "token_level_scores": torch.ones(N, 2),  # which do not count
        "response_mask": torch.ones(N, 2),
        "rollout_log_probs": log_probs,
        "old_log_probs": log_probs,
        "ref_log_probs": of_tokens(teacher),
    }
    settings = TargetSettings("distill", {"gamma": gamma}, kl_penalty="k1" if kl_in_reward else None)
    made, _ = compute_targets(columns, settings, index=list(range(N)), truncated=torch.zeros(N), kl_coef=1.0)
    return made["advantages"].double()


def gradient(value: Tensor, policy: Tensor) -> Tensor:
    return torch.autograd.grad(value, policy)[0]


@pytest.mark.parametrize("kl_loss_type", ["full", "k2", "k1+", None])
def test_at_sampled_states_the_loss_and_the_advantage_have_the_kls_gradient(kl_loss_type: str | None) -> None:
    """In the loss by `full` and by sampled tokens (k2 and what has its gradient), in the reward with gamma 0."""
    policy, teacher = logits(0).requires_grad_(), logits(1)
    wanted = gradient(at_sampled_states(policy, teacher), policy)
    made = advantages(policy, teacher, gamma=0.0, kl_in_reward=kl_loss_type is None)
    found = gradient(objective(policy, teacher, kl_loss_type=kl_loss_type, advantages=made), policy)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert wanted.abs().max() > 0.1


def test_with_gamma_one_it_is_the_gradient_of_the_kl_between_responses() -> None:
    policy, teacher = logits(0).requires_grad_(), logits(1)
    wanted = gradient(between_responses(policy, teacher), policy)
    made = advantages(policy, teacher, gamma=1.0, kl_in_reward=True)
    found = gradient(objective(policy, teacher, kl_loss_type=None, advantages=made), policy)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert (wanted - gradient(at_sampled_states(policy, teacher), policy)).abs().max() > 0.01, "another one"


def test_other_estimators_have_other_gradients() -> None:
    """k1 as a loss has none, and k3 that of the forward KL."""
    policy, teacher = logits(0).requires_grad_(), logits(1)
    nothing = torch.zeros(N, 2)
    k1, k3 = (
        gradient(objective(policy, teacher, kl_loss_type=name, advantages=nothing), policy) for name in ("k1", "k3")
    )
    torch.testing.assert_close(k1, torch.zeros_like(k1), rtol=0, atol=1e-6)
    forward = gradient(at_sampled_states(policy, teacher, reverse=False), policy)
    torch.testing.assert_close(k3, forward, rtol=1e-4, atol=1e-5)
    assert (forward - gradient(at_sampled_states(policy, teacher), policy)).abs().max() > 0.1
