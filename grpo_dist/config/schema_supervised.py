"""The typed configs of commands that train one model on rows with known answers: `reward_model` and `sft`.

Defaults and the meaning of each key are in the command's YAML file. Sections and keys have the names of verl's
supervised trainer where it has them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from grpo_dist.config.field_types import (
    Count,
    PositiveFloat,
    Processes,
    Resume,
    Text,
    TrainDtype,
)
from grpo_dist.config.processor import physical_cores
from grpo_dist.config.schema_job import JobClusterConfig, JobConfig, JobDataConfig, JobTrainerConfig
from grpo_dist.config.schema_roles import CheckpointConfig, FSDPConfig, LoraSection, OptimConfig, RecomputedConfig


class SupervisedModelConfig(RecomputedConfig):
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

    @property
    def max_token_len(self) -> int | None:
        """Most tokens of a pass; None: it is filled by sequences."""
        return self.max_token_len_per_gpu if self.use_dynamic_bsz else None


class PreferenceDataConfig(SupervisedDataConfig):
    """`data` of `grpo-dist reward-model`: pairs, or labelled steps and how they are written."""

    step_separator: Text
    step_tag: Text | None


class SupervisedOptimConfig(OptimConfig):
    """`optim`: AdamW and its schedule."""

    clip_grad: PositiveFloat


class SupervisedTrainerConfig(JobTrainerConfig):
    """`trainer`: the run, its records and its machines."""

    nccl_timeout: Annotated[Count, Resume.FREE]


class SupervisedClusterConfig(JobClusterConfig):
    """`cluster`: the number of ranks, and what each gets."""

    world_size: Processes | None


class SupervisedConfig(JobConfig):
    """A whole run of a command that trains one model.

    Attributes:
        role: the name of the model's role, of its folder in checkpoints and of its metrics.
    """

    role: ClassVar[str]

    data: SupervisedDataConfig
    trainer: SupervisedTrainerConfig
    cluster: Annotated[SupervisedClusterConfig, Resume.FREE]
    model: SupervisedModelConfig
    optim: SupervisedOptimConfig
    engine: FSDPConfig
    checkpoint: CheckpointConfig

    @property
    def model_path(self) -> str:
        """See `JobConfig.model_path`."""
        return self.model.path

    @property
    def nccl_timeout(self) -> int:
        """See `RunConfig.nccl_timeout`."""
        return self.trainer.nccl_timeout

    @property
    def max_model_len(self) -> int:
        """Longest row in tokens."""
        return self.data.max_length

    @property
    def export_dtype(self) -> TrainDtype:
        """See `JobConfig.export_dtype`."""
        return self.trainer.export_dtype or self.engine.model_dtype

    @property
    def world_size(self) -> int:
        """Ranks that train. On CPU the built-in model has two: its matrices are too small for two threads to help."""
        return self.cluster.world_size or self.num_gpus or (2 if self.has_builtin_model else 1)

    @property
    def num_threads(self) -> int:
        """Compute threads of a rank on CPU: the ranks of a machine share its cores, unless the model is too small."""
        if self.cluster.num_threads_per_worker is not None or self.device != "cpu" or self.has_builtin_model:
            return self.cluster.num_threads_per_worker or 1
        return max(1, min(physical_cores(), physical_cores() * self.trainer.nnodes // self.world_size))


class RewardModelTrainingConfig(SupervisedConfig):
    """A whole run of `grpo-dist reward-model`."""

    role = "reward_model"

    data: PreferenceDataConfig


class SFTModelConfig(SupervisedModelConfig, LoraSection):
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
