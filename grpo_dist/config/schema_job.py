"""The typed config that all commands share: files, records, resuming and machines. See schema.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import PrivateAttr

from grpo_dist.assets import BUILTIN
from grpo_dist.config.field_types import (
    Count,
    CountOrMinusOne,
    DryRun,
    Files,
    Folder,
    FolderName,
    GpusPerMachine,
    Machines,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    OptionalFiles,
    PositiveFloat,
    Section,
    Text,
    TrainDtype,
    TrainDtypeName,
)
from grpo_dist.config.processor import has_bf16
from grpo_dist.config.schema_roles import Device


class JobDataConfig(Section):
    """`data`: the rows."""

    train_files: Files
    val_files: OptionalFiles
    train_batch_size: Count
    train_max_samples: CountOrMinusOne
    val_max_samples: CountOrMinusOne
    shuffle: bool
    seed: NonNegativeInt | None


class JobTrainerConfig(Section):
    """`trainer`: the run, its records and its machines."""

    total_epochs: Count
    total_training_steps: Count | None
    seed: NonNegativeInt
    project_name: FolderName
    experiment_name: FolderName
    logger: Annotated[
        tuple[Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio", "prometheus"], ...], Names
    ]
    console: bool
    default_local_dir: Folder
    test_freq: CountOrMinusOne
    val_before_train: bool
    val_only: bool
    save_freq: CountOrMinusOne
    save_interval_minutes: PositiveFloat | None
    max_actor_ckpt_to_keep: Count | None
    keep_best_metric: Text | None
    resume_mode: Literal["auto", "disable", "resume_path", "force"]
    resume_from_path: Folder | None
    max_actor_restarts: NonNegativeInt
    node_wait_minutes: NonNegativeFloat
    halve_on_out_of_memory: bool
    export_hf_model: bool
    export_dtype: TrainDtypeName | None
    nnodes: Machines
    n_gpus_per_node: GpusPerMachine
    worker_timeout_s: PositiveFloat
    dry_run: DryRun

    @property
    def records(self) -> tuple[str, ...]:
        """Where metrics go, each once: what is always on, and what `logger` lists."""
        always = ("jsonl", "console") if self.console else ("jsonl",)
        return tuple(dict.fromkeys((*always, *(name for name in self.logger if name != "console"))))

    @property
    def record_dir(self) -> Path:
        """Where config, metrics and samples are written. Validation alone leaves the training's record as it is."""
        return Path(self.default_local_dir, "val_only") if self.val_only else Path(self.default_local_dir)


class JobClusterConfig(Section):
    """`cluster`: what each process gets."""

    num_cpus_per_worker: PositiveFloat | None
    num_threads_per_worker: Count | None
    gpu_memory_gib: PositiveFloat | None


class RayInitConfig(Section):
    """`ray_kwargs.ray_init`: the Ray cluster."""

    address: Text | None
    num_cpus: Count | None


class RayKwargsConfig(Section):
    """`ray_kwargs`."""

    ray_init: RayInitConfig


class JobConfig(Section):
    """What the configs of all commands have."""

    data: JobDataConfig
    trainer: JobTrainerConfig
    cluster: JobClusterConfig
    ray_kwargs: RayKwargsConfig
    _references: dict[tuple[str | int, ...], str] = PrivateAttr(default_factory=dict)

    @property
    def references(self) -> dict[tuple[str | int, ...], str]:
        """References to the environment that are saved in place of its values, by their places (environment.py)."""
        return self._references

    @property
    def device(self) -> Device:
        """Where the roles run: "cpu" where the machines have no GPUs."""
        return "cpu" if self.trainer.n_gpus_per_node == 0 else "cuda"

    @property
    def model_path(self) -> str:
        """Folder or name of the model that is trained."""
        raise NotImplementedError

    @property
    def export_dtype(self) -> TrainDtype:
        """Type of the weights in the exported folder."""
        raise NotImplementedError

    @property
    def has_builtin_model(self) -> bool:
        """Whether that model comes with the package: a small one, whose runs on CPU are exact."""
        return self.model_path.startswith(BUILTIN)

    @property
    def default_dtype(self) -> TrainDtype:
        """bf16 on GPU, and on a CPU that has it; fp32 otherwise, and for the built-in model, whose runs are exact."""
        on_cpu = not self.has_builtin_model and has_bf16()
        return "bf16" if self.device == "cuda" or on_cpu else "fp32"

    @property
    def num_gpus(self) -> int:
        """GPUs of all machines."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def data_seed(self) -> int:
        """Seed of the shuffle: data.seed, or trainer.seed where that is null."""
        return self.trainer.seed if self.data.seed is None else self.data.seed
