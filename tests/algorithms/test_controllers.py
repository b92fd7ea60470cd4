"""Moving averages of the scores of agents."""

from __future__ import annotations

import pytest

from grpo_dist.algorithms.controllers import AgentBaselines, EntropyController, score_metrics


def test_the_sequences_of_a_step_count_together() -> None:
    """Twice the score 1 with decay 1/2: 1 - 1/4; then once 0; the other agent has played once."""
    baselines = AgentBaselines(0.5)
    assert baselines.metrics() == {}
    baselines.update(score_metrics({0: (1.0, 2), 7: (-1.0, 1)}))
    assert baselines.values == {0: 0.75, 7: -0.5}
    baselines.update(score_metrics({0: (0.0, 1)}) | {"actor/lr": 1.0})
    assert baselines.values == pytest.approx({0: 0.375, 7: -0.5})
    assert AgentBaselines.recorded(baselines.metrics() | {"actor/lr": 1.0}) == baselines.values


def test_the_weight_moves_towards_the_target() -> None:
    """Entropies 0.5, 0.1, 0.2, 0.3, target 0.2: c goes 0.01, 0.005, 0.01, 0.015, 0.01; it acts up to the target."""
    controller, weights = EntropyController(0.01, target=0.2, delta=0.005), []
    for entropy in (0.5, 0.1, 0.2, 0.3):
        weights.append(controller.weight)
        controller.update(entropy)
    assert [*weights, controller.weight] == pytest.approx([0, 0, 0.01, 0.015, 0])
    assert (controller.coef, controller.entropy) == (pytest.approx(0.01), 0.3)


def test_it_is_never_negative() -> None:
    controller = EntropyController(0.0, target=0.2)
    controller.update(1.0)
    assert controller.coef == 0
    controller.update(0.0)
    assert controller.weight == 0.005


def test_without_a_target_it_is_fixed() -> None:
    controller = EntropyController(0.01)
    controller.update(0.0)
    assert (controller.weight, controller.entropy) == (0.01, None)
