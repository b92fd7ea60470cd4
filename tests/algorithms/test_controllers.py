"""What a run moves from step to step: the weights of KL and entropy, and the average scores of agents."""

from __future__ import annotations

import pytest

from grpo_dist.algorithms.controllers import AgentBaselines, EntropyController, KLController, score_metrics


def test_the_sequences_of_a_step_count_together() -> None:
    """Twice the score 1 with decay 1/2: 1 - 1/4; then once 0; the other agent has played once."""
    baselines = AgentBaselines(0.5)
    assert baselines.metrics() == {}
    baselines.update(score_metrics({0: (1.0, 2), 7: (-1.0, 1)}))
    assert baselines.values == {0: 0.75, 7: -0.5}
    baselines.update(score_metrics({0: (0.0, 1)}) | {"actor/lr": 1.0})
    assert baselines.values == pytest.approx({0: 0.375, 7: -0.5})
    assert AgentBaselines.recorded(baselines.metrics() | {"actor/lr": 1.0}) == baselines.values


@pytest.mark.parametrize(
    ("coef", "options", "entropies", "weights", "after"),
    [
        # c goes 0.01, 0.005, 0.01, 0.015, 0.01; it acts up to the target
        (0.01, {"target": 0.2, "delta": 0.005}, [0.5, 0.1, 0.2, 0.3], [0, 0, 0.01, 0.015, 0], 0.01),
        (0.0, {"target": 0.2}, [1.0, 0.0], [0, 0, 0.005], 0.005),  # never negative
        (0.01, {}, [0.0], [0.01, 0.01], 0.01),  # without a target it is fixed
    ],
)
def test_the_weight_moves_towards_the_target(
    coef: float, options: dict[str, float], entropies: list[float], weights: list[float], after: float
) -> None:
    controller, found = EntropyController(coef, **options), []
    for entropy in entropies:
        found.append(controller.weight)
        controller.update(entropy)
    assert [*found, controller.weight] == pytest.approx(weights)
    assert controller.coef == pytest.approx(after)
    assert controller.entropy == (entropies[-1] if options else None)


@pytest.mark.parametrize(("kl", "error"), [(0.11, 0.1), (0.05, -0.2), (1.0, 0.2), (0.1, 0.0)])
def test_the_coefficient_of_the_kl_adapts(kl: float, error: float) -> None:
    """Target 0.1: the relative error, at most 0.2 either way, times 500 sequences over a horizon of 1000."""
    controller, fixed = KLController(0.2, target_kl=0.1, horizon=1000), KLController(0.2)
    for each in (controller, fixed):
        each.update(kl, 500)
    assert controller.coef == pytest.approx(0.2 * (1 + error / 2))
    assert fixed.coef == 0.2
