"""A role of one's own is a worker class, a section of the config and a row: `echo`, a frozen model whose log-probs of
the responses are a column of every batch.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_dist.assets import POLICY_KEY
from grpo_dist.checks.models import checked_models
from grpo_dist.config.command import CONFIG_DIR
from grpo_dist.config.field_types import Processes, Section
from grpo_dist.config.load import load_command
from grpo_dist.config.schema import RunConfig
from grpo_dist.plan.commands import GRPO
from grpo_dist.plan.plan import make_plan
from grpo_dist.plan.roles import ROLES, Model, Role, reference_passes, reference_ranks
from grpo_dist.plan.text import format_plan, format_summary
from grpo_dist.protocol import DataProto
from grpo_dist.run.build import spawn_roles, start_roles
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.trainer.run_prompts import load_run_prompts
from grpo_dist.workers.policy import PolicyWorker, on_device
from tests.messages import says
from tests.models import policy_folder
from tests.trainer.recorded import history, recorded_trainer

SMALL = (
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "data.val_files=null",
    "trainer.val_before_train=false",
    "trainer.save_freq=-1",
    "trainer.export_hf_model=false",
    "trainer.log_rollouts=false",
    "trainer.total_training_steps=2",
)


# --- what a new role needs: a worker class, a section, a row -----------------------------------------------------
class EchoWorker(PolicyWorker):
    """One rank of the echo, whose passes compute `echo_log_probs`."""

    @on_device()
    def compute_log_probs(self, rows: DataProtoRef) -> tuple[Label, DataProto]:
        def compute(data: DataProto, _: tuple[str, ...], **limits: Any) -> Mapping[str, Any]:
            return {"echo_log_probs": self.engine.compute_columns(data, ("log_probs",), **limits)["log_probs"]}

        return self._columns(rows, ("echo_log_probs",), compute)


class EchoConfig(Section):
    """`echo`: the model that is echoed."""

    enable: bool
    world_size: Processes | None


def model(config: RunConfig) -> Model:
    return Model("echo", POLICY_KEY, config.actor_rollout_ref.model.path, "fp32", "fp32", built=False)


ECHO = Role(
    "echo",
    f"{__name__}:EchoWorker",
    "grpo_dist.workers.gang:FrozenGroup",
    lambda config: config.echo.enable,
    section="echo",
    size_key="echo.world_size",
    fsdp="actor_rollout_ref.ref.fsdp_config",
    ranks=reference_ranks,
    model=model,
    shares=("actor_ref", "all"),
    adds=("echo", "echo_log_prob"),
    passes=reference_passes,
)


# --- that is all -------------------------------------------------------------------------------------------------
class EchoRunConfig(RunConfig):
    """The config of a run with an echo."""

    echo: EchoConfig


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(ROLES, "echo", ECHO)
    shutil.copytree(CONFIG_DIR, tmp_path / "config", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    file = tmp_path / "config" / "grpo.yaml"
    file.write_text(file.read_text() + "\necho:\n  # Echo the policy's start.\n  enable: true\n  world_size: null\n")
    return replace(GRPO, file=file, schema=EchoRunConfig)


def test_it_has_its_place_in_plan_and_checks(command: Any) -> None:
    config, notes = load_command([*SMALL, "cluster=node8"], command)
    says(format_plan(config, notes), "echo")
    says(format_summary(config, notes), "4 actor", "4 ref", "4 echo", "share")
    assert "echo" in [row.model.title for row in checked_models(config)]
    alone, _ = load_command([*SMALL, "cluster=node8", "echo.enable=false"], command)
    assert "echo" not in [row.model.title for row in checked_models(alone)]


@pytest.mark.deep
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_column_its_time_and_its_idle_share_arrive(command: Any, local_ray: None, tmp_path: Path) -> None:
    config, _ = load_command([*SMALL, f"trainer.default_local_dir={tmp_path}/run"], command)
    batches: list[DataProtoRef] = []
    plan = make_plan(config, 2)
    with ExitStack() as stack:
        roles = spawn_roles(plan, stack)
        start_roles(plan, roles)
        trainer = recorded_trainer(plan, roles, load_run_prompts(config, policy_folder(config))[0])
        measure = trainer.measure

        def keep(batch: DataProtoRef) -> None:
            batches.append(batch)
            measure(batch)

        trainer.measure = keep  # type: ignore[method-assign]
        trainer.fit()
        found = [batch.fetch(("echo_log_probs", "ref_log_probs")) for batch in batches]
        assert sorted(roles.holders()) == ["actor"], "it stands still"
    assert len(found) == 2
    for columns in found:  # the echo is the reference's model
        for echo, ref in zip(columns["echo_log_probs"].rows(), columns["ref_log_probs"].rows(), strict=True):
            assert np.allclose(echo.numpy(), ref.numpy(), atol=1e-5)
    for row in history(trainer):
        assert row["timing_s/echo"] >= 0.0
        assert 0.0 <= row["perf/idle/echo"] <= 1.0
