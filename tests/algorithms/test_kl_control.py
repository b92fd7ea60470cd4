import pytest

from grpo_dist.algorithms.kl_control import KLController


def test_fixed_stays() -> None:
    controller = KLController(0.3)
    controller.update(100.0, 1000)
    assert controller.coef == 0.3


@pytest.mark.parametrize(("kl", "error"), [(0.11, 0.1), (0.05, -0.2), (1.0, 0.2), (0.1, 0.0)])
def test_adaptive_by_hand(kl: float, error: float) -> None:
    """Target 0.1: the relative error, at most 0.2 either way, times 500 sequences over a horizon of 1000."""
    controller = KLController(0.2, target_kl=0.1, horizon=1000)
    controller.update(kl, 500)
    assert controller.coef == pytest.approx(0.2 * (1 + error / 2))
