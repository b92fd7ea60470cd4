"""The objective over a batch equals its sum over any split, in loss and gradient: every mode, term and correction."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from grpo_dist.algorithms import kl_penalty, policy_objective
from grpo_dist.algorithms.aggregate import LOSS_AGG_MODES
from grpo_dist.algorithms.policy_loss import POLICY_LOSS
from tests.tiers import covering
from tests.worker_settings import objective_settings

N, T, V = 8, 5, 7
LENGTHS = torch.tensor([5, 1, 3, 0, 4, 2, 5, 3])  # one response is masked whole
MASK = (torch.arange(T) < LENGTHS.unsqueeze(-1)).float()
SPLITS = {
    "2": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "5": [[0, 1], [2], [3], [4, 5], [6, 7]],
    "8": [[i] for i in range(N)],
    "uneven, shuffled, one empty": [[5, 0, 7, 2, 6], [], [3], [4, 1]],
}
TOKENS = MASK[:4].sum(), MASK[4:].sum()  # of two prompts
WEIGHTS = MASK / torch.stack([TOKENS[i // 4] for i in range(N)])[:, None]
KLS = ("none", "k1", "abs", "k2", "k3", "k1+", "k3+", "unbiased_k3", "full")


def columns(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "logits": normal(N, T, V),
        "ref_logits": normal(N, T, V),
        "old": -2 + 0.3 * normal(N, T),
        "advantages": normal(N, T),
        "weights": normal(N, T).exp(),
        "selected": (normal(N, T) > 1).float(),
        "rollout": -2 + 0.3 * normal(N, T),
    }


def loss_and_gradient(
    parts: list[list[int]],
    *,
    mode: str,
    kl: str,
    entropy: bool,
    corrected: bool,
    loss_mode: str = "vanilla",
    delta: float | None = None,
) -> tuple[float, torch.Tensor]:
    data = columns()
    logits = data["logits"].requires_grad_()
    settings = objective_settings(
        loss_mode=loss_mode,
        loss_agg_mode=mode,
        use_kl_loss=kl != "none",
        kl_loss_type=kl,
        kl_loss_coef=0.3,
        entropy_coeff=0.1 if entropy else 0.0,
        observation_coeff=0.2 if entropy else 0.0,
        loss_scale_factor=T,
        off_policy_threshold=delta,
    )
    total = torch.zeros(())
    for part in parts:
        log_softmax = torch.log_softmax(logits[part], -1)
        reference = torch.log_softmax(data["ref_logits"][part], -1)
        cut = {
            "log_probs": log_softmax[..., 0],
            "old_log_probs": data["old"][part],
            "advantages": data["advantages"][part],
            "response_mask": MASK[part],
            "ref_log_probs": reference[..., 0],
            "entropy": -(log_softmax.exp() * log_softmax).sum(-1),
            "selected_tokens": data["selected"][part],
            "rollout_log_probs": data["rollout"][part],
            "observation_mask": 1 - MASK[part],
        }
        if kl == "full":
            cut["exact_kl"] = kl_penalty("full", log_softmax, reference)
        if corrected:
            cut["rollout_is_weights"] = data["weights"][part]
        if mode == "prompt-mean":
            cut["prompt_weights"] = WEIGHTS[part]
        counts = {"global_tokens": MASK.sum(), "global_sequences": (MASK.sum(-1) > 0).sum(), "global_prompts": 2.0}
        counts["global_observations"] = (1 - MASK).sum()
        loss, _ = policy_objective(cut, settings, **counts)
        total = total + loss
    total.backward()
    assert logits.grad is not None
    return total.item(), logits.grad


def check(split: str, **case: Any) -> tuple[float, torch.Tensor]:
    """Assert that a split has the loss and the gradient of the whole, and return these."""
    whole, gradient = loss_and_gradient([list(range(N))], **case)
    cut, cut_gradient = loss_and_gradient(SPLITS[split], **case)
    assert cut == pytest.approx(whole, rel=1e-5, abs=1e-6), case
    torch.testing.assert_close(cut_gradient, gradient, rtol=1e-5, atol=1e-6, msg=str(case))
    return whole, gradient


@pytest.mark.parametrize(("mode", "split"), covering(LOSS_AGG_MODES, SPLITS))
def test_every_term_and_correction(mode: str, split: str) -> None:
    for kl, entropy, corrected in product(KLS, (False, True), (False, True)):
        _, gradient = check(split, mode=mode, kl=kl, entropy=entropy, corrected=corrected)
        assert gradient.abs().max() > 1e-3, (kl, entropy, corrected)


@pytest.mark.parametrize(("loss_mode", "split"), covering(POLICY_LOSS.names(), SPLITS))
def test_every_policy_loss(loss_mode: str, split: str) -> None:
    check(split, loss_mode=loss_mode, mode="seq-mean-token-mean", kl="k3", entropy=True, corrected=True)


@pytest.mark.parametrize(("mode", "split"), covering(LOSS_AGG_MODES, SPLITS))
def test_off_policy_sequences(mode: str, split: str) -> None:
    case: dict[str, Any] = {"mode": mode, "kl": "unbiased_k3", "entropy": True, "corrected": True}
    whole, _ = check(split, delta=0.05, **case)
    assert abs(loss_and_gradient([list(range(N))], **case)[0] - whole) > 1e-3, "some sequence is left out"


def test_counts_of_the_part_would_change_the_loss() -> None:
    """Without global counts the parts do not add up: the comparison above is about something."""
    case: dict[str, Any] = {"mode": "token-sum", "kl": "none", "entropy": False, "corrected": False}
    whole, _ = loss_and_gradient([list(range(N))], **case)
    cut, _ = loss_and_gradient([[0, 1, 2, 3]], **case)
    assert abs(cut - whole) > 1e-2
