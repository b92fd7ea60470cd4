import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from grpo_dist.algorithms import policy_objective
from grpo_dist.errors import BatchError
from tests.messages import refuses
from tests.worker_settings import changed_objective, objective_settings

SHAPE = (2, 2)
COLUMNS = {
    "log_probs": torch.full(SHAPE, -1.0),
    "old_log_probs": torch.full(SHAPE, -1.0),
    "advantages": torch.tensor([[1.0, 1.0], [-3.0, -3.0]]),
    "response_mask": torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
    "ref_log_probs": torch.full(SHAPE, -1.5),
    "entropy": torch.full(SHAPE, 2.0),
}
SETTINGS = objective_settings(use_kl_loss=True, kl_loss_type="k1", kl_loss_coef=0.1, entropy_coeff=0.01)
SURROGATE_ALONE: dict[str, Any] = {"use_kl_loss": False, "entropy_coeff": 0.0}


def without(columns: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {column: values for column, values in columns.items() if column != name}


def objective(columns: Mapping[str, torch.Tensor] = COLUMNS, **changes: Any) -> tuple[torch.Tensor, dict]:
    counts = {"global_tokens": 3, "global_sequences": 2, "global_observations": changes.pop("global_observations", 0)}
    return policy_objective(columns, changed_objective(SETTINGS, **changes), **counts)


def test_the_three_terms_by_hand() -> None:
    """Surrogate (-1 - 1 + 3) / 3, KL 0.5 on each token, entropy 2 on each token; all by the same aggregate."""
    loss, metrics = objective()
    assert loss.item() == pytest.approx(1 / 3 + 0.1 * 0.5 - 0.01 * 2)
    assert metrics["actor/kl_loss"].item() == pytest.approx(0.5)
    assert metrics["actor/entropy"].item() == pytest.approx(2.0)
    loss, _ = objective(loss_agg_mode="seq-mean-token-sum")
    assert loss.item() == pytest.approx((1 / 2) + 0.1 * (1.5 / 2) - 0.01 * (6 / 2))
    loss, metrics = objective(**SURROGATE_ALONE)  # what is not asked for is left out, even where its columns are
    assert loss.item() == pytest.approx(1 / 3)
    assert not {"actor/kl_loss", "actor/entropy"} & metrics.keys()


def test_what_a_policy_teaches_itself_counts_where_something_was_shown() -> None:
    """To the second response alone: KL 0.5 on one of three tokens, over the count of all three."""
    shown = COLUMNS | {"teacher_mask": torch.tensor([[0.0, 0.0], [1.0, 1.0]])}
    loss, metrics = objective(shown, entropy_coeff=0.0, teaches_itself=True)
    assert loss.item() == pytest.approx(1 / 3 + 0.1 * 0.5 / 3)
    assert metrics["actor/kl_loss"].item() == pytest.approx(0.5 / 3)
    assert metrics["actor/self_distilled_fraction"].item() == pytest.approx(1 / 3)
    whole, metrics = objective(shown, entropy_coeff=0.0)
    assert whole.item() == pytest.approx(1 / 3 + 0.1 * 0.5)
    assert "actor/self_distilled_fraction" not in metrics


@pytest.mark.parametrize(("kl_loss_type", "column"), [("full", "exact_kl"), ("k3", "ref_log_probs")])
def test_a_kl_and_an_entropy_that_are_wanted_are_never_left_out(kl_loss_type: str, column: str) -> None:
    """With the reference's log-probs at hand, `full` still needs its own column, and the other way round."""
    columns = COLUMNS | {"exact_kl": torch.full(SHAPE, 0.5)}
    with refuses(BatchError, f"kl_loss_type={kl_loss_type}", column):
        objective(without(columns, column), kl_loss_type=kl_loss_type)
    loss, metrics = objective(columns, kl_loss_type=kl_loss_type)
    assert metrics["actor/kl_loss"].item() == pytest.approx(0.5 if kl_loss_type == "full" else math.exp(-0.5) - 0.5)
    assert loss.item() == pytest.approx(1 / 3 + 0.1 * metrics["actor/kl_loss"].item() - 0.01 * 2)
    with refuses(BatchError, "entropy_coeff=0.01", "entropy"):
        objective(without(COLUMNS, "entropy"))


def test_observations_are_foreseen() -> None:
    """The masked token alone, of 4 that the mini-batch has: 2 nats / 4, times 0.5; nothing off that mask."""
    log_probs = torch.tensor([[-1.0, -0.5], [-2.0, -2.0]], requires_grad=True)
    columns = COLUMNS | {"log_probs": log_probs}
    plain, _ = objective(columns, **SURROGATE_ALONE)
    with refuses(BatchError, "observation_coeff=0.5", "observation_mask"):
        objective(columns, observation_coeff=0.5, **SURROGATE_ALONE)
    columns["observation_mask"] = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    loss, metrics = objective(columns, observation_coeff=0.5, global_observations=4.0, **SURROGATE_ALONE)
    assert metrics["actor/observation_loss"].item() == pytest.approx(2 / 4)
    assert (loss - plain).item() == pytest.approx(0.5 * 2 / 4)
    (loss - plain).backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[0.0, 0.0], [0.0, -0.125]]))


def test_bypass_weighs_by_the_policy_as_it_trains() -> None:
    """-A log pi with ratios e^0.5 and e^1, truncated at 2: (1.6487 + 2 * 0.5 - 3 * 1.6487) / 3; no gradient in w."""
    log_probs = torch.tensor([[-1.0, -0.5], [-1.0, 0.0]], requires_grad=True)
    options = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": None, "rollout_rs_threshold": None}
    columns = COLUMNS | {"log_probs": log_probs, "old_log_probs": torch.full(SHAPE, -1.5)}
    loss, _ = objective(columns, loss_mode="gpg", correction=options, **SURROGATE_ALONE)
    root = math.exp(0.5)
    assert loss.item() == pytest.approx((root + 2 * 0.5 - 3 * root) / 3, rel=1e-5)
    loss.backward()
    expected = torch.tensor([[-root, -2.0], [3 * root, 0.0]]) / 3
    torch.testing.assert_close(log_probs.grad, expected)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("on_policy", [False, True])
def test_off_policy_sequences_are_left_out_and_count(on_policy: bool, share: float) -> None:
    """The second response is 0.6 nats from the sampler: without its policy loss (-1 - 1) / 3; its KL stays."""
    columns = COLUMNS | {"rollout_log_probs": torch.tensor([[0.0, 0.0], [-0.4, -9.0]])}
    columns = without(columns, "old_log_probs") if on_policy else columns
    columns |= {} if share == 1 else {"rollout_is_weights": torch.full(SHAPE, share)}
    options: dict[str, Any] = {"on_policy": on_policy, "entropy_coeff": 0.0, "kl_loss_coef": 0.3}
    for threshold, value, gone in ((0.5, -2 / 3, 1 / 3), (0.7, 1 / 3, 0.0)):
        loss, metrics = objective(columns, off_policy_threshold=threshold, **options)
        assert loss.item() == pytest.approx(share * value + 0.3 * 0.5)
        assert metrics["actor/off_policy_masked_fraction"].item() == pytest.approx(gone)


def test_the_unbiased_kl_takes_the_old_policy_of_the_loss() -> None:
    """k3 of distance 0.5 is e^-0.5 - 0.5, times e^0.2; on policy the ratio is 1, and has its gradient."""
    options: dict[str, Any] = {"kl_loss_type": "unbiased_k3", "kl_loss_coef": 3.0, "entropy_coeff": 0.0}
    value = math.exp(-0.5) - 0.5
    _, metrics = objective(COLUMNS | {"old_log_probs": torch.full(SHAPE, -1.2)}, **options)
    assert metrics["actor/kl_loss"].item() == pytest.approx(math.exp(0.2) * value)
    log_probs = torch.full(SHAPE, -1.0, requires_grad=True)
    columns = without(COLUMNS, "old_log_probs") | {"log_probs": log_probs, "advantages": torch.zeros(SHAPE)}
    loss, metrics = objective(columns, on_policy=True, **options)
    assert metrics["actor/kl_loss"].item() == pytest.approx(value)
    loss.backward()
    torch.testing.assert_close(log_probs.grad, 0.5 * COLUMNS["response_mask"])
