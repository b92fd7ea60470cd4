"""The typed config that all commands share (files, records, resuming, machines), and that of the commands which train
one model on rows with known answers. See schema.py.

Sections and keys of the latter have the names of verl's supervised trainer where it has them.
"""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import PrivateAttr

from grpo_dist.assets import BUILTIN, TRAINED_MODEL_KEY
from grpo_dist.config import field_types, schema_roles
from grpo_dist.config.field_types import Count, Mark, Names, NonNegativeInt, PositiveFloat, Resume, Section, Text
from grpo_dist.config.processor import has_bf16
from grpo_dist.plugins.names import LOGGERS


class JobDataConfig(Section):
    """`data`: the rows."""

    train_files: Annotated[field_types.Files, Resume.FREE]
    val_files: Annotated[field_types.OptionalFiles, Resume.FREE]
    train_batch_size: Count
    train_max_samples: Annotated[field_types.CountOrMinusOne, Resume.FREE]
    val_max_samples: Annotated[field_types.CountOrMinusOne, Resume.FREE]
    shuffle: Annotated[bool, Resume.OTHER_ORDER]
    seed: Annotated[NonNegativeInt | None, Mark("refused", "the order of the rows depends on it")]


class StopAtConfig(Section):
    """`trainer.stop_at`: a value of a validation metric that ends the run."""

    metric: Text
    value: field_types.Float


class JobTrainerConfig(Section):
    """`trainer`: the run, its records and its machines."""

    total_epochs: Annotated[Count, Resume.LENGTH]
    total_training_steps: Annotated[Count | None, Resume.LENGTH]
    seed: Annotated[NonNegativeInt, Mark("refused", "what is drawn, and the order of the rows, depend on the seed")]
    project_name: Annotated[field_types.FolderName, Resume.FREE]
    experiment_name: Annotated[field_types.FolderName, Resume.FREE]
    logger: Annotated[tuple[Annotated[str, field_types.builtin_or_custom(LOGGERS)], ...], Names, Resume.FREE]
    console: Annotated[bool, Resume.FREE]
    default_local_dir: Annotated[field_types.Folder, Resume.FREE]
    test_freq: Annotated[field_types.CountOrMinusOne, Resume.FREE]
    val_before_train: Annotated[bool, Resume.FREE]
    val_only: Annotated[bool, Resume.FREE]
    save_freq: Annotated[field_types.CountOrMinusOne, Resume.FREE]
    save_interval_minutes: Annotated[PositiveFloat | None, Resume.FREE]
    max_actor_ckpt_to_keep: Annotated[Count | None, Resume.FREE]
    keep_best_metric: Annotated[Text | None, Resume.FREE]
    stop_at: Annotated[StopAtConfig | None, Resume.FREE]
    resume_mode: Annotated[Literal["auto", "disable", "resume_path", "force"], Resume.FREE]
    resume_from_path: Annotated[field_types.Folder | None, Resume.FREE]
    max_actor_restarts: Annotated[NonNegativeInt, Resume.FREE]
    node_wait_minutes: Annotated[field_types.NonNegativeFloat, Resume.FREE]
    halve_on_out_of_memory: Annotated[bool, Resume.FREE]
    export_hf_model: Annotated[bool, Resume.FREE]
    export_dtype: Annotated[field_types.TrainDtypeName | None, Resume.FREE]
    push_to_hub: Annotated[Text | None, Resume.FREE]
    hub_private_repo: Annotated[bool, Resume.FREE]
    nnodes: Annotated[field_types.Machines, Resume.FREE]
    n_gpus_per_node: Annotated[field_types.GpusPerMachine, Resume.FREE]
    worker_timeout_s: Annotated[PositiveFloat, Resume.FREE]
    dry_run: Annotated[field_types.DryRun, Resume.FREE]

    @property
    def records(self) -> tuple[str, ...]:
        """Where metrics go, each once: what is always on, and what `logger` lists."""
        always = ("jsonl", "console") if self.console else ("jsonl",)
        return tuple(dict.fromkeys((*always, *(name for name in self.logger if name != "console"))))

    @property
    def metrics_named(self) -> dict[str, str]:
        """The metrics of validation that keys of this section name, by these keys."""
        ends = self.stop_at.metric if self.stop_at is not None else None
        named = {"keep_best_metric": self.keep_best_metric, "stop_at.metric": ends}
        return {key: metric for key, metric in named.items() if metric is not None}

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

    model_key: ClassVar[str]  # of the path of the model that is trained
    fsdp_key: ClassVar[str]  # of the section that says how its weights are held

    data: JobDataConfig
    trainer: JobTrainerConfig
    cluster: Annotated[JobClusterConfig, Resume.FREE]
    ray_kwargs: Annotated[RayKwargsConfig, Resume.FREE]
    _references: dict[tuple[str | int, ...], str] = PrivateAttr(default_factory=dict)

    @property
    def references(self) -> dict[tuple[str | int, ...], str]:
        """References to the environment that are saved in place of its values, by their places (environment.py)."""
        return self._references

    @property
    def device(self) -> schema_roles.Device:
        """Where the roles run: "cpu" where the machines have no GPUs."""
        return "cpu" if self.trainer.n_gpus_per_node == 0 else "cuda"

    @property
    def model_path(self) -> str:
        """Folder or name of the model that is trained."""
        return str(attrgetter(self.model_key)(self))

    @property
    def export_dtype(self) -> field_types.TrainDtype:
        """Type of the weights in the exported folder."""
        dtype: field_types.TrainDtype = self.trainer.export_dtype or attrgetter(self.fsdp_key)(self).model_dtype
        return dtype

    def sequence_parallel_size(self, role: str) -> int:
        """Ranks of a role that split the tokens of their micro-batches, and have the same rows."""
        return 1

    @property
    def has_builtin_model(self) -> bool:
        """Tell if that model comes with the package: a small one, whose runs on CPU are exact."""
        return self.model_path.startswith(BUILTIN)

    @property
    def default_dtype(self) -> field_types.TrainDtype:
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


# --- commands that train one model -----------------------------------------------------------------------------------
class SupervisedModelConfig(schema_roles.RecomputedConfig):
    """`model`: what is trained."""

    path: Annotated[Text, Resume.OTHER_MODEL]
    trust_remote_code: Annotated[bool, Resume.FREE]
    use_remove_padding: Annotated[bool, Resume.FREE]
    override_config: Annotated[dict[str, Any], Resume.OTHER_MODEL]


class SupervisedDataConfig(JobDataConfig):
    """`data`: the rows, and how many of them a pass takes."""

    max_length: Count
    micro_batch_size_per_gpu: Annotated[Count, Resume.FREE]
    use_dynamic_bsz: Annotated[bool, Resume.FREE]
    max_token_len_per_gpu: Annotated[Count, Resume.FREE]


class PreferenceDataConfig(SupervisedDataConfig):
    """`data` of `grpo-dist reward-model`: pairs, or labelled steps and how they are written."""

    step_separator: Text
    step_tag: Text | None


class SupervisedOptimConfig(schema_roles.OptimConfig):
    """`optim`: AdamW and its schedule."""

    clip_grad: PositiveFloat


class SupervisedTrainerConfig(JobTrainerConfig):
    """`trainer`: the run, its records and its machines."""

    nccl_timeout: Annotated[Count, Resume.FREE]


class SupervisedClusterConfig(JobClusterConfig):
    """`cluster`: the number of ranks, and what each gets."""

    world_size: field_types.Processes | None


class SupervisedConfig(JobConfig):
    """A whole run of a command that trains one model.

    Attributes:
        role: the name of the model's role, of its folder in checkpoints and of its metrics.
    """

    role: ClassVar[str]
    model_key, fsdp_key = TRAINED_MODEL_KEY, "engine"

    data: SupervisedDataConfig
    trainer: SupervisedTrainerConfig
    cluster: Annotated[SupervisedClusterConfig, Resume.FREE]
    model: SupervisedModelConfig
    optim: SupervisedOptimConfig
    engine: schema_roles.FSDPConfig
    checkpoint: schema_roles.CheckpointConfig

    @property
    def max_model_len(self) -> int:
        """Longest row in tokens."""
        return self.data.max_length

    @property
    def world_size(self) -> int:
        """Ranks that train. On CPU the built-in model has two: its matrices are too small for two threads to help."""
        return self.cluster.world_size or self.num_gpus or (2 if self.has_builtin_model else 1)


class RewardModelTrainingConfig(SupervisedConfig):
    """A whole run of `grpo-dist reward-model`."""

    role = "reward_model"

    data: PreferenceDataConfig


class SFTModelConfig(SupervisedModelConfig, schema_roles.LoraSection):
    """`model`: what is trained, whole or by LoRA."""


class SFTDataConfig(SupervisedDataConfig):
    """`data`: the conversations, and how many of them a pass takes."""

    messages_key: Text
    apply_chat_template_kwargs: dict[str, Any]


class SFTConfig(SupervisedConfig):
    """A whole run of `grpo-dist sft`."""

    role = "sft"

    data: SFTDataConfig
    model: SFTModelConfig
