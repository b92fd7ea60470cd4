import math

import pytest
import torch

from grpo_dist.algorithms import policy_objective
from grpo_dist.algorithms.policy_loss import DEFAULTS, POLICY_LOSS
from grpo_dist.errors import BatchError
from grpo_dist.names import KL_LOSS_TYPES, LOSS_AGG_MODES, TOKEN_SELECTING_LOSSES
from tests.messages import refuses

SHAPE = (2, 2)
ARGUMENTS = {
    "log_probs": torch.full(SHAPE, -1.0),
    "old_log_probs": torch.full(SHAPE, -1.0),
    "advantages": torch.tensor([[1.0, 1.0], [-3.0, -3.0]]),
    "response_mask": torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
    "ref_log_probs": torch.full(SHAPE, -1.5),
    "entropy": torch.full(SHAPE, 2.0),
    "loss_mode": "vanilla",
    "loss_agg_mode": "token-mean",
    "options": {"clip_ratio": 0.2, "clip_ratio_c": 3.0},
    "kl_loss_type": "k1",
    "kl_loss_coef": 0.1,
    "entropy_coeff": 0.01,
    "global_tokens": 3,
    "global_sequences": 2,
}


def test_the_three_terms_by_hand() -> None:
    """Surrogate (-1 - 1 + 3) / 3, KL 0.5 on each token, entropy 2 on each token."""
    loss, metrics = policy_objective(**ARGUMENTS)
    assert loss.item() == pytest.approx(1 / 3 + 0.1 * 0.5 - 0.01 * 2)
    assert metrics["actor/kl_loss"].item() == pytest.approx(0.5)
    assert metrics["actor/entropy"].item() == pytest.approx(2.0)


def test_every_term_uses_the_same_aggregate() -> None:
    loss, _ = policy_objective(**ARGUMENTS | {"loss_agg_mode": "seq-mean-token-sum"})
    assert loss.item() == pytest.approx((1 / 2) + 0.1 * (1.5 / 2) - 0.01 * (6 / 2))


def test_terms_without_a_column_are_left_out() -> None:
    without = {"kl_loss_type": None, "ref_log_probs": None, "entropy": None}
    loss, metrics = policy_objective(**ARGUMENTS | without)
    assert loss.item() == pytest.approx(1 / 3)
    assert not {"actor/kl_loss", "actor/entropy"} & metrics.keys()


@pytest.mark.parametrize(("kl_loss_type", "column"), [("full", "exact_kl"), ("k3", "ref_log_probs")])
def test_a_kl_that_is_wanted_is_never_left_out(kl_loss_type: str, column: str) -> None:
    """With the reference's log-probs at hand, `full` still needs its own column, and the other way round."""
    columns = {"ref_log_probs": torch.full(SHAPE, -1.5), "exact_kl": torch.full(SHAPE, 0.5)}
    with refuses(BatchError, f"kl_loss_type={kl_loss_type}", column):
        policy_objective(**ARGUMENTS | columns | {column: None, "kl_loss_type": kl_loss_type})
    loss, metrics = policy_objective(**ARGUMENTS | columns | {"kl_loss_type": kl_loss_type})
    assert metrics["actor/kl_loss"].item() == pytest.approx(0.5 if kl_loss_type == "full" else math.exp(-0.5) - 0.5)
    assert loss.item() == pytest.approx(1 / 3 + 0.1 * metrics["actor/kl_loss"].item() - 0.01 * 2)


def test_bypass_weighs_by_the_policy_as_it_trains() -> None:
    """-A log pi with ratios e^0.5 and e^1, truncated at 2: (1.6487 + 2 * 0.5 - 3 * 1.6487) / 3; no gradient in w."""
    log_probs = torch.tensor([[-1.0, -0.5], [-1.0, 0.0]], requires_grad=True)
    options = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": None, "rollout_rs_threshold": None}
    loss, _ = policy_objective(
        **ARGUMENTS
        | {"log_probs": log_probs, "old_log_probs": torch.full(SHAPE, -1.5), "loss_mode": "gpg", "correction": options}
        | {"kl_loss_type": None, "ref_log_probs": None, "entropy": None}
    )
    root = math.exp(0.5)
    assert loss.item() == pytest.approx((root + 2 * 0.5 - 3 * root) / 3, rel=1e-5)
    loss.backward()
    expected = torch.tensor([[-root, -2.0], [3 * root, 0.0]]) / 3
    torch.testing.assert_close(log_probs.grad, expected)


LOSSES = sorted(POLICY_LOSS.names())
COLUMNS = ("log_probs", "old_log_probs", "advantages", "ref_log_probs", "entropy", "rollout_is_weights", "selected")


def loss_and_gradient(noise: float, **options: object) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    """Three responses with tokens in the middle that an environment put in; their columns hold `noise`."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.tensor([[1.0, 0, 0, 1, 1], [1, 1, 0, 1, 0], [0, 0, 1, 1, 1]])
    columns = {name: torch.randn(mask.shape, generator=generator) - 1 for name in COLUMNS}
    columns["rollout_is_weights"], columns["selected"] = (
        columns["rollout_is_weights"].exp(),
        torch.tensor([[1.0, 1, 1, 0, 0], [0, 1, 1, 0, 1], [1, 0, 0, 1, 0]]),
    )
    columns = {name: values.where(mask > 0, noise) for name, values in columns.items()}
    log_probs = columns["log_probs"].requires_grad_()
    arguments = ARGUMENTS | columns | {"response_mask": mask, "global_tokens": 9, "global_sequences": 3} | options
    arguments["options"] = {**DEFAULTS, "clip_ratio": 0.2, "clip_ratio_c": 3.0}
    loss, metrics = policy_objective(**{**arguments, "log_probs": log_probs})
    loss.backward()
    assert log_probs.grad is not None
    assert (log_probs.grad[mask == 0] == 0).all()
    assert (log_probs.grad[mask == 1] != 0).any()
    return loss.item(), log_probs.grad, metrics


@pytest.mark.parametrize("agg", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss_mode", LOSSES)
def test_tokens_off_the_mask_change_neither_loss_nor_gradient(loss_mode: str, agg: str) -> None:
    """Wherever they are, and whatever their columns hold."""
    options = {"loss_mode": loss_mode, "loss_agg_mode": agg, "loss_scale_factor": 5}
    if loss_mode not in TOKEN_SELECTING_LOSSES:
        options["selected"] = None
    plain, noisy = (loss_and_gradient(noise, **options) for noise in (0.0, -30.0))
    assert noisy[0] == plain[0]
    assert torch.equal(noisy[1], plain[1])
    assert noisy[2] == plain[2]


@pytest.mark.parametrize("kl_loss_type", sorted(KL_LOSS_TYPES[:-1]))
@pytest.mark.parametrize("noise", [-30.0, -math.inf])
def test_nor_does_their_kl(kl_loss_type: str, noise: float) -> None:
    """Not even what cannot be: the gradient of an infinite distance is nan, and 0 * nan is nan."""
    options = {"kl_loss_type": kl_loss_type, "selected": None, "kl_loss_coef": 1.0}
    plain, noisy = (loss_and_gradient(value, **options) for value in (0.0, noise))
    assert (noisy[0], noisy[2]) == (plain[0], plain[2])
    assert torch.equal(noisy[1], plain[1])
