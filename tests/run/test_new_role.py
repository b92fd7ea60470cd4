"""A frozen role that adds a column is told of in four files: `echo`, whose log-probs are a column of every batch."""

import shutil
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
from grpo_dist.engines.settings import RankSettings
from grpo_dist.plan import roles
from grpo_dist.plan.commands import GRPO
from grpo_dist.plan.plan import make_plan
from grpo_dist.plan.roles import ROLES, Model, ModelPass, Role, reference_passes, reference_ranks
from grpo_dist.plan.text import format_plan, format_summary
from grpo_dist.protocol.fields import FIELDS, Field
from grpo_dist.run.build import spawn_roles, start_roles
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.trainer.run_prompts import load_run_prompts
from grpo_dist.workers.gang import PolicyWorker
from tests.messages import says
from tests.models import policy_folder
from tests.trainer.recorded import history, recorded_trainer

SMALL = (
    *("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4"),
    *("data.val_files=null", "trainer.val_before_train=false", "trainer.save_freq=-1", "trainer.log_rollouts=false"),
    *("trainer.export_hf_model=false", "trainer.total_training_steps=2"),
)


# --- what a new role needs; a worker class only if it computes what no other one does -----------------------------
COLUMN = "echo_log_probs"
FIELD = Field("ragged (N, R_i)", "float32", "echo", "", "log-probs under the echo; nats", "log_probs")
YAML = "\necho:\n  # Echo the policy's start.\n  enable: true\n  world_size: null\n"


class EchoConfig(Section):
    enable: bool
    world_size: Processes | None


def model(config: RunConfig) -> Model:
    return Model("echo", POLICY_KEY, config.actor_rollout_ref.model.path, "fp32", "fp32", built=False)


def echo_ranks(*args: Any, **ranks: Any) -> RankSettings:
    return replace(reference_ranks(*args, **ranks), columns=(COLUMN,))


ECHO = Role(
    "echo",
    f"{__name__}:EchoWorker",
    "grpo_dist.workers.gang:FrozenGroup",
    lambda config: config.echo.enable,
    section="echo",
    size_key="echo.world_size",
    fsdp="actor_rollout_ref.ref.fsdp_config",
    ranks=echo_ranks,
    model=model,
    shares=("actor_ref", "all"),
    passes=reference_passes,
)
PASS = ModelPass("echo", "echo", "echo_log_prob", adds=(COLUMN,), present=ECHO.present)


# --- that is all -------------------------------------------------------------------------------------------------
class EchoRunConfig(RunConfig):
    echo: EchoConfig


class EchoWorker(PolicyWorker):  # in its process the table of columns has the row too
    def start(self, *args: Any) -> None:
        FIELDS[COLUMN] = FIELD
        super().start(*args)


TOLD_IN: dict[str, Any] = {
    "config/grpo.yaml": YAML,
    "config/schema.py": EchoRunConfig,
    "plan/roles.py": (ECHO, PASS),  # and the function that the row names
    "protocol/fields.py": FIELD,
}


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    role, row = TOLD_IN["plan/roles.py"]
    monkeypatch.setitem(ROLES, "echo", role)
    monkeypatch.setattr(roles, "PASSES", [*roles.PASSES, row])
    monkeypatch.setitem(FIELDS, COLUMN, TOLD_IN["protocol/fields.py"])
    shutil.copytree(CONFIG_DIR, tmp_path / "config", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    file = tmp_path / "config" / "grpo.yaml"
    file.write_text(file.read_text() + TOLD_IN["config/grpo.yaml"])
    return replace(GRPO, file=file, schema=TOLD_IN["config/schema.py"])


def test_it_is_told_of_in_four_files(command: Any) -> None:
    assert len(TOLD_IN) == 4
    config, _ = load_command([*SMALL, "algorithm.use_kl_in_reward=true"], command)
    ahead = config.replaced(trainer=config.trainer.replaced(max_staleness=1))
    found = [[row.name for row in roles.passes_of(each, (), waiting=False)] for each in (config, ahead)]
    assert found == [["ref", "old_log_prob", "echo"], ["ref", "echo"]], "they stand still"
    assert [row.name for row in roles.passes_of(ahead, (), waiting=True)] == ["old_log_prob"]
    assert [row.name for row in roles.passes_of(config, ("echo",), waiting=True)] == ["echo"]


def test_it_has_its_place_in_plan_and_checks(command: Any) -> None:
    config, notes = load_command([*SMALL, "cluster=node8"], command)
    says(format_plan(config, notes), "echo")
    says(format_summary(config, notes), "4 actor", "4 ref", "4 echo", "share")
    assert "echo" in [row.model.title for row in checked_models(config)]
    alone, _ = load_command([*SMALL, "cluster=node8", "echo.enable=false"], command)
    assert "echo" not in [row.model.title for row in checked_models(alone)]


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_column_its_time_and_its_idle_share_arrive(command: Any, local_ray: None, tmp_path: Path) -> None:
    config, _ = load_command([*SMALL, f"trainer.default_local_dir={tmp_path}/run"], command)
    batches: list[DataProtoRef] = []
    plan = make_plan(config, 2)
    with ExitStack() as stack:
        groups = spawn_roles(plan, stack)
        start_roles(plan, groups)
        trainer = recorded_trainer(plan, groups, load_run_prompts(config, policy_folder(config))[0])
        measure = trainer.measure

        def keep(batch: DataProtoRef) -> None:
            batches.append(batch)
            measure(batch)

        trainer.measure = keep  # type: ignore[method-assign]
        trainer.fit()
        found = [batch.fetch(("echo_log_probs", "ref_log_probs")) for batch in batches]
        assert sorted(groups.holders()) == ["actor"], "it stands still"
    assert len(found) == 2
    for columns in found:  # the echo is the reference's model
        for echo, ref in zip(columns["echo_log_probs"].rows(), columns["ref_log_probs"].rows(), strict=True):
            assert np.allclose(echo.numpy(), ref.numpy(), atol=1e-5)
    for row in history(trainer):
        assert row["timing_s/echo"] >= 0.0
        assert 0.0 <= row["perf/idle/echo"] <= 1.0
