"""What follows from the keys of a command that trains one model: ranks, threads, types and slots."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_dist.config.load import load_command
from grpo_dist.config.schema_job import SupervisedConfig
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import REWARD_MODEL, SFT
from grpo_dist.plan.placement import CPU_SHARE, placement, slots
from tests.messages import says

OWN = "model.path=Qwen/Qwen3-0.6B"
NODES = (OWN, "trainer.n_gpus_per_node=8", "trainer.nnodes=2")
COMMANDS = pytest.mark.parametrize("command", [REWARD_MODEL, SFT], ids=["reward_model", "sft"])


def load(*overrides: str, command: Any = REWARD_MODEL) -> SupervisedConfig:
    return load_command([*overrides], command)[0]


@COMMANDS
@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [((), 2), ((OWN,), 1), (("cluster.world_size=3",), 3), (NODES, 16), ((*NODES, "cluster.world_size=4"), 4)],
)
def test_the_number_of_ranks(command: Any, overrides: tuple[str, ...], ranks: int) -> None:
    config = load(*overrides, command=command)
    assert config.world_size == ranks
    seats = [seat for slot in slots(config) for seat in slot.seats]
    assert [seat.role for seat in seats] == [config.role] * ranks


def test_ranks_fill_one_machine_after_the_other_and_are_spread_where_there_are_no_gpus() -> None:
    on_gpus = slots(load(*NODES, "cluster.world_size=10"))
    assert [slot.machine for slot in on_gpus] == [0] * 8 + [1] * 2
    assert {(slot.num_cpus, slot.num_gpus) for slot in on_gpus} == {(1.0, 1.0)}
    on_cpu = slots(load("trainer.nnodes=2", "cluster.world_size=4"))
    assert sorted(slot.machine for slot in on_cpu) == [0, 0, 1, 1]
    assert {(slot.num_cpus, slot.num_gpus) for slot in on_cpu} == {(CPU_SHARE, 0.0)}
    assert {slot.num_cpus for slot in slots(load("cluster.num_cpus_per_worker=0.5"))} == {0.5}


def test_threads_share_the_cores_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_dist.plan.placement.physical_cores", lambda: 8)

    for overrides, threads in (
        ((), 1),  # the built-in model is too small for more
        ((OWN,), 8),
        ((OWN, "cluster.world_size=2"), 4),
        ((OWN, "cluster.world_size=2", "trainer.nnodes=2"), 8),
        ((OWN, "cluster.world_size=3", "cluster.num_threads_per_worker=5"), 5),
        (NODES, 1),
    ):
        assert placement(load(*overrides)).num_threads["reward_model"] == threads


def test_types_and_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [load(*each).default_dtype for each in ((), (OWN,), NODES)] == ["fp32", "fp32", "bf16"]
    monkeypatch.setattr("grpo_dist.config.schema_job.has_bf16", lambda: True)
    assert [load(*each).default_dtype for each in ((), (OWN,))] == ["fp32", "bf16"]
    assert load("engine.model_dtype=bf16").export_dtype == "bf16"
    assert load("engine.model_dtype=bf16", "trainer.export_dtype=fp32").export_dtype == "fp32"
    assert (load("trainer.seed=3").data_seed, load("trainer.seed=3", "data.seed=0").data_seed) == (3, 0)


# What is refused, and what may be.
WRONG = {
    "data.train_batch_size=0": "1",
    "data.max_length=many": "number",
    "data.micro_batch_size_per_gpu=0": "1",
    "optim.lr=-1": "0",
    "optim.clip_grad=0": "0",
    "engine.dtype=int8": "fp32, bf16",
    "optim.lr_scheduler_type=cosin": "cosine",
    "trainer.nccl_timeout=0": "1",
    "cluster.world_size=0": "1",
    "trainer.logger=[console,tensorbord]": "'tensorboard'?",
    "trainer.dry_run=maybe": "config",
}
# Names, and a key of the same command.
NAMES = {
    "trainer.max_steps=1": "trainer.total_training_steps",
    "data.train_bach_size=1": "data.train_batch_size",
}


@COMMANDS
def test_what_is_wrong_is_said_with_key_and_value(command: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*WRONG, *NAMES, command=command)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == len(WRONG | NAMES)
    for override, part in (WRONG | NAMES).items():
        key = override.partition("=")[0]
        told = f"{key}:" if override in NAMES else key if "logger" in key else override
        (line,) = (line for line in lines if told in line)
        says(line.replace(override, ""), part)
    assert "actor_rollout_ref" not in str(caught.value)
