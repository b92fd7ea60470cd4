import pytest

from grpo_dist.errors import WorkerLost
from grpo_dist.workers.restarts import RestartBudget


def test_the_one_after_the_last_is_raised_and_says_so() -> None:
    budget = RestartBudget(2)
    errors = [WorkerLost("its process died", "reward", rank, "node0", "score") for rank in range(3)]
    for error in errors[:2]:
        budget.spend(error)
    assert budget.failures == [str(error) for error in errors[:2]]
    with pytest.raises(WorkerLost, match="reward worker 2 on node0") as caught:
        budget.spend(errors[2])
    assert caught.value.__notes__ == ["trainer.max_worker_restarts=2 workers have already been replaced"]
    assert len(budget.failures) == 2


def test_without_a_budget_the_first_is_raised_as_it_is() -> None:
    with pytest.raises(WorkerLost) as caught:
        RestartBudget().spend(WorkerLost("its process died"))
    assert not hasattr(caught.value, "__notes__")
