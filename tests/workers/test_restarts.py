"""The restart budget, on nodes that are none."""

from __future__ import annotations

import pytest

from grpo_dist.errors import WorkerLost
from grpo_dist.workers.restarts import RestartBudget

GONE = {"b": "host1 (10.0.0.2)"}


def lost(rank: int) -> WorkerLost:
    return WorkerLost("its process died", "reward", rank, "node0", "score")


def test_the_one_after_the_last_is_raised_and_says_so() -> None:
    budget = RestartBudget(2)
    for rank in range(2):
        budget.spend(lost(rank), "a", {})
    assert budget.failures == [str(lost(rank)) for rank in range(2)]
    with pytest.raises(WorkerLost, match="reward worker 2 on node0") as caught:
        budget.spend(lost(2), "a", {})
    assert caught.value.__notes__ == ["trainer.max_worker_restarts=2 faults have already been made good"]
    assert len(budget.failures) == 2


def test_without_a_budget_the_first_is_raised_as_it_is() -> None:
    with pytest.raises(WorkerLost) as caught:
        RestartBudget().spend(lost(0), "", {})
    assert not hasattr(caught.value, "__notes__")


def test_a_lost_machine_is_one_fault() -> None:
    """Also if one of its workers was lost before Ray knew; a process that died elsewhere is another one."""
    budget = RestartBudget(2)
    budget.spend(lost(0), "b", {})
    for rank in (1, 2, 3):
        budget.spend(lost(rank), "b", GONE)
    assert [GONE["b"] in failure for failure in budget.failures] == [False, True, True, True]
    assert budget.machines_lost == 1
    budget.spend(lost(4), "a", GONE)
    with pytest.raises(WorkerLost):
        budget.spend(lost(5), "a", GONE)
    budget.spend(lost(6), "b", GONE)
    with pytest.raises(WorkerLost) as caught:
        budget.spend(lost(7), "c", GONE | {"c": "host2 (10.0.0.3)"})
    assert "its machine is lost: host2 (10.0.0.3)" in caught.value.__notes__


def test_where_a_worker_was_lost_that_is_not_required_is_noted_and_not_counted() -> None:
    budget = RestartBudget(1)
    budget.note_machine("b", GONE)
    budget.note_machine("a", GONE)
    assert (budget.machines_lost, budget.failures) == (1, [])
    budget.spend(lost(0), "b", GONE)
    assert (budget.machines_lost, len(budget.failures)) == (1, 1)
    with pytest.raises(WorkerLost):
        budget.spend(lost(1), "a", GONE)
