"""The machine of each process, worked out by hand."""

from __future__ import annotations

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.node_layout import Seat, Slot, fill, node_layout, slots, slots_of, spread
from grpo_dist.plan.placement import placement

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


def found_slots(*overrides: str) -> list[Slot]:
    return slots(load_config([*overrides])[0])


def test_engines_that_come_later_have_no_machine() -> None:
    """8 GPUs, engines on 2: two to start with, and up to four."""
    sizes = ["cluster=node8", "cluster.rollout_world_size=4", f"{TENSOR_PARALLEL}=2"]
    before, found = found_slots(*sizes), found_slots(*sizes, "cluster.max_rollout_world_size=8")
    assert found[: len(before)] == before
    assert [(slot.seats, slot.num_gpus, slot.required) for slot in found[len(before) :]] == [
        ((Seat("rollout", rank, 2.0, 2.0),), 2.0, False) for rank in (2, 3)
    ]


def test_on_one_gpu_all_share_it() -> None:
    seats = tuple(Seat(role, 0, 1.0, 0.2) for role in ("actor", "rollout", "ref"))
    assert found_slots("cluster=single_gpu") == [Slot(0, 1.0, seats), Slot(0, 0.0, (Seat("reward", 0, 1.0, 0.0),))]


def test_on_two_gpus_the_reference_lies_beside_the_actor() -> None:
    """With a KL term: one GPU for both, one for the engine."""
    first, engine, _ = found_slots("cluster=node8", "trainer.n_gpus_per_node=2")
    assert first == Slot(0, 1.0, (Seat("actor", 0, 1.0, 0.2), Seat("ref", 0, 1.0, 0.2)))
    assert engine == Slot(0, 1.0, (Seat("rollout", 0, 1.0, 1.0),))
    assert first.num_cpus == 2.0


def test_an_engine_that_shares_sits_on_the_first_of_its_gpus() -> None:
    """Two machines of 4 GPUs, engines on 2: engine i shares those of actor ranks 2 i and 2 i + 1."""
    found = found_slots(
        "cluster=multi_node", "trainer.n_gpus_per_node=4", "cluster.colocate=all", f"{TENSOR_PARALLEL}=2"
    )
    found = [slot for slot in found if slot.num_gpus]
    assert [slot.machine for slot in found] == [0] * 4 + [1] * 4
    assert [slot.num_gpus for slot in found] == [1.0] * 8
    roles = [[(seat.role, seat.rank) for seat in slot.seats] for slot in found]
    assert roles[:3] == [
        [("actor", 0), ("rollout", 0), ("ref", 0)],
        [("actor", 1), ("ref", 1)],
        [("actor", 2), ("rollout", 1), ("ref", 2)],
    ]
    assert {seat.num_cpus for slot in found for seat in slot.seats if seat.role == "rollout"} == {2.0}


def test_alone_each_process_has_a_slot() -> None:
    found = slots_of({"actor": [0, 1], "ref": [1]}, {"actor": (0.5, 1.0), "ref": (2.0, 0.0)})
    assert [(slot.machine, slot.num_gpus, slot.num_cpus) for slot in found] == [
        (0, 1.0, 0.5),
        (1, 1.0, 0.5),
        (1, 0.0, 2.0),
    ]
    assert [slot.seats[0].rank for slot in found] == [0, 1, 0]


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (3, 8), (8, 8)])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4, 8])
@pytest.mark.parametrize("colocate", ["separate", "actor_ref", "all", "null"])
def test_what_the_placement_chooses_has_a_place(nodes: int, per_node: int, tensor_parallel: int, colocate: str) -> None:
    overrides = [
        *("cluster=multi_node", "model=qwen3_8b", f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={per_node}"),
        *(f"{TENSOR_PARALLEL}={tensor_parallel}", f"cluster.colocate={colocate}"),
        *("data.train_batch_size=96", f"{MINI}=96"),
    ]
    try:
        config, _ = load_config(overrides)
    except ConfigError:  # too few GPUs for that
        least = (
            tensor_parallel if colocate in ("null", "all") else tensor_parallel + (2 if colocate == "separate" else 1)
        )
        assert tensor_parallel > per_node or nodes * per_node < least
        return
    place, found = placement(config), slots(config)
    counts = {"actor": place.actor_world_size, "rollout": place.num_engines, "ref": place.world_sizes["ref"]}
    for role, count in counts.items():
        ranks = [seat.rank for slot in found for seat in slot.seats if seat.role == role]
        assert ranks == list(range(count)), role
    taken = [sum(slot.num_gpus for slot in found if slot.machine == machine) for machine in range(nodes)]
    assert sum(taken) == place.num_devices
    assert max(taken) <= per_node
    assert all(list(home) == sorted(home) for home in node_layout(config).values())


def test_units_and_processes_are_counted() -> None:
    free = [8, 5]
    assert fill(3, 4, free) == (0, 0, 1)
    assert free == [0, 1]
    assert fill(1, 2, free) == (), "one GPU is left, and it takes two"
    processes = [2, 0, 1]
    assert spread(5, processes) == (0, 1, 1, 2, 2)
    assert processes == [3, 2, 3]
