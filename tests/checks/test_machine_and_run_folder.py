"""The checks that the commands share: errors become one, a checkpoint must fit the config, and there is room for it."""

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from grpo_dist.assets.model_folder import ADAPTER_FOLDER, FILE, read_usage
from grpo_dist.checks import all_checks
from grpo_dist.checks.all_checks import (
    Checks,
    check_disk,
    check_machine,
    check_resume,
    gpu_memory_gib,
    is_finished,
    memory_gib,
    nothing_to_train,
)
from grpo_dist.config.command import AnyCommand
from grpo_dist.config.load import load_command
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.errors import CheckpointError, ConfigError, DataError
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT, load_config
from grpo_dist.plan.memory import RoleMemory
from grpo_dist.plan.placement import slots
from grpo_dist.runtime import cluster
from grpo_dist.sizes import GIB
from grpo_dist.trainer.checkpoint.config_changes import digest_code
from grpo_dist.trainer.checkpoint.folder import CONFIG, LATEST, STATE
from grpo_dist.trainer.checkpoint.manifest import MANIFEST, checkpoint_digest, write_manifest
from grpo_dist.trainer.record import EXPORTED
from tests.engines.train.plain import told
from tests.messages import refuses, says
from tests.tiers import first
from tests.trainer.checkpoints import finished_run, save, unverified
from tests.workers.services import control_service

COMMANDS = pytest.mark.parametrize("command", first([GRPO, REWARD_MODEL], GRPO), ids=lambda command: command.name)


def load(command: AnyCommand, tmp_path: Path, *overrides: str) -> JobConfig:
    return load_command([f"trainer.default_local_dir={tmp_path}/run", *overrides], command)[0]


# --- errors ------------------------------------------------------------------------------------------------------
def test_errors_are_told_at_once_in_their_order_and_a_bug_is_none() -> None:
    checks = Checks()
    checks.end()
    for error, text in ((DataError("a=1"), "a=1"), (CheckpointError("b=2"), "the run has 2 problems:\n  a=1\n  b=2")):
        with checks:
            raise error
        with pytest.raises(ConfigError) as caught:
            checks.end()
        assert (str(caught.value), caught.value.exit_code) == (text, 2)
    with pytest.raises(ZeroDivisionError), checks:
        raise ZeroDivisionError


# --- checkpoints ---------------------------------------------------------------------------------------------------
@COMMANDS
def test_a_checkpoint_of_another_config_is_refused_unless_it_begins_anew(command: AnyCommand, tmp_path: Path) -> None:
    for verify in (True, False):
        assert check_resume(load(command, tmp_path), {}, 9, verify=verify) == "", "there is none"
    folder = unverified(load(command, tmp_path))
    with refuses(CheckpointError, "trainer.seed: 1 -> 7", "trainer.resume_mode=disable"):
        check_resume(load(command, tmp_path, "trainer.seed=7"), {}, 9, verify=False)
    anew = load(command, tmp_path, "trainer.seed=7", "trainer.resume_mode=disable")
    assert check_resume(anew, {}, 9, verify=True) == ""
    says(check_resume(load(command, tmp_path), {}, 9, verify=False), str(folder.absolute()))
    with refuses(CheckpointError, f"{tmp_path}/run", "intact checkpoint"):
        check_resume(load(command, tmp_path), {}, 9, verify=True)
    named = save(tmp_path / "elsewhere", 3)
    keys = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={named}", "trainer.seed=7")
    for verify in (True, False):
        with refuses(CheckpointError, str(named), "trainer.seed: 1 -> 7"):
            check_resume(load(REWARD_MODEL, tmp_path, *keys), {}, 9, verify=verify)


@COMMANDS
@pytest.mark.parametrize("text", [None, "trainer: [", "3"])
def test_a_run_survives_a_damaged_config_of_a_checkpoint(command: AnyCommand, tmp_path: Path, text: str | None) -> None:
    """It goes on from the one before, which it finds when it looks at the files."""
    file = unverified(load(command, tmp_path, "trainer.seed=7")) / CONFIG  # this one would be refused
    file.unlink() if text is None else file.write_text(text)
    assert check_resume(load(command, tmp_path), {}, 9, verify=False) == ""


# --- runs that are finished ----------------------------------------------------------------------------------------
LAST = 3
OTHER_RATE = {GRPO.name: "actor_rollout_ref.actor.optim.lr=0.5", REWARD_MODEL.name: "optim.lr=0.5"}


def finished(command: AnyCommand, tmp_path: Path) -> JobConfig:
    config = load(command, tmp_path)
    finished_run(config, LAST)
    return config


@COMMANDS
def test_a_finished_run_says_where_its_model_is_and_how_to_train_longer(command: AnyCommand, tmp_path: Path) -> None:
    config, run_dir = finished(command, tmp_path), tmp_path / "run"
    assert is_finished(config, LAST)
    told = check_resume(config, {}, LAST, verify=False)
    says(told, "step 3 of 3", run_dir / "global_step_3", run_dir / EXPORTED)
    for length, key in (("3", "trainer.total_training_steps"), ("null", "trainer.total_epochs")):
        says(nothing_to_train(load(command, tmp_path, f"trainer.total_training_steps={length}"), 3), key)
    assert not is_finished(config, LAST + 1), "more steps are more to do"
    forced = load(command, tmp_path, OTHER_RATE[command.name], "trainer.resume_mode=force")
    says(check_resume(forced, {}, LAST + 1, verify=False), "global_step_3")
    says(check_resume(load(command, tmp_path, "trainer.resume_mode=force"), {}, LAST, verify=False), "step 3 of 3")
    path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}")
    for asked in (("trainer.resume_mode=disable",), path, *([("trainer.val_only=true",)] if command is GRPO else [])):
        assert not is_finished(load(command, tmp_path, *asked), LAST), "what is asked for beside training is done"


def test_an_edited_function_is_told_by_a_run_that_goes_on_and_by_a_finished_one(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**row):\n    return 0.1\n")
    config = load(GRPO, tmp_path, f"custom_reward_function.path={reward}")
    finished_run(config, LAST)
    state = tmp_path / "run" / f"global_step_{LAST}" / STATE
    state.write_text(json.dumps(json.loads(state.read_text()) | {"code": digest_code(config)}))
    reward.write_text("def compute_score(**row):\n    return 0.9\n")
    for steps in (LAST, LAST + 1):
        assert is_finished(config, steps) == (steps == LAST)
        says(check_resume(config, {}, steps, verify=False), f"global_step_{LAST}", str(reward), "edited")


def test_a_run_that_was_stopped_before_its_model_was_written_is_not_finished(tmp_path: Path) -> None:
    """Nor one whose model was wanted in another dtype, or says nothing of itself, as those of older versions."""
    config, run_dir = finished(GRPO, tmp_path), tmp_path / "run"
    assert not is_finished(load(GRPO, tmp_path, "trainer.export_dtype=bf16"), LAST)
    usage = run_dir / EXPORTED / FILE
    for text in ('{"step": 3}', "{", None):
        usage.unlink() if text is None else usage.write_text(text)
        assert not is_finished(config, LAST)
    shutil.rmtree(run_dir / EXPORTED)
    assert not is_finished(config, LAST)
    without = load(GRPO, tmp_path, "trainer.export_hf_model=false")
    assert is_finished(without, LAST)
    assert EXPORTED not in nothing_to_train(without, LAST)


@pytest.mark.deep
@COMMANDS
def test_a_run_that_has_reached_its_value_is_finished_until_it_is_raised(command: AnyCommand, tmp_path: Path) -> None:
    """Step 3 of 9, whose validation came to 0.92."""

    def ends_at(value: str, *overrides: str) -> JobConfig:
        return load(command, tmp_path, f"trainer.stop_at={value}", *overrides)

    finished_run(load(command, tmp_path), LAST, metrics={"val-core/x": 0.92})
    reached = ends_at("{metric: val-core/x, value: 0.9}")
    assert is_finished(reached, 9)
    told = check_resume(reached, {}, 9, verify=False)
    says(told, "step 3 of 9", "val-core/x", "0.92", "trainer.stop_at.value=0.9", tmp_path / "run" / "global_step_3")
    for other in ("{metric: val-core/x, value: 0.93}", "{metric: val-core/y, value: 0.9}", "null"):
        assert not is_finished(ends_at(other), 9)
        says(check_resume(ends_at(other), {}, 9, verify=False), tmp_path / "run" / "global_step_3")
    forced = ends_at("{metric: val-core/x, value: 0.9}", OTHER_RATE[command.name], "trainer.resume_mode=force")
    with refuses(ConfigError, "trainer.resume_mode=force", "step 3 of 9", "trainer.stop_at"):
        check_resume(forced, {}, 9, verify=False)


@COMMANDS
def test_the_model_must_be_of_the_checkpoint_whatever_the_clock_says(command: AnyCommand, tmp_path: Path) -> None:
    """One of another step, or of the same step of a run before, is not, also where its files are newer; a copy is."""
    config, run_dir = finished(command, tmp_path), tmp_path / "run"
    model, ahead = run_dir / EXPORTED, time.time() + 3600
    before = read_usage(model)
    for step in (2, 3):
        folder = unverified(config, step) if step == 2 else run_dir / "global_step_3"
        (folder / MANIFEST).unlink(missing_ok=True)
        write_manifest(folder, step, {})  # the same files, written at another time
        (run_dir / LATEST).write_text(str(step))
        os.utime(model / "config.json", (ahead, ahead))
        assert not is_finished(config, step)
        replace(before, checkpoint=checkpoint_digest(folder)).write(model)
        assert is_finished(config, step)
    copy = shutil.copytree(run_dir, tmp_path / "copy", copy_function=shutil.copy)
    assert is_finished(load(command, tmp_path, f"trainer.default_local_dir={copy}"), LAST)


@pytest.mark.parametrize("command", first([GRPO, SFT], GRPO), ids=lambda command: command.name)
def test_with_lora_the_adapter_belongs_to_it(command: AnyCommand, tmp_path: Path) -> None:
    section = command.lora_section
    config = load(command, tmp_path, f"{section}.lora_rank=4", f"{section}.lora_alpha=8")
    finished_run(config, LAST)
    run_dir = tmp_path / "run"
    assert not is_finished(config, LAST), "there is no adapter"
    (run_dir / ADAPTER_FOLDER).mkdir()
    assert not is_finished(config, LAST), "it may be of a run before"
    read_usage(run_dir / EXPORTED).write(run_dir / ADAPTER_FOLDER)
    assert is_finished(config, LAST)


@COMMANDS
def test_another_experiments_model_without_a_checkpoint_is_not_replaced(command: AnyCommand, tmp_path: Path) -> None:
    other, run_dir = OTHER_RATE[command.name], tmp_path / "run"
    finished(command, tmp_path)
    shutil.rmtree(run_dir / "global_step_3")
    (run_dir / LATEST).unlink()
    for verify in (True, False):
        with refuses(ConfigError, f"{run_dir}/huggingface", *other.split("="), "trainer.resume_mode=disable"):
            check_resume(load(command, tmp_path, other), {}, LAST, verify=verify)
        assert check_resume(load(command, tmp_path), {}, LAST, verify=verify) == "", "the same one begins anew"
        asked = load(command, tmp_path, other, "trainer.resume_mode=disable")
        assert check_resume(asked, {}, LAST, verify=verify) == ""
    (run_dir / CONFIG).unlink()
    assert check_resume(load(command, tmp_path, other), {}, LAST, verify=False) == "", "of whatever it was"


# --- the room on the disk ----------------------------------------------------------------------------------------
# 3 GiB in a checkpoint.
STEPS = 100


def test_a_run_needs_room_for_one_checkpoint_if_it_writes_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = f"trainer.default_local_dir={tmp_path}/run"
    saved = [RoleMemory("actor", {}, saved=2.0), RoleMemory("rollout", {}), RoleMemory("critic", {}, saved=1.0)]

    def check(free: float, *overrides: str, roles: list[RoleMemory] = saved) -> str:
        """On a disk with so many GiB free."""
        monkeypatch.setattr("grpo_dist.checks.all_checks.free_bytes", lambda folder: int(free * GIB))
        return check_disk(load(GRPO, tmp_path, "trainer.save_freq=10", *overrides), roles, STEPS)

    says(told(check, 2.9), "ConfigError", key, "3 GiB", "2.9 GiB", "trainer.default_local_dir")
    says(told(check, 2.9, "trainer.save_freq=-1", "trainer.save_interval_minutes=30"), "ConfigError", key, "3 GiB")
    says(check(3.5), "3.5 GiB", "3 GiB")
    # What a killed run has left is room.
    left = tmp_path / "run" / "global_step_10.tmp" / "actor"
    left.mkdir(parents=True)
    (left / "__0_0.distcp").write_bytes(bytes(1 << 20))
    says(check(3 - 0.5 / 1024), "3 GiB")
    says(told(check, 3 - 1.5 / 1024), "ConfigError", "3 GiB")
    assert check(0.0, "trainer.val_only=true") == ""
    assert check(0.0, "trainer.save_freq=-1") == ""
    assert check(0.0, roles=[]) == "", "a model of unknown sizes"
    finished_run(load(GRPO, tmp_path, "trainer.save_freq=10"), STEPS)
    assert check(0.0) == "", "the same command again only says that it is done"


GPU4 = ("cluster=node8", "trainer.n_gpus_per_node=4")


@pytest.fixture(autouse=True)
def no_cluster_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "running_cluster", lambda: None)


def checked(*overrides: str):
    config, _ = load_config(list(overrides))
    return check_machine(config, slots(config))


def gpus(monkeypatch: pytest.MonkeyPatch, *gib: float) -> None:
    monkeypatch.setattr(all_checks, "logical_cpus", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gib))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = [SimpleNamespace(total_memory=int(size * GIB)) for size in gib]
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)


def test_memory_of_the_machine_and_of_its_smallest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked().host_gib == memory_gib()
    assert checked().gpu_gib is None
    assert 0 < memory_gib() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    gpus(monkeypatch, 80, 40, 80, 80)
    assert gpu_memory_gib() == [80, 40, 80, 80]
    assert checked(*GPU4).gpu_gib == 40
    assert checked(*GPU4).host_gib == memory_gib()
    assert checked(*GPU4, "cluster.gpu_memory_gib=24").gpu_gib == 24


def test_a_driver_that_is_older_than_torch_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML counts the GPUs; only a context says that the driver is too old."""
    gpus(monkeypatch, 80, 80, 80, 80)
    told = "The NVIDIA driver on your system is too old (found version 12040).\nPlease update it"
    monkeypatch.setattr(torch.cuda, "get_device_properties", Mock(side_effect=RuntimeError(told)))
    with refuses(ConfigError, "13.0", "12040", "CUDA=12", "trainer.n_gpus_per_node=0") as caught:
        checked(*GPU4)
    assert len(str(caught.value).splitlines()) == 1


def test_fewer_gpus_than_the_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses(ConfigError, "trainer.n_gpus_per_node=4", "torch", "make setup DEVICE=gpu", "trainer.dry_run=config"):
        checked(*GPU4)
    gpus(monkeypatch, 80, 80, 80)
    with refuses(ConfigError, "trainer.nnodes=1", "trainer.n_gpus_per_node=4", "3 GPUs", "trainer.dry_run=config"):
        checked(*GPU4)


def test_fewer_cpus_than_ray_would_reserve() -> None:
    """Two actor ranks, an engine, a reference and the reward process with 10 each."""
    count = 4 + load_config([])[0].reward.num_workers
    ten = "cluster.num_cpus_per_worker=10"
    with refuses(ConfigError, ten, 10 * count, "ray_kwargs.ray_init.num_cpus=12"):
        checked(ten, "ray_kwargs.ray_init.num_cpus=12")
    checked(ten, f"ray_kwargs.ray_init.num_cpus={10 * count}", "cluster.max_rollout_world_size=9")


def test_an_address_for_agents_that_this_machine_does_not_have() -> None:
    """Without episodes nobody is asked for it, and nodes of a cluster have their own."""
    away = "actor_rollout_ref.rollout.agent.endpoint_host=203.0.113.7"
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=external"
    says(told(checked, loop, away), "ConfigError", away, "auto")
    checked(away)
    checked(loop, "actor_rollout_ref.rollout.agent.endpoint_host=127.0.0.2")
    with control_service() as address:
        checked(loop, away, f"ray_kwargs.ray_init.address={address}")


def test_a_cluster_that_does_not_answer_and_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that answers nothing more is known: neither its CPUs nor its GPUs are those of this machine."""
    with control_service() as address:
        there = (f"ray_kwargs.ray_init.address={address}", "cluster=node8")
        assert checked(*there).gpu_gib is None
        assert checked(*there, "cluster.gpu_memory_gib=80").gpu_gib == 80
    says(told(checked, *there), "ConfigError", f"ray_kwargs.ray_init.address={address}", "Ray cluster")
