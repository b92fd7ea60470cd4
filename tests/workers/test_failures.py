"""What Ray's errors mean. Those of real processes: test_group.py."""

from __future__ import annotations

from ray.exceptions import ObjectLostError, RayTaskError

from grpo_dist.errors import DataLost, WorkerLost
from grpo_dist.workers.failures import failure
from tests.messages import says

WHERE = ("reward", 1, "node2", "score")


def test_data_that_were_in_a_lost_machine_are_not_the_fault_of_who_needs_them() -> None:
    """Its worker is not replaced; where the answer itself is lost, it is asked again as of a lost worker."""
    gone = ObjectLostError("ab" * 28, b"", "")
    needed = failure(RayTaskError("score", "traceback", gone).as_instanceof_cause(), *WHERE)
    assert isinstance(needed, DataLost)
    says(needed, "reward worker 1 on node2", "'score'", "machine")
    answer = failure(gone, *WHERE)
    assert isinstance(answer, WorkerLost)
    assert (answer.role, answer.rank, answer.node, answer.stage) == WHERE
