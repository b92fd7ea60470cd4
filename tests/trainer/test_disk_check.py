"""What a run will write against the room on its disk: what cannot fit first is refused, what cannot later is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist.config.load import load_config
from grpo_dist.config.memory import RoleMemory, memory_estimate
from grpo_dist.config.model_shape import model_config_at_hand
from grpo_dist.errors import ConfigError
from grpo_dist.sizes import GIB
from grpo_dist.trainer.checks import Ready
from grpo_dist.trainer.disk_check import check_disk
from tests.messages import refuses, says
from tests.trainer.checkpoints import finished_run, save

# 3 GiB in a checkpoint, 1 GiB of a model at the end.
ROLES = [
    RoleMemory("actor", {}, saved=2.0, exported=1.0),
    RoleMemory("rollout", {}),
    RoleMemory("critic", {}, saved=1.0),
]
STEPS = 100


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the check on a disk with so many GiB free; gives the note, "" if there is none."""

    def run(free: float, *overrides: str, roles: list[RoleMemory] | None = ROLES) -> str:
        monkeypatch.setattr("grpo_dist.trainer.disk_check.free_bytes", lambda folder: int(free * GIB))
        config, _ = load_config([f"trainer.default_local_dir={tmp_path}/run", "trainer.save_freq=10", *overrides])
        ready = Ready([], STEPS)
        check_disk(config, roles, ready, lambda line: None)
        return "".join(ready.notes)

    return run


def test_a_run_that_cannot_write_one_checkpoint_is_refused(check, tmp_path: Path) -> None:
    key = f"trainer.default_local_dir={tmp_path}/run"
    with refuses(ConfigError, key, "3 GiB", "2.9 GiB", "trainer.default_local_dir"):
        check(2.9)
    with refuses(ConfigError, key, "3 GiB"):
        check(2.9, "trainer.save_freq=-1", "trainer.save_interval_minutes=30")
    says(check(3.0), key, "3 GiB")


# (settings, GiB that the run needs): two checkpoints are kept while a third is written; at the end two, and the model.
NEEDS = [
    ([], 9),
    (["trainer.max_actor_ckpt_to_keep=1"], 6),
    (["trainer.max_actor_ckpt_to_keep=1", "trainer.keep_best_metric=val-core/x"], 9),
    (["trainer.max_actor_ckpt_to_keep=null"], 31),  # ten of them, and the model
    (["trainer.max_actor_ckpt_to_keep=null", "trainer.export_hf_model=false"], 30),
    (["trainer.save_freq=50"], 7),  # two in all: none is removed, and then comes the model
    (["trainer.save_freq=100"], 4),
    (["trainer.save_freq=60", "trainer.max_actor_ckpt_to_keep=1"], 6),  # after steps 60 and 100
    (["trainer.save_freq=-1", "trainer.save_interval_minutes=5"], 9),
]


@pytest.mark.parametrize(("overrides", "needed"), NEEDS)
def test_what_will_not_fit_later_is_told(check, overrides: list[str], needed: int) -> None:
    assert check(needed, *overrides) == ""
    told = check(needed - 0.1, *overrides)
    says(told, f"{needed - 0.1:.3g} GiB", f"{needed} GiB", "3 GiB", "trainer.max_actor_ckpt_to_keep")


def test_without_checkpoints_the_model_must_fit(check) -> None:
    assert check(1.0, "trainer.save_freq=-1") == ""
    with refuses(ConfigError, "1 GiB", "0.9 GiB", "trainer.export_hf_model=false"):
        check(0.9, "trainer.save_freq=-1")
    assert check(0.0, "trainer.save_freq=-1", "trainer.export_hf_model=false") == ""


def test_a_run_that_goes_on_needs_room_for_what_is_not_there_yet(check, tmp_path: Path) -> None:
    """Two checkpoints are there, so a third is all that comes before one of them goes."""
    for step in (10, 20):
        save(tmp_path / "run", step)
    assert check(3.0) == ""
    with refuses(ConfigError, "2.9 GiB"):
        check(2.9)
    assert check(25.0, "trainer.max_actor_ckpt_to_keep=null") == "", "eight more, and the model"
    says(check(24.9, "trainer.max_actor_ckpt_to_keep=null"), "25 GiB")


def test_what_a_killed_run_has_left_is_room(check, tmp_path: Path) -> None:
    left = tmp_path / "run" / "global_step_10.tmp" / "actor"
    left.mkdir(parents=True)
    (left / "__0_0.distcp").write_bytes(bytes(1 << 20))
    assert "GiB" in check(3 - 0.5 / 1024)
    with refuses(ConfigError, "3 GiB"):
        check(3 - 1.5 / 1024)


def test_a_run_that_writes_nothing_is_asked_for_nothing(check, tmp_path: Path) -> None:
    assert check(0.0, "trainer.val_only=true") == ""
    assert check(0.0, roles=None) == "", "a model of unknown sizes"
    config, _ = load_config([f"trainer.default_local_dir={tmp_path}/run", "trainer.save_freq=10"])
    finished_run(config, STEPS)
    assert check(0.0) == "", "the same command again only says that it is done"


def test_the_estimate_has_what_every_role_saves() -> None:
    """Of the built-in model: 12 bytes a parameter for what trains, 4 for a reference that moves."""
    count = 476_224
    model = model_config_at_hand("builtin:tiny-qwen3")

    def saved(*overrides: str) -> dict[str, float]:
        found = memory_estimate(load_config(list(overrides))[0], model, count)
        assert found is not None
        return {role.role: role.saved * GIB / (4 * count) for role in found if role.saved}

    assert saved() == pytest.approx({"actor": 3})
    assert saved("cluster.actor_world_size=4") == pytest.approx({"actor": 3})
    assert saved("actor_rollout_ref.ref.ref_model_sync_steps=5") == pytest.approx({"actor": 3, "ref": 1})
    critic = saved("algorithm.adv_estimator=gae")["critic"]
    assert critic == pytest.approx(3, rel=0.1)
