"""Processes of each role for a number of GPUs, and the machine of each, worked out by hand."""

import pytest

from grpo_dist.config.schema_roles import Colocation
from grpo_dist.errors import ConfigError
from grpo_dist.plan.placement import Placement, Seat, Slot, node_layout, placement, slots
from tests.plan.asked import load
from tests.tiers import covering

NO_KL = "actor.use_kl_loss=false"
SCORER = "reward_model.enable=true  reward_model.model.path=some/model"


def place(*runs: str) -> Placement:
    return placement(load(*runs))


def test_cpu() -> None:
    found = place()
    assert tuple(found.world_sizes.values()) == (2, 1, 1, 0, 0)
    assert ({found.num_gpus(role) for role in found.world_sizes}, found.num_cpus_per_worker) == ({0.0}, 0.1)
    assert (found.device, found.shares_gpu, found.num_devices) == ("cpu", False, 1)
    assert place("nodes=2").num_devices == 2, "machines, without GPUs"
    found = place("actors=4  engines=2  refs=2  cluster.num_cpus_per_worker=0.5  cluster.num_threads_per_worker=3")
    assert tuple(found.world_sizes.values()) == (4, 2, 2, 0, 0), "set values win"
    assert (found.num_engines, found.num_cpus_per_worker) == (2, 0.5)
    assert found.num_threads == {"actor": 3, "rollout": 3, "ref": 3}


def test_an_engine_on_cpu_may_be_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_dist.plan.placement.physical_cores", lambda: 6)
    found = place("TP=2")
    assert (found.num_engines, found.rollout_world_size, found.num_gpus("rollout")) == (1, 2, 0.0)
    assert place("TP=2  engines=4").num_engines == 2
    assert place("model=smollm2_135m  TP=3").num_threads == {"actor": 6, "rollout": 2, "ref": 6}


@pytest.mark.parametrize(
    ("run", "sizes", "colocate"),
    [
        # the reference lies beside the actor
        ("", (4, 4, 4), "actor_ref"),
        ("gpus=2", (1, 1, 1), "actor_ref"),
        ("gpus=3", (1, 2, 1), "actor_ref"),
        ("gpus=6", (2, 4, 2), "actor_ref"),
        ("nodes=2  TP=8  model=qwen3_8b", (8, 8, 8), "actor_ref"),
        ("actors=2", (2, 6, 2), "actor_ref"),
        # there is none, or it has GPUs of its own
        (NO_KL, (4, 4, 0), "separate"),
        ("refs=1", (4, 3, 1), "separate"),
        ("refs=1  TP=2", (4, 2, 1), "separate"),
        ("cluster.colocate=separate  TP=4", (2, 4, 2), "separate"),
        ("refs=2", (4, 2, 2), "separate"),
        ("actors=1  engines=2  refs=1", (1, 2, 1), "separate"),
        # all share: on one GPU, where an engine needs every GPU, and where that is asked for
        ("cluster=single_gpu", (1, 1, 1), "all"),
        (f"cluster=single_gpu  {NO_KL}", (1, 1, 0), "all"),
        ("gpus=2  TP=2  model.lora_rank=16", (2, 2, 0), "all"),
        ("TP=8  model=qwen3_8b", (8, 8, 8), "all"),
        ("cluster.colocate=all  TP=2", (8, 8, 8), "all"),
        ("cluster.colocate=all  engines=4", (8, 4, 8), "all"),
        ("cluster.colocate=all  actors=4", (4, 4, 4), "all"),
    ],
)
def test_gpus_of_actor_engines_and_reference(run: str, sizes: tuple[int, int, int], colocate: Colocation) -> None:
    found = place("cluster=node8", run)
    assert tuple(found.world_sizes.values())[:3] == sizes
    assert (found.colocate, found.shares_gpu) == (colocate, colocate == "all")
    held = {"separate": sum(sizes), "actor_ref": sizes[0] + sizes[1], "all": sizes[0]}
    assert found.num_devices == held[colocate]
    own = 1.0 if colocate == "separate" else 0.2
    assert {found.num_gpus("actor"), found.num_gpus("ref")} == {own, own if sizes[2] else 1.0}
    assert found.num_gpus("rollout") == (0.2 if colocate == "all" else found.tensor_parallel)
    assert found.num_engines * found.tensor_parallel == found.rollout_world_size
    assert (found.num_cpus_per_worker, set(found.num_threads.values())) == (1.0, {1})


@pytest.mark.parametrize(
    ("run", "sizes", "share"),
    [
        (f"cluster=cpu  cluster.reward_model_world_size=2  {NO_KL}  {SCORER}", (2, 1, 0, 2, 0), 0.0),
        (f"cluster=node8  {SCORER}", (4, 4, 4, 4, 0), 0.2),
        # asked for, it has GPUs of its own, and so has the reference
        (f"cluster=node8  cluster.reward_model_world_size=2  {SCORER}", (4, 1, 1, 2, 0), 1.0),
        (f"cluster=node8  cluster.reward_model_world_size=2  {NO_KL}  {SCORER}", (4, 2, 0, 2, 0), 1.0),
        (f"cluster=node8  cluster.colocate=separate  TP=2  {SCORER}", (4, 2, 1, 1, 0), 1.0),
        # a critic has as many ranks as the actor also on CPU
        ("recipe=ppo", (2, 1, 1, 0, 2), 0.0),
        ("recipe=ppo  critic.enable=false", (2, 1, 1, 0, 0), 0.0),
        ("recipe=ppo  cluster=node8", (4, 4, 4, 0, 4), 0.2),
        ("recipe=ppo  cluster=node8  cluster.critic_world_size=2", (4, 1, 1, 0, 2), 1.0),
    ],
)
def test_reward_model_and_critic_lie_where_the_reference_does(run: str, sizes: tuple[int, ...], share: float) -> None:
    found = place(run, "data.train_batch_size=8  actor.ppo_mini_batch_size=8")
    assert tuple(found.world_sizes.values()) == sizes
    assert sizes[4] == 0 or found.num_gpus("critic") == share
    assert sizes[3] == 0 or found.num_gpus("reward_model") == share


def test_five_roles_share_a_gpu() -> None:
    found = place("cluster=single_gpu  recipe=ppo", SCORER)
    assert found.sharing == ("actor", "rollout", "ref", "reward_model", "critic")
    assert sum(found.num_gpus(role) for role in found.sharing) == 1


@pytest.mark.parametrize(
    ("cores", "run", "threads"),
    [
        (8, "", {"actor": 8, "rollout": 8, "ref": 8}),
        (16, "actors=4  engines=2", {"actor": 4, "rollout": 8, "ref": 16}),
        (4, "nodes=2  actors=4", {"actor": 2, "rollout": 4, "ref": 4}),
    ],
)
def test_the_processes_of_a_role_share_the_cores(cores, run, threads, monkeypatch) -> None:
    """A larger model takes threads rather than ranks; the built-in model is too small to share."""
    monkeypatch.setattr("grpo_dist.plan.placement.physical_cores", lambda: cores)
    assert place("cluster=cpu  model=smollm2_135m", run).num_threads == threads
    assert place("cluster=cpu  model=smollm2_135m").actor_world_size == 1
    assert set(place("cluster=cpu", run).num_threads.values()) == {1}


# --- machines ------------------------------------------------------------------------------------------------------
BATCH = "data.train_batch_size=96  actor.ppo_mini_batch_size=96"


def layout(*runs: str) -> dict[str, list[int]]:
    return {role: list(home) for role, home in node_layout(load(*runs)).items()}


def on_slots(*runs: str) -> list[Slot]:
    return slots(load(*runs))


@pytest.mark.parametrize(
    ("nodes", "sizes", "more", "actor", "rollout", "ref"),
    [
        # ranks fill one machine after the other, and a role may begin where another one ends
        (2, (8, 7, 1), "", [0] * 8, [1] * 7, [1]),
        (3, (16, 4, 4), "", [0] * 8 + [1] * 8, [2] * 4, [2] * 4),
        (2, (4, 8, 4), "", [0] * 4, [0] * 4 + [1] * 4, [1] * 4),
        # two GPUs are left on machine 0: too few for an engine, and the reference takes them
        (2, (6, 8, 2), "TP=4", [0] * 6, [1, 1], [0, 0]),
        # copies of 3 on machines of 8: two on each, and what is left goes to others; one may take whole machines
        (2, (12, 2, 2), "fsdp_size=3", [0] * 6 + [1] * 6, [0, 0], [1, 1]),
        (5, (32, 4, 4), "fsdp_size=16", [0] * 8 + [1] * 8 + [2] * 8 + [3] * 8, [4] * 4, [4] * 4),
    ],
)
def test_neither_engines_nor_copies_of_the_weights_are_cut(nodes, sizes, more, actor, rollout, ref) -> None:
    asked = "actors={}  engines={}  refs={}".format(*sizes)
    found = layout(f"cluster=multi_node  nodes={nodes}  model=qwen3_8b", BATCH, asked, more)
    assert (found["actor"], found["rollout"], found["ref"]) == (actor, rollout, ref)


def test_on_cpu_every_role_is_spread_and_reward_processes_everywhere() -> None:
    """Two actor ranks on one machine each, then the emptiest in turn."""
    found = layout("nodes=2  reward.num_workers=3")
    assert found == {"actor": [0, 1], "rollout": [0], "ref": [1], "reward": [0, 0, 1]}
    found = layout("cluster=multi_node  actors=8  engines=4  refs=1  reward.num_workers=3")
    assert found["reward"] == [0, 1, 1], "the emptier machine takes the rest: it has 5 ranks, and the other one 8"


def test_engines_that_come_later_have_no_machine() -> None:
    """8 GPUs, engines on 2: two to start with, and up to four."""
    sizes = "cluster=node8  engines=4  TP=2"
    *found, first, second = on_slots(sizes, "cluster.max_rollout_world_size=8")
    assert found == on_slots(sizes)
    for rank, slot in ((2, first), (3, second)):
        assert (slot.seats, slot.num_gpus, slot.required) == ((Seat("rollout", rank, 2.0, 2.0),), 2.0, False)


def test_roles_that_share_a_gpu_have_one_slot() -> None:
    """On one GPU all do; on two the reference lies beside the actor."""
    seats = tuple(Seat(role, 0, 1.0, 0.2) for role in ("actor", "rollout", "ref"))
    assert on_slots("cluster=single_gpu") == [Slot(0, 1.0, seats), Slot(0, 0.0, (Seat("reward", 0, 1.0, 0.0),))]
    first, engine, _ = on_slots("cluster=node8  gpus=2")
    assert (first, first.num_cpus) == (Slot(0, 1.0, (seats[0], seats[2])), 2.0)
    assert engine == Slot(0, 1.0, (Seat("rollout", 0, 1.0, 1.0),))


def test_an_engine_that_shares_sits_on_the_first_of_its_gpus() -> None:
    """Two machines of 4 GPUs, engines on 2: engine i shares those of actor ranks 2 i and 2 i + 1."""
    found = on_slots("cluster=multi_node  gpus=4  cluster.colocate=all  TP=2")
    found = [slot for slot in found if slot.num_gpus]
    assert [(slot.machine, slot.num_gpus) for slot in found] == [(0, 1.0)] * 4 + [(1, 1.0)] * 4
    roles = [" ".join(f"{seat.role} {seat.rank}" for seat in slot.seats) for slot in found]
    assert roles[:3] == ["actor 0 rollout 0 ref 0", "actor 1 ref 1", "actor 2 rollout 1 ref 2"]
    assert {seat.num_cpus for slot in found for seat in slot.seats if seat.role == "rollout"} == {2.0}


MACHINES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (3, 8), (8, 8)]


@pytest.mark.parametrize(
    ("gpus", "tensor_parallel", "colocate"), covering(MACHINES, [1, 2, 4, 8], ["separate", "actor_ref", "all", "null"])
)
def test_what_the_placement_chooses_has_a_place(gpus: tuple[int, int], tensor_parallel: int, colocate: str) -> None:
    nodes, per_node = gpus
    machines = f"cluster=multi_node  nodes={nodes}  gpus={per_node}"
    try:
        config = load(machines, f"model=qwen3_8b  TP={tensor_parallel}  cluster.colocate={colocate}", BATCH)
    except ConfigError:  # too few GPUs for that
        others = {"separate": 2, "actor_ref": 1}.get(colocate, 0)
        assert tensor_parallel > per_node or nodes * per_node < tensor_parallel + others
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
