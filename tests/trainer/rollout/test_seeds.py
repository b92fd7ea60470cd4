from grpo_dist.trainer.rollout.seeds import group_seed


def test_seeds_depend_on_every_part_and_leave_room_for_the_group() -> None:
    seeds = {group_seed(run, step, prompt) for run in range(4) for step in range(20) for prompt in range(20)}
    assert len(seeds) == 1600
    assert all(0 <= seed < 2**30 for seed in seeds)
    assert group_seed(1, 23, 4) != group_seed(12, 3, 4)


def test_seeds_are_the_same_in_every_process() -> None:
    assert group_seed(1, 2, 3) == 436752066
