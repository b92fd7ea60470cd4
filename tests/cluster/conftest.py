"""What runs on emulated machines share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos import runs as chaos
from tests.cluster.ray_nodes import metric

STEPS = 2
# A run of so many steps, in which nothing is lost.
SETTINGS = [
    *chaos.SETTINGS,
    *(f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=false"),
    *("trainer.worker_timeout_s=300", "trainer.max_worker_restarts=0", "trainer.max_actor_restarts=0"),
]


@pytest.fixture
def as_on_one_machine(main_run: chaos.Outcome) -> Callable[[Path], None]:
    """Asserts that a run has the rewards and gradient norms of one on one machine, to the last bit: there too, two
    ranks sum up, and a sum of two does not depend on their order.
    """

    def check(run_dir: Path) -> None:
        for name in ("critic/score/mean", "actor/grad_norm"):
            alone = [(step, value) for step, value in main_run.curve(name) if 0 < step <= STEPS]
            assert metric(run_dir, name) == alone, name
            assert len(alone) == STEPS

    return check
