"""Mini-batches of groups, whatever their sizes."""

import numpy as np
import pytest

from grpo_dist.errors import BatchError, RewardError
from grpo_dist.plan.commands import load_config
from grpo_dist.runtime.batch_ref import DataProtoRef, Frame
from grpo_dist.tracking.summary import Progress
from grpo_dist.trainer.loop import mini_batches, stage
from tests.messages import refuses, says

ACTOR = "actor_rollout_ref.actor"


def rows_of(uids: str, *overrides: str, step: int = 0) -> list[list[int]]:
    """The rows of each mini-batch of 4 prompts, 2 at a time; a letter is the group of a row."""
    sizes = ("data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=4")
    config, _ = load_config([*sizes, *overrides])
    column = np.array([f"step1-prompt{letter}" for letter in uids])
    return [rows.tolist() for rows in mini_batches(config, config.actor_rollout_ref.actor, column, step)]


def test_a_mini_batch_has_so_many_groups_whatever_their_sizes() -> None:
    assert rows_of("aaaabbbbccccdddd") == [list(range(8)), list(range(8, 16))]
    assert rows_of("aaabbbbccdddd") == [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]


@pytest.mark.parametrize("uids", ["aaaabbbbccccdddd", "aabbbbcccddd"])
def test_in_each_epoch_every_row_is_trained_once_and_no_group_is_cut(uids: str) -> None:
    parts = rows_of(uids, f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.shuffle=true", step=3)
    assert len(parts) == 4
    for epoch in (parts[:2], parts[2:]):
        assert sorted(row for rows in epoch for row in rows) == list(range(len(uids)))
        assert [len({uids[row] for row in rows}) for rows in epoch] == [2, 2]


def batch(*columns: str) -> DataProtoRef:
    return DataProtoRef((Frame(columns, (), np.zeros(0), np.zeros(0)),))


class Loop:
    step = 4

    def __init__(self) -> None:
        self.timings: dict[str, float] = {}
        self.progress = Progress(1, 0, None)

    @stage("score", needs=("responses",), adds=("token_level_scores",))
    async def score(self, rows: DataProtoRef) -> DataProtoRef:
        return batch(*rows.columns, "token_level_scores")

    @stage("forgetful", adds=("advantages",))
    async def forgetful(self) -> DataProtoRef:
        return batch("responses")

    @stage("failing")
    async def failing(self) -> None:
        raise RewardError("bad")


def test_a_stage_is_timed_and_what_it_lacks_is_named() -> None:
    """A missing column with its maker, a broken promise, and the step of an error."""
    loop = Loop()
    assert "token_level_scores" in loop.score(batch("responses")).columns
    assert loop.timings["score"] >= 0
    with refuses(BatchError, "'score'", "'responses'", "rollout", "prompts"):
        loop.score(batch("prompts"))
    with refuses(BatchError, "forgetful", "'advantages'", "responses"):
        loop.forgetful()
    with pytest.raises(RewardError) as caught:
        loop.failing()
    says(caught.value.__notes__, "'failing'", "step 5")
