"""In which order roles start, and who makes room for whom, with groups that write down what they are asked."""

import asyncio
from typing import Any

import pytest

from grpo_dist.config.schema import RunConfig
from grpo_dist.engines.base import Footprint
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.plan import make_plan
from grpo_dist.plan.roles import roles_of
from grpo_dist.plugins.registry import load_attribute
from grpo_dist.run.build import on_gpus_of, start_roles
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.process import Address
from grpo_dist.workers.roles import Roles
from tests.runtime.fakes import Fakes

TAKEN = Footprint(27.5, 20.25)


class Noted(Fakes):
    """Processes that are none. All groups share one list of what happened: of a role, a method, and arguments."""

    def __init__(self, role: str, log: list[tuple]) -> None:
        super().__init__(role, 1, open_store={0: 77}, start={0: TAKEN if role == "rollout" else None})
        self.log = log

    def submit(self, rank: int, stage: str, method: str, *args: Any, **more: Any) -> Call:
        self.log.append((self.role, method, *args))
        return super().submit(rank, stage, method, *args, **more)

    async def value(self, call: Call) -> Any:
        if str(call.ref) == "start":
            for _ in range(100):  # all that can go on does
                await asyncio.sleep(0)
            self.log.append((self.role, "is there"))
        return await super().value(call)


def started(config: RunConfig) -> tuple[Roles, list[tuple]]:
    """The roles of a config with such processes, which have started, and what happened."""
    log: list[tuple] = []
    roles = {row.name: load_attribute(row.group, key="a row")(Noted(row.name, log)) for row in roles_of(config)}
    start_roles(make_plan(config, 1), Roles(roles))
    return Roles(roles), log


@pytest.mark.parametrize(
    ("overrides", "first"),
    [
        # vLLM charges what other processes load while it measures to itself
        (["cluster=single_gpu"], [("rollout", "start"), ("rollout", "is there")]),
        ([], [("rollout", "start")]),
    ],
    ids=["one gpu", "cpu"],
)
def test_engines_that_share_gpus_start_before_the_others(overrides: list[str], first: list[tuple]) -> None:
    scorer = ("reward_model.enable=true", "reward_model.model.path=builtin:tiny-qwen3")
    roles, log = started(load_config([*overrides, *scorer, "recipe=ppo"])[0])
    starts = [(role, what) for role, what, *_ in log if what in ("start", "is there")]
    assert starts[: len(first)] == first
    together = [(role, "start") for role in ("actor", "critic", "ref", "reward", "reward_model")]
    assert sorted(starts[len(first) : len(first) + 5]) == together, "these start together"
    (replaced,) = roles.rollout.settings
    assert replaced is not None
    assert (replaced.footprint_gib, replaced.rollout.kv_cache_memory_gib) == (27.5, 20.25), "what the one before took"


@pytest.mark.parametrize(("kl", "asked"), [("full", ["export_output_layer", "load_reference_head"]), ("k2", [])])
def test_a_teacher_is_found_by_its_own_key_and_brings_its_output_layer(kl: str, asked: list[str]) -> None:
    teacher = "actor_rollout_ref.ref.model.path"
    taught = ("recipe=distill", f"{teacher}=builtin:tiny-qwen3", f"actor_rollout_ref.actor.kl_loss_type={kl}")
    _, log = started(load_config([*taught, "trainer.nnodes=2"])[0])
    keys = {role: args[1] for role, method, *args in log if method == "find_model"}
    assert keys.pop("ref") == teacher
    assert set(keys.values()) == {"actor_rollout_ref.model.path"}
    methods = [method for _, method, *_ in log if method != "is there"]
    assert methods[len(methods) - methods[::-1].index("start") :] == asked, "once all have started"


def test_engines_that_share_gpus_are_told_those_of_as_many_actor_ranks() -> None:
    """Two engines of two processes on four GPUs, two on each machine."""
    sizes = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    config, _ = load_config(["cluster=multi_node", "trainer.nnodes=2", "cluster.colocate=all", *sizes])
    engines = [make_plan(config).engine(index) for index in range(2)]
    actor = [Address("host", f"10.0.0.{node}", 1, "node", (gpu,)) for node in (1, 2) for gpu in ("1", "GPU-ab")]
    assert [each.gpus for each in on_gpus_of(engines, actor)] == [("1", "GPU-ab"), ("1", "GPU-ab")]
