"""What custom code in worker processes has printed, as a run asks for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from grpo_dist.errors import WorkerLost
from grpo_dist.plan.commands import load_config
from grpo_dist.rewards.scorer import PrintedLines
from grpo_dist.runtime.event_loop import run
from grpo_dist.workers.roles import Roles

LOOP = f"actor_rollout_ref.rollout.agent.default_agent_loop={__file__}:Loop"
LOSS = f"actor_rollout_ref.actor.policy_loss.loss_mode={__file__}:loss"
KL = f"actor_rollout_ref.actor.kl_loss_type={__file__}:kl"


class Workers:
    """Processes that have printed their rank; the second of them is lost."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 3

    def submit(self, rank: int, stage: str, method: str) -> int:
        assert method == "take_printed"
        return rank

    async def outcomes(self, calls: list[int]) -> list[Any]:
        return [WorkerLost("gone") if rank == 1 else ([f"{self.name} {rank}"], 2) for rank in calls]


def roles() -> Roles:
    """The last engine has been replaced, and is not there yet."""
    rollout: Any = SimpleNamespace(workers=Workers("engine"), is_starting=lambda rank: rank == 2)
    reward: Any = SimpleNamespace(printed=PrintedLines())
    actor: Any = SimpleNamespace(workers=Workers("rank"))
    return Roles({"actor": actor, "rollout": rollout, "reward": reward})


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], []),
        ([LOOP], [["  engine 0", "  ... and 2 more lines"]]),
        ([LOSS], [["  rank 0", "  rank 2", "  ... and 4 more lines"]]),
        ([KL, LOOP], [["  rank 0", "  rank 2", "  ... and 4 more lines"], ["  engine 0", "  ... and 2 more lines"]]),
    ],
)
def test_only_processes_with_custom_code_are_asked(overrides: list[str], told: list[list[str]]) -> None:
    config, _ = load_config(overrides)
    found = run(roles().take_printed(config))
    assert [message.splitlines()[1:] for message in found] == told


def test_what_the_reward_processes_have_sent_is_told_too() -> None:
    asked = roles()
    asked.reward.printed.note("reward function", ["hello"], 0)
    config, _ = load_config([])
    assert run(asked.take_printed(config)) == ["the reward function printed:\n  hello"]
    assert run(asked.take_printed(config)) == []
