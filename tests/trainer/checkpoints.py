"""Small checkpoints for tests: a few kilobytes in place of shards."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_dist.assets import resolve_model_path
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.engines.train.durable_files import FileDigest, digest_file
from grpo_dist.plan.plan import make_plan
from grpo_dist.trainer.checkpoint.config_changes import saved_config
from grpo_dist.trainer.checkpoint.folder import (
    CONFIG,
    LATEST,
    STATE,
    RunState,
    begin_checkpoint,
    prune_checkpoints,
    publish_checkpoint,
)
from grpo_dist.trainer.checkpoint.manifest import write_manifest
from grpo_dist.trainer.loop import exported_usage
from grpo_dist.trainer.record import EXPORTED, make_run_dir, write_config


@dataclass
class Writer:
    """A role that writes its part at once, and says so when `done`, or waited for."""

    done: bool = False
    begun: list[str] = field(default_factory=list)
    waits: int = 0
    has_moved: bool = False
    num_bytes: int = len("weights")
    error: Exception | None = None

    async def checkpoint_bytes(self) -> int:
        return self.num_bytes

    async def begin_save(self, folder: str) -> None:
        self.begun.append(Path(folder).name)
        Path(folder).mkdir()
        self.file = Path(folder) / "__0_0.distcp"
        self.file.write_text("weights")

    async def finished_save(self, *, wait: bool) -> dict[str, FileDigest] | None:
        self.waits += wait
        if self.error is not None and (wait or self.done):
            raise self.error
        return {self.file.name: digest_file(self.file)} if wait or self.done else None


def run_state(step: int, metrics: Mapping[str, float] | None = None) -> RunState:
    return RunState(step, step, {"epoch": 0, "position": step}, metrics=dict(metrics or {}))


def unverified(config: JobConfig, step: int = 3, metrics: Mapping[str, float] | None = None) -> Path:
    """A checkpoint of a run as far as its config goes; its files are not verified by a run that has not started."""
    run_dir = Path(config.trainer.default_local_dir)
    folder = run_dir / f"global_step_{step}"
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(saved_config(config))
    state = {"step": step, "weight_version": step + 1, "sampler": {}, "metrics": metrics or {}}
    (folder / STATE).write_text(json.dumps(state))
    (run_dir / LATEST).write_text(str(step))
    return folder


def finished_run(config: JobConfig, step: int, metrics: Mapping[str, float] | None = None) -> None:
    """A run that is done: its record, the checkpoint of the last step, and the model that was written after it."""
    folder = unverified(config, step, metrics)
    write_manifest(folder, step, {})
    run_dir = make_run_dir(config)
    write_config(config, run_dir)
    exported_model(run_dir / EXPORTED, config, step, folder)


def exported_model(model: Path, config: JobConfig, step: int, checkpoint: Path | None) -> None:
    """The built-in model's files, as what a run in the folder beside exports at its end."""
    shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), model)
    exported_usage(make_plan(config), step, config.export_dtype, checkpoint, model.parent).write(model)


def save(
    run_dir: Path, *steps: int, keep: Any = None, best: Any = None, text: str = "weights", **metrics: float
) -> Path:
    """Write, publish and prune each step, as a run does; returns the last folder."""
    for step in steps:
        temporary = begin_checkpoint(run_dir, step)
        (temporary / "actor").mkdir()
        (temporary / "actor/__0_0.distcp").write_text(text * 100)
        (temporary / "actor/.metadata").write_text("index" * 20)
        folder = publish_checkpoint(temporary, run_state(step, metrics), "trainer:\n  seed: 1\n")
        prune_checkpoints(run_dir, keep, best)
    return folder


def names(run_dir: Path) -> list[str]:
    """What lies in a run directory."""
    return sorted(path.name for path in run_dir.iterdir())
