"""Moving averages of the scores of agents."""

from __future__ import annotations

import pytest

from grpo_dist.algorithms.baselines import AgentBaselines, score_metrics


def test_the_sequences_of_a_step_count_together() -> None:
    """Twice the score 1 with decay 1/2: 1 - 1/4; then once 0; the other agent has played once."""
    baselines = AgentBaselines(0.5)
    assert baselines.metrics() == {}
    baselines.update(score_metrics({0: (1.0, 2), 7: (-1.0, 1)}))
    assert baselines.values == {0: 0.75, 7: -0.5}
    baselines.update(score_metrics({0: (0.0, 1)}) | {"actor/lr": 1.0})
    assert baselines.values == pytest.approx({0: 0.375, 7: -0.5})
    assert AgentBaselines.recorded(baselines.metrics() | {"actor/lr": 1.0}) == baselines.values
