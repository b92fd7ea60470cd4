"""The placement table: processes of each role for a number of GPUs."""

import pytest

import grpo_dist.plan.placement as placement_module
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.placement import placement

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
