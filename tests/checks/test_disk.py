"""What a run will write first against the room on its disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist.checks.disk import check_disk
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.memory import RoleMemory, memory_estimate
from grpo_dist.plan.model_shape import model_config_at_hand
from grpo_dist.sizes import GIB
from tests.messages import refuses, says
from tests.trainer.checkpoints import finished_run

# 3 GiB in a checkpoint.
ROLES = [RoleMemory("actor", {}, saved=2.0), RoleMemory("rollout", {}), RoleMemory("critic", {}, saved=1.0)]
STEPS = 100


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the check on a disk with so many GiB free; gives what it says."""

    def run(free: float, *overrides: str, roles: list[RoleMemory] = ROLES) -> str:
        monkeypatch.setattr("grpo_dist.checks.disk.free_bytes", lambda folder: int(free * GIB))
        config, _ = load_config([f"trainer.default_local_dir={tmp_path}/run", "trainer.save_freq=10", *overrides])
        return check_disk(config, roles, STEPS)

    return run


def test_a_run_that_cannot_write_one_checkpoint_is_refused(check, tmp_path: Path) -> None:
    key = f"trainer.default_local_dir={tmp_path}/run"
    with refuses(ConfigError, key, "3 GiB", "2.9 GiB", "trainer.default_local_dir"):
        check(2.9)
    with refuses(ConfigError, key, "3 GiB"):
        check(2.9, "trainer.save_freq=-1", "trainer.save_interval_minutes=30")
    says(check(3.5), "3.5 GiB", "3 GiB")


def test_what_a_killed_run_has_left_is_room(check, tmp_path: Path) -> None:
    left = tmp_path / "run" / "global_step_10.tmp" / "actor"
    left.mkdir(parents=True)
    (left / "__0_0.distcp").write_bytes(bytes(1 << 20))
    says(check(3 - 0.5 / 1024), "3 GiB")
    with refuses(ConfigError, "3 GiB"):
        check(3 - 1.5 / 1024)


def test_a_run_that_writes_nothing_is_asked_for_nothing(check, tmp_path: Path) -> None:
    assert check(0.0, "trainer.val_only=true") == ""
    assert check(0.0, "trainer.save_freq=-1") == ""
    assert check(0.0, roles=[]) == "", "a model of unknown sizes"
    config, _ = load_config([f"trainer.default_local_dir={tmp_path}/run", "trainer.save_freq=10"])
    finished_run(config, STEPS)
    assert check(0.0) == "", "the same command again only says that it is done"


def test_the_estimate_has_what_every_role_that_trains_saves() -> None:
    """Of the built-in model: 12 bytes a parameter."""
    count, model = 476_224, model_config_at_hand("builtin:tiny-qwen3")

    def saved(*overrides: str) -> dict[str, float]:
        roles = memory_estimate(load_config(list(overrides))[0], model, count) or []
        return {role.role: role.saved * GIB / (4 * count) for role in roles if role.saved}

    assert saved() == saved("cluster.actor_world_size=4") == pytest.approx({"actor": 3})
    assert saved("algorithm.adv_estimator=gae")["critic"] == pytest.approx(3, rel=0.1)
