"""Processes of each role for a number of GPUs, and the machine of each, worked out by hand."""

from __future__ import annotations

import pytest

import grpo_dist.plan.placement as placement_module
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.placement import Seat, Slot, fill, node_layout, placement, slots, slots_of, spread

NO_KL = "actor_rollout_ref.actor.use_kl_loss=false"
TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"


def place(*overrides):
    return placement(load_config(list(overrides))[0])


def split(*overrides):
    found = place("cluster=node8", *overrides)
    return found.actor_world_size, found.rollout_world_size, found.world_sizes["ref"]


def test_cpu():
    found = place()
    assert (found.device, found.actor_world_size, found.rollout_world_size, found.world_sizes["ref"]) == (
        "cpu",
        2,
        1,
        1,
    )
    assert ({found.num_gpus(role) for role in found.world_sizes}, found.num_cpus_per_worker) == ({0.0}, 0.1)
    assert not found.shares_gpu
    assert place(NO_KL).world_sizes["ref"] == 0


def test_an_engine_on_cpu_may_be_several_processes(monkeypatch):
    monkeypatch.setattr(placement_module, "physical_cores", lambda: 6)
    found = place(f"{TP}=2")
    assert (found.num_engines, found.rollout_world_size, found.num_gpus("rollout")) == (1, 2, 0.0)
    assert place(f"{TP}=2", "cluster.rollout_world_size=4").num_engines == 2
    assert place("model=smollm2_135m", f"{TP}=3").num_threads == {"actor": 6, "rollout": 2, "ref": 6}


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        (["cluster=cpu"], (2, 1, 1, 1)),
        (["cluster=cpu", "cluster.reward_model_world_size=2", NO_KL], (2, 1, 0, 2)),
        (["cluster=node8"], (4, 4, 4, 4)),
        (["cluster=node8", NO_KL], (4, 4, 0, 4)),
        (["cluster=single_gpu"], (1, 1, 1, 1)),
        # asked for, it has GPUs of its own, and so has the reference
        (["cluster=node8", "cluster.reward_model_world_size=2"], (4, 1, 1, 2)),
        (["cluster=node8", "cluster.reward_model_world_size=2", NO_KL], (4, 2, 0, 2)),
        (["cluster=node8", "cluster.colocate=separate"], (4, 2, 1, 1)),
        (["cluster=node8", "cluster.colocate=separate", f"{TP}=2"], (4, 2, 1, 1)),
    ],
)
def test_the_reward_model_lies_where_the_reference_does(overrides, sizes):
    small = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    found = place(*overrides, *small, "reward_model.enable=true", "reward_model.model.path=some/model")
    assert tuple(found.world_sizes.values()) == (*sizes, 0)
    alone = "cluster.reward_model_world_size=2" in overrides or "cluster.colocate=separate" in overrides
    assert found.num_gpus("reward_model") == (0.0 if "cluster=cpu" in overrides else 1.0 if alone else 0.2)


@pytest.mark.parametrize(
    ("overrides", "sizes", "share"),
    [
        ([], (2, 1, 1, 0, 2), 0.0),
        (["cluster.critic_world_size=1"], (2, 1, 1, 0, 1), 0.0),
        (["critic.enable=false"], (2, 1, 1, 0, 0), 0.0),
        (["cluster=node8"], (4, 4, 4, 0, 4), 0.2),
        (["cluster=single_gpu"], (1, 1, 1, 0, 1), 0.2),
        (["cluster=node8", "cluster.critic_world_size=2"], (4, 1, 1, 0, 2), 1.0),
        (["cluster=node8", "cluster.critic_world_size=2", "algorithm.use_kl_in_reward=false"], (4, 2, 0, 0, 2), 1.0),
    ],
)
def test_the_critic_lies_beside_the_actor(overrides, sizes, share):
    """On CPU it has as many ranks as the actor; asked for on GPUs, it has some of its own, and so has the reference."""
    found = place("recipe=ppo", *overrides)
    assert tuple(found.world_sizes.values()) == sizes
    assert found.num_gpus("critic") == (share if sizes[-1] else 0.0)


def test_five_roles_share_a_gpu():
    scorer = ("reward_model.enable=true", "reward_model.model.path=some/model")
    found = place("cluster=single_gpu", "recipe=ppo", *scorer)
    assert found.sharing == ("actor", "rollout", "ref", "reward_model", "critic")
    assert sum(found.num_gpus(role) for role in found.sharing) == 1


def test_devices_are_gpus_that_the_roles_hold_or_machines_without():
    assert place().num_devices == 1
    assert place("trainer.nnodes=2").num_devices == 2
    assert place("cluster=single_gpu").num_devices == 1
    assert place("cluster=node8").num_devices == 8
    smaller = ["cluster.actor_world_size=2", "cluster.rollout_world_size=2", "cluster.ref_world_size=1"]
    assert place("cluster=node8", *smaller).num_devices == 5
    assert place("cluster=node8", *smaller[:2]).num_devices == 4, "the reference lies beside the actor"
    assert place("cluster=node8", f"{TP}=8", "model=qwen3_8b").num_devices == 8, "all lie beside the actor"


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ([], (4, 4, 4)),
        ([f"{TP}=2"], (4, 4, 4)),
        ([f"{TP}=4"], (4, 4, 4)),
        ([NO_KL], (4, 4, 0)),
        ([NO_KL, f"{TP}=4"], (4, 4, 0)),
        (["trainer.n_gpus_per_node=2"], (1, 1, 1)),
        (["trainer.n_gpus_per_node=3"], (1, 2, 1)),
        (["trainer.n_gpus_per_node=4"], (2, 2, 2)),
        (["trainer.n_gpus_per_node=6"], (2, 4, 2)),
        (["trainer.n_gpus_per_node=2", NO_KL], (1, 1, 0)),
        (["trainer.nnodes=2"], (8, 8, 8)),
        (["trainer.nnodes=2", f"{TP}=8", "model=qwen3_8b"], (8, 8, 8)),
        (["cluster.actor_world_size=2"], (2, 6, 2)),
        (["cluster.actor_world_size=2", "cluster.rollout_world_size=4"], (2, 4, 2)),
    ],
)
def test_the_reference_lies_beside_the_actor(overrides, sizes):
    assert split(*overrides) == sizes
    found = place("cluster=node8", *overrides)
    assert found.colocate == ("actor_ref" if sizes[2] else "separate")
    assert (found.num_gpus("actor"), found.num_gpus("ref")) == ((0.2, 0.2) if sizes[2] else (1.0, 1.0))
    assert found.num_gpus("rollout") == found.tensor_parallel
    assert found.num_engines * found.tensor_parallel == found.rollout_world_size


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        (["cluster.ref_world_size=1"], (4, 3, 1)),
        (["cluster.ref_world_size=1", f"{TP}=2"], (4, 2, 1)),
        (["cluster.colocate=separate"], (4, 3, 1)),
        (["cluster.colocate=separate", f"{TP}=2"], (4, 2, 2)),
        (["cluster.colocate=separate", f"{TP}=4"], (2, 4, 2)),
        (["cluster.ref_world_size=1", "trainer.n_gpus_per_node=6"], (2, 3, 1)),
        (["cluster.ref_world_size=2"], (4, 2, 2)),
        (["cluster.ref_world_size=2", "cluster.rollout_world_size=4"], (2, 4, 2)),
        (["cluster.actor_world_size=1", "cluster.rollout_world_size=2", "cluster.ref_world_size=1"], (1, 2, 1)),
    ],
)
def test_a_reference_with_gpus_of_its_own(overrides, sizes):
    assert split(*overrides) == sizes
    found = place("cluster=node8", *overrides)
    assert (found.colocate, found.num_devices) == ("separate", sum(sizes))
    assert {found.num_gpus("actor"), found.num_gpus("ref")} == {1.0}
    assert found.num_cpus_per_worker == 1.0


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        (["cluster=single_gpu"], (1, 1, 1)),
        (["cluster=single_gpu", NO_KL], (1, 1, 0)),
        (["trainer.n_gpus_per_node=2", f"{TP}=2"], (2, 2, 2)),
        (["trainer.n_gpus_per_node=2", f"{TP}=2", "actor_rollout_ref.model.lora_rank=16"], (2, 2, 0)),
        ([f"{TP}=8", "model=qwen3_8b"], (8, 8, 8)),
        (["cluster.colocate=all", f"{TP}=2"], (8, 8, 8)),
        (["cluster.colocate=all", "cluster.rollout_world_size=4"], (8, 4, 8)),
        (["cluster.colocate=all", "cluster.actor_world_size=4"], (4, 4, 4)),
    ],
)
def test_all_roles_share_gpus(overrides, sizes):
    """On one GPU, where an engine needs every GPU, and where that is asked for."""
    assert split(*overrides) == sizes
    found = place("cluster=node8", *overrides)
    assert (found.colocate, found.shares_gpu, found.num_devices) == ("all", True, sizes[0])
    assert sum(found.num_gpus(role) for role, size in found.world_sizes.items() if size) <= 1


def test_set_values_win():
    found = place(
        "cluster.actor_world_size=4",
        "cluster.rollout_world_size=2",
        "cluster.ref_world_size=2",
        "cluster.num_cpus_per_worker=0.5",
        "cluster.num_threads_per_worker=3",
    )
    assert (found.actor_world_size, found.num_engines, found.world_sizes["ref"]) == (4, 2, 2)
    assert found.num_cpus_per_worker == 0.5
    assert found.num_threads == {"actor": 3, "rollout": 3, "ref": 3}


@pytest.mark.parametrize(
    ("cores", "overrides", "threads"),
    [
        (2, [], {"actor": 2, "rollout": 2, "ref": 2}),
        (16, ["cluster.actor_world_size=2"], {"actor": 8, "rollout": 16, "ref": 16}),
        (16, ["cluster.actor_world_size=4", "cluster.rollout_world_size=2"], {"actor": 4, "rollout": 8, "ref": 16}),
        (1, [], {"actor": 1, "rollout": 1, "ref": 1}),
        (4, ["trainer.nnodes=2", "cluster.actor_world_size=4"], {"actor": 2, "rollout": 4, "ref": 4}),
    ],
)
def test_the_processes_of_a_role_share_the_cores(cores, overrides, threads, monkeypatch):
    monkeypatch.setattr(placement_module, "physical_cores", lambda: cores)
    assert place("cluster=cpu", "model=smollm2_135m", *overrides).num_threads == threads
    assert set(place("cluster=cpu", *overrides).num_threads.values()) == {1}, "the built-in model is too small to share"


def test_a_larger_model_takes_threads_rather_than_ranks(monkeypatch):
    monkeypatch.setattr(placement_module, "physical_cores", lambda: 8)
    found = place("cluster=cpu", "model=smollm2_135m")
    assert (found.actor_world_size, found.num_threads["actor"]) == (1, 8)


def test_on_gpu_one_thread_each():
    assert set(place("cluster=node8").num_threads.values()) == {1}


# --- machines ------------------------------------------------------------------------------------------------------
FSDP_SIZE = "actor_rollout_ref.actor.fsdp_config.fsdp_size"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"


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
    found = gpus(2, 6, 8, 2, f"{TP}=4")
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
    sizes = ["cluster=node8", "cluster.rollout_world_size=4", f"{TP}=2"]
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
    found = found_slots("cluster=multi_node", "trainer.n_gpus_per_node=4", "cluster.colocate=all", f"{TP}=2")
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
        *(f"{TP}={tensor_parallel}", f"cluster.colocate={colocate}"),
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
