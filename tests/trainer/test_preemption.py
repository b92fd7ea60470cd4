import signal

import pytest

from grpo_dist.errors import Terminated
from grpo_dist.trainer.preemption import Preemption


def test_it_ends_the_run_at_once_where_the_state_is_a_finished_steps() -> None:
    preemption = Preemption()
    with pytest.raises(Terminated):
        preemption.handle(signal.SIGTERM, None)
    assert preemption.asked


def test_it_waits_for_the_end_of_a_step_whose_update_has_begun() -> None:
    preemption = Preemption()
    preemption.hold()
    preemption.handle(signal.SIGTERM, None)
    assert preemption.asked
    with pytest.raises(Terminated):
        preemption.release()


def test_the_second_one_does_not_wait() -> None:
    preemption = Preemption()
    preemption.hold()
    preemption.handle(signal.SIGTERM, None)
    with pytest.raises(Terminated):
        preemption.handle(signal.SIGTERM, None)


def test_without_it_nothing_happens() -> None:
    preemption = Preemption()
    for _ in range(2):
        preemption.hold()
        preemption.release()
    assert not preemption.asked
