"""Mini-batches of groups, whatever their sizes."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_dist.plan.commands import load_config
from grpo_dist.trainer.loop import mini_batches

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
