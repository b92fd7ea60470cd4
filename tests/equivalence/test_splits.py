"""The objective over a batch equals its sum over any split, in loss and gradient: every mode, term and correction."""

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


def columns() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "logits": normal(N, T, V).requires_grad_(),
        "ref_logits": normal(N, T, V),
        "old_log_probs": -2 + 0.3 * normal(N, T),
        "advantages": normal(N, T),
        "rollout_is_weights": normal(N, T).exp(),
        "selected_tokens": (normal(N, T) > 1).float(),
        "rollout_log_probs": -2 + 0.3 * normal(N, T),
        "response_mask": MASK,
        "observation_mask": 1 - MASK,
        "prompt_weights": WEIGHTS,
    }


def loss_and_gradient(
    parts: list[list[int]], *, kl: str, entropy: bool, corrected: bool, **keys: Any
) -> tuple[float, torch.Tensor]:
    data = columns()
    keys |= {"use_kl_loss": kl != "none", "kl_loss_type": kl, "kl_loss_coef": 0.3, "loss_scale_factor": T}
    keys |= {"entropy_coeff": 0.1, "observation_coeff": 0.2} if entropy else {}
    counts = {"global_tokens": MASK.sum(), "global_sequences": (MASK.sum(-1) > 0).sum(), "global_prompts": 2.0}
    counts["global_observations"] = (1 - MASK).sum()
    total = torch.zeros(())
    for part in parts:
        cut = {name: values[part] for name, values in data.items()}
        log_softmax, reference = (torch.log_softmax(cut.pop(name), -1) for name in ("logits", "ref_logits"))
        cut |= {"log_probs": log_softmax[..., 0], "ref_log_probs": reference[..., 0]}
        cut |= {"entropy": -(log_softmax.exp() * log_softmax).sum(-1)}
        cut |= {"exact_kl": kl_penalty("full", log_softmax, reference)} if kl == "full" else {}
        if not corrected:
            del cut["rollout_is_weights"]
        total = total + policy_objective(cut, objective_settings(**keys), **counts)[0]
    total.backward()
    assert data["logits"].grad is not None
    return total.item(), data["logits"].grad


def check(split: str, **case: Any) -> tuple[float, torch.Tensor]:
    """Assert that a split has the loss and the gradient of the whole, and return these."""
    whole, gradient = loss_and_gradient([list(range(N))], **case)
    cut, cut_gradient = loss_and_gradient(SPLITS[split], **case)
    assert cut == pytest.approx(whole, rel=1e-5, abs=1e-6), case
    torch.testing.assert_close(cut_gradient, gradient, rtol=1e-5, atol=1e-6, msg=str(case))
    return whole, gradient


@pytest.mark.parametrize(("mode", "split", "kl"), covering(LOSS_AGG_MODES, SPLITS, KLS))
def test_every_term_and_correction(mode: str, split: str, kl: str) -> None:
    for entropy, corrected in product((False, True), (False, True)):
        _, gradient = check(split, loss_agg_mode=mode, kl=kl, entropy=entropy, corrected=corrected)
        assert gradient.abs().max() > 1e-3, (entropy, corrected)


@pytest.mark.parametrize(("loss_mode", "split"), covering(POLICY_LOSS.names(), SPLITS))
def test_every_policy_loss(loss_mode: str, split: str) -> None:
    check(split, loss_mode=loss_mode, loss_agg_mode="seq-mean-token-mean", kl="k3", entropy=True, corrected=True)


@pytest.mark.parametrize(("mode", "split"), covering(LOSS_AGG_MODES, SPLITS))
def test_off_policy_sequences(mode: str, split: str) -> None:
    case: dict[str, Any] = {"loss_agg_mode": mode, "kl": "unbiased_k3", "entropy": True, "corrected": True}
    whole, _ = check(split, off_policy_threshold=0.05, **case)
    assert abs(loss_and_gradient([list(range(N))], **case)[0] - whole) > 1e-3, "some sequence is left out"


def test_counts_of_the_part_would_change_the_loss() -> None:
    """Without global counts the parts do not add up: the comparison above is about something."""
    case: dict[str, Any] = {"loss_agg_mode": "token-sum", "kl": "none", "entropy": False, "corrected": False}
    whole, _ = loss_and_gradient([list(range(N))], **case)
    cut, _ = loss_and_gradient([[0, 1, 2, 3]], **case)
    assert abs(cut - whole) > 1e-2
