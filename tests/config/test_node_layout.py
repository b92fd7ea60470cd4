"""The machine of each process, worked out by hand."""

from __future__ import annotations

import pytest

from grpo_dist.config.load import load_config
from grpo_dist.config.node_layout import fill, node_layout, spread
from grpo_dist.config.placement import placement

FSDP_SIZE = "actor_rollout_ref.actor.fsdp_config.fsdp_size"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"


def layout(*overrides: str) -> dict[str, list[int]]:
    config, _ = load_config([*overrides])
    return {role: list(home) for role, home in node_layout(config).items()}


def gpus(nodes: int, actor: int, rollout: int, ref: int, *more: str) -> dict[str, list[int]]:
    sizes = {"actor": actor, "rollout": rollout, "ref": ref}
    asked = [f"cluster.{role}_world_size={size}" for role, size in sizes.items()]
    return layout(
        "cluster=multi_node",
        f"trainer.nnodes={nodes}",
        "model=qwen3_8b",
        "data.train_batch_size=96",
        f"{MINI}=96",
        *asked,
        *more,
    )


def test_ranks_fill_one_machine_after_the_other() -> None:
    found = gpus(2, 8, 7, 1)
    assert (found["actor"], found["rollout"], found["ref"]) == ([0] * 8, [1] * 7, [1])
    found = gpus(3, 16, 4, 4, "reward.num_workers=5")
    assert (found["actor"], found["rollout"], found["ref"]) == ([0] * 8 + [1] * 8, [2] * 4, [2] * 4)
    assert found["reward"] == [0, 0, 1, 1, 2], "the first two of three equally full ones take the rest"


def test_a_role_may_begin_where_another_one_ends() -> None:
    found = gpus(2, 4, 8, 4)
    assert (found["actor"], found["rollout"], found["ref"]) == ([0] * 4, [0] * 4 + [1] * 4, [1] * 4)


def test_engines_are_not_cut() -> None:
    """Two GPUs are left on machine 0: too few for an engine, and the reference takes them."""
    found = gpus(2, 6, 8, 2, f"{TENSOR_PARALLEL}=4")
    assert (found["actor"], found["rollout"], found["ref"]) == ([0] * 6, [1, 1], [0, 0])


def test_copies_of_the_weights_are_not_cut() -> None:
    """Copies of 3 on machines of 8: two on each, and what is left goes to others."""
    found = gpus(2, 12, 2, 2, f"{FSDP_SIZE}=3")
    assert (found["actor"], found["rollout"], found["ref"]) == ([0] * 6 + [1] * 6, [0, 0], [1, 1])
    copies = [set(found["actor"][first : first + 3]) for first in range(0, 12, 3)]
    assert copies == [{0}, {0}, {1}, {1}]


def test_a_copy_may_take_whole_machines() -> None:
    found = gpus(5, 32, 4, 4, f"{FSDP_SIZE}=16")
    assert found["actor"] == [0] * 8 + [1] * 8 + [2] * 8 + [3] * 8


def test_on_cpu_every_role_is_spread() -> None:
    """Two actor ranks on one machine each, then the emptiest in turn."""
    found = layout("trainer.nnodes=2", "reward.num_workers=3")
    assert found == {"actor": [0, 1], "rollout": [0], "ref": [1], "reward": [0, 0, 1]}


def test_one_gpu_is_one_machine() -> None:
    assert layout("cluster=single_gpu") == {"actor": [0], "rollout": [0], "ref": [0], "reward": [0]}


@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4, 8])
def test_what_the_placement_chooses_has_a_place(nodes: int, tensor_parallel: int) -> None:
    if nodes == 1 and tensor_parallel == 8:
        return  # no GPU is left for the other roles: refused
    overrides = [
        "cluster=multi_node",
        "model=qwen3_8b",
        f"trainer.nnodes={nodes}",
        f"{TENSOR_PARALLEL}={tensor_parallel}",
    ]
    config, _ = load_config(overrides)
    place, found = placement(config), node_layout(config)
    assert (len(found["actor"]), len(found["rollout"]), len(found["ref"])) == (
        place.actor_world_size,
        place.num_engines,
        place.ref_world_size,
    )
    taken = [*found["actor"], *(home for home in found["rollout"] for _ in range(tensor_parallel)), *found["ref"]]
    assert max(taken.count(machine) for machine in range(nodes)) <= 8
    assert all(list(home) == sorted(home) for home in found.values())


def test_units_and_processes_are_counted() -> None:
    free = [8, 5]
    assert fill(3, 4, free) == (0, 0, 1)
    assert free == [0, 1]
    assert fill(1, 2, free) == (), "one GPU is left, and it takes two"
    processes = [2, 0, 1]
    assert spread(5, processes) == (0, 1, 1, 2, 2)
    assert processes == [3, 2, 3]
