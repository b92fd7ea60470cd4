"""A slip of the finger: no check counts to a number of the user, or makes a list of that length."""

from __future__ import annotations

import subprocess
import sys

import pytest

from grpo_dist.config.keys import leaf_keys
from grpo_dist.config.load import load_command
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import GRPO, SFT
from grpo_dist.sizes import divisor_up_to
from tests.messages import refuses

# In a process of its own, whose memory and time are limited: what goes wrong must not take the machine.
ALL_KEYS = """
import resource, signal, sys
from grpo_dist.config.keys import leaf_keys
from grpo_dist.config.load import load_command
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
for command in (GRPO, SFT, REWARD_MODEL):
    for key in leaf_keys(command.schema):
        for value in (10**10, 10**400):
            signal.alarm(20)
            try:
                load_command(["trainer.dry_run=config", "trainer.n_gpus_per_node=8", (key, value)], command)
            except ConfigError:
                pass
            except BaseException as error:
                sys.exit(f"{key}={value}: {type(error).__name__}: {error}")
"""


@pytest.mark.long
def test_all_keys() -> None:
    done = subprocess.run([sys.executable, "-c", ALL_KEYS], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]


def test_processes_and_machines_have_a_limit() -> None:
    limits = (GRPO, "trainer.nnodes", 4096), (GRPO, "trainer.n_gpus_per_node", 128), (SFT, "cluster.world_size", 524288)
    for command, key, most in limits:
        for value in (most + 1, 2**32):
            with refuses(ConfigError, f"{key}={value}", most):
                load_command(["trainer.dry_run=config", f"{key}={value}"], command)
    names = ("world_size", "num_workers", "nnodes", "n_gpus_per_node", "parallel_size")
    keys = [key for key in leaf_keys(GRPO.schema) if key.endswith(names)]
    assert len(keys) >= 11
    seeds = [(key, 2**63, key) for key in ("trainer.seed", "data.seed")]  # more than libraries can hold
    for key, value, part in [*((key, 10**10, "less") for key in keys), *seeds]:
        with refuses(ConfigError, key, part):
            load_command(["trainer.dry_run=config", f"{key}={value}"], GRPO)


def test_a_mini_batch_of_any_size_is_answered_at_once() -> None:
    size = "actor_rollout_ref.actor.ppo_mini_batch_size"
    for mini in (10**9, 10**10, 2**62):
        with refuses(ConfigError, "data.train_batch_size=48", "ppo_mini_batch_size=48"):
            load_command(["trainer.dry_run=config", "data.train_batch_size=48", f"{size}={mini}"], GRPO)
        load_command(["trainer.dry_run=config", f"data.train_batch_size={mini}"], GRPO)


def test_divisors() -> None:
    """One that is far is still found."""
    for number, most, divisor in ((48, 32, 24), (48, 48, 48), (97, 96, 1), (100, 7, 5), (1, 1, 1), (2**40 * 3, 3, 3)):
        assert divisor_up_to(number, most) == divisor
    assert (divisor_up_to(48, 10**18), divisor_up_to(10**18, 10**9)) == (48, 10**9)
    found = divisor_up_to(2 * (10**9 + 7), 10**9)
    assert found <= 10**9
    assert 2 * (10**9 + 7) % found == 0
