import math

import pytest
import torch

from grpo_dist.algorithms import kl_penalty
from grpo_dist.errors import BatchError, ConfigError
from tests.golden import cases


@pytest.mark.parametrize("case", cases("kl", ("k1", "kl", "k2", "mse", "k3", "low_var_kl")))
def test_equals_verl(case: dict) -> None:
    inputs = case["inputs"]
    kl = kl_penalty(case["name"], torch.tensor(inputs["log_prob"]), torch.tensor(inputs["ref_log_prob"]))
    torch.testing.assert_close(kl, torch.tensor(case["outputs"]["kl"]), rtol=1e-5, atol=1e-6)


def test_by_hand() -> None:
    """p = 0.5, q = 0.25: log p/q = ln 2."""
    p, q = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    assert kl_penalty("k1", p, q).item() == pytest.approx(math.log(2))
    assert kl_penalty("k2", p, q).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_penalty("k3", p, q).item() == pytest.approx(0.5 + math.log(2) - 1)


def test_k3_is_the_exact_kl_on_average() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    expected = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * kl_penalty("k3", p.log()[None], q.log()[None])[0]).sum(), expected)
    torch.testing.assert_close((p * kl_penalty("k1", p.log()[None], q.log()[None])[0]).sum(), expected)


def test_k3_stays_finite() -> None:
    log_probs = torch.tensor([[-500.0]], requires_grad=True)
    kl = kl_penalty("k3", log_probs, torch.tensor([[0.0]]))
    kl.sum().backward()
    assert kl.item() == 10.0
    assert torch.isfinite(log_probs.grad).all()


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"kl_loss_type=k4: no such KL estimator"):
        kl_penalty("k4", torch.zeros(1, 1), torch.zeros(1, 1))
    with pytest.raises(BatchError, match="differ"):
        kl_penalty("k1", torch.zeros(1, 1), torch.zeros(1, 2))
