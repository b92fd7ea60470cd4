"""The settings of engines, as plain numbers and names. Loads neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_dist.config.schema_job import SupervisedModelConfig
from grpo_dist.config.schema_roles import (
    AdamWConfig,
    CriticModelConfig,
    ForwardConfig,
    FSDPConfig,
    LoraSection,
    ModelConfig,
    RefModelConfig,
    RetrainConfig,
    RewardModelConfig,
    RewardModelFolderConfig,
    RolloutConfig,
)
from grpo_dist.plugins.registry import load_attribute

ModelSection = ModelConfig | CriticModelConfig | RefModelConfig | RewardModelFolderConfig | SupervisedModelConfig
LayersSection = ModelConfig | CriticModelConfig | RetrainConfig | SupervisedModelConfig


# Rank of the actor in a weight group; those of the engines' workers follow.
SENDER = 0
FSDP = "grpo_dist.engines.train.fsdp_engine:FSDPEngine"


@dataclass(frozen=True)
class ModelSettings:
    """The settings by which a model is loaded, sharded and fed: sections of the config, and what the run adds to them.

    Attributes:
        model: the section of the model, such as `actor_rollout_ref.model`.
        layers: the section that says what layers keep for their backward pass; None: nothing trains.
        key: of `path`, for messages; likewise `sequence_parallel_key`, and `layers_key` of `layers`.
        path: on a rank a folder of its machine.
        model_dtype: of the weights that train, and of those that a frozen model holds.
        head_dtype: None: in the types of the rest.
        layout: of sequences in a forward pass: "padded", "packed" or "shared".
        max_model_len: as the sampler has it; None: not known.
        num_labels: outputs per token of a classifier's head: 1 (a score or a value), 2 (process reward models that tell
            bad from good); 0: a causal LM.
        judging_tokens: token ids of bad and good of a causal LM that judges steps by its next token: their rows of the
            output layer become a head of two outputs.
        new_head_seed: of a head that is drawn where the files, those of a causal LM, have none; None: then they are
            refused.
        small_new_head: whether that head is so small that its first values are near 0: one of values.
        sees_images: whether prompts have pictures, so that its vision part is needed.
        trains_vision: whether that trains too.
        room: what leaves more room on the GPU, for messages (memory_errors.py).
    """

    model: ModelSection
    fsdp_config: FSDPConfig | ForwardConfig
    layers: LayersSection | None
    key: str
    path: str
    model_dtype: str
    compute_dtype: str
    head_dtype: str | None = None
    reshard_after_forward: bool = True
    optimizer_offload: bool = False
    shares_gpu: bool = False
    layout: str = "shared"
    max_model_len: int | None = None
    num_labels: int = 0
    judging_tokens: tuple[int, int] | None = None
    new_head_seed: int | None = None
    small_new_head: bool = False
    sequence_parallel_size: int = 1
    sequence_parallel_key: str = ""
    room: str = ""
    layers_key: str = ""
    replays_routes: bool = False
    sees_images: bool = False
    trains_vision: bool = False

    @property
    def section(self) -> str:
        """The key of the model's section, for messages."""
        return self.key.rpartition(".")[0]

    @property
    def setting(self) -> str:
        """The key and its value, for messages."""
        return f"{self.key}={self.path}"

    @property
    def base_dtype(self) -> str:
        """The type that its own weights are held in; beside LoRA's factors, frozen, they need only that of passes."""
        return self.model_dtype if self.lora is None else self.compute_dtype

    @property
    def head_apart(self) -> bool:
        """Tell if the output layer is in float32 beside other weights that are, or compute, in another type."""
        return self.head_dtype == "fp32" and {self.base_dtype, self.compute_dtype} != {"fp32"}

    @property
    def changes_model(self) -> bool:
        """Tell if it has other layers than the model of the folder."""
        return self.lora is not None or self.head_apart or self.replays_routes or self.sequence_parallel_size > 1

    @property
    def sends_factors(self) -> bool:
        """Tell if engines get LoRA's factors alone, not the whole weights with factors merged."""
        return isinstance(self.model, ModelConfig) and self.model.sends_factors

    @property
    def lora(self) -> LoraSection | None:
        """The keys of the factors that train beside the weights; None: the weights themselves do, or nothing."""
        return self.model if isinstance(self.model, LoraSection) and self.model.trains_factors else None


@dataclass(frozen=True)
class PassLimits:
    """The most that a pass holds, and the config's keys that say so.

    Attributes:
        keys: what the keys begin with, such as "actor_rollout_ref.actor.ppo_".
        micro_batch_size: sequences, where there is no token budget.
        max_token_len: tokens, of the ranks that split a pass together; None: the number of sequences is the limit.
        budget: name of the key of the most tokens, between `keys` and `_per_gpu`.
        lengths: the keys that limit a sequence.
    """

    keys: str
    micro_batch_size: int
    max_token_len: int | None = None
    budget: str = "max_token_len"
    lengths: str = "data.max_response_length or data.max_prompt_length"


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """What a rank of a sharded model is built from.

    Attributes:
        model: what to load; the worker resolves a `builtin:` path on its own node.
        update: the limits of a forward and backward pass; None: nothing trains.
        columns: what a log-prob pass computes: a name of `FSDPEngine.compute_columns`, with `old_` or `ref_` before it
            where it is one of log-probs.
        keeps_output_layer: whether the loss takes the KL over the vocabulary to the model's own start, of whose output
            layer a copy is kept.
        teachers: those after the first one, which is `model`, where rows have teachers by their data source.
        reference_columns: of the actor with LoRA: what a pass without its factors computes.
        weight_bucket_bytes: size of the pieces in which weights travel, so that no process holds a second whole model.
        engine: the class of the train engine, as `pkg.module:Class`.
    """

    model: ModelSettings
    device: str
    num_threads: int
    seed: int
    collective_timeout_s: float
    forward: PassLimits
    update: PassLimits | None = None
    temperature: float = 1.0
    columns: tuple[str, ...] = ()
    optimizer: AdamWConfig | None = None
    total_steps: int = 1
    grad_clip: float = float("inf")
    keeps_output_layer: bool = False
    teachers: tuple[ModelSettings, ...] = ()
    reference_columns: tuple[str, ...] = ()
    weight_bucket_bytes: int = 256 << 20
    engine: str = FSDP

    def make_engine(self, model: ModelSettings) -> Any:
        """Load the model into a train engine, in a process that has joined the process group."""
        return load_attribute(self.engine, key="RankSettings.engine")(
            model,
            device=self.device,
            temperature=self.temperature,
            optimizer=self.optimizer,
            total_steps=self.total_steps,
            grad_clip=self.grad_clip,
        )


@dataclass(frozen=True, kw_only=True)
class RewardModelSettings(RankSettings):
    """What a rank of the reward model is built from, and whether code of the responses' tokenizer may run."""

    section: RewardModelConfig
    trust_input_tokenizer: bool = False
    step_separator: str = ""


@dataclass(frozen=True)
class EngineSettings:
    """The settings that a rollout engine is started with: two sections of the config, and what the run adds to them.

    Attributes:
        rollout: `actor_rollout_ref.rollout`; names of code, and of what it reads, are valid in every folder.
        model: `actor_rollout_ref.model`; its path is a folder of this machine.
        dtype: of the weights, as vLLM names it.
        max_episode_len: most different tokens of an agent's episode, whose branches are all one row of an update.
        needs_tokenizer: whether sampling needs the tokenizer, for texts that stop a response or are forbidden.
        gpus: of an engine of several processes that shares its GPUs: Ray assigns it a part of the first one only.
        footprint_gib: what must be free on each GPU before a replacement starts: what its predecessor took.
        collective_timeout_s: None: vLLM's default.
        profile_dir: the folder into which vLLM's profiler writes, of this engine alone; None: it is never profiled.
        min_group_size: fewest episodes that a group of the training may have where others fail; None: all.
        sees_images: whether prompts have pictures (data.image_key).
        records_routes: whether responses come with the experts of their tokens (protocol/sequences.py).
    """

    rollout: RolloutConfig
    model: ModelConfig
    device: str
    dtype: str
    max_model_len: int
    max_episode_len: int
    seed: int
    needs_tokenizer: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    shares_gpu: bool = False
    gpus: tuple[str, ...] = ()
    footprint_gib: float | None = None
    collective_timeout_s: int | None = None
    profile_dir: str | None = None
    min_group_size: int | None = None
    records_routes: bool = False
    sees_images: bool = False

    @property
    def sleeps(self) -> bool:
        """Tell if the engine can release its memory until new weights come."""
        return self.rollout.free_cache_engine and self.shares_gpu

    @property
    def lora(self) -> LoraSection | None:
        """The keys of the factors that come in place of whole weights; None: whole weights come."""
        return self.model if self.model.sends_factors else None


@dataclass(frozen=True)
class GroupAddress:
    """Where the ranks of a weight group meet; see weights/broadcast.py.

    Attributes:
        host: of the store, which is in the process of rank 0; likewise `port`.
        generation: number of the group, unique in its store.
        backend: "broadcast" from rank 0 to all, or "ipc" from each sender to the receivers on its device.
        num_senders: they have the first ranks.
    """

    host: str
    port: int
    generation: int
    world_size: int
    timeout_s: float
    backend: str = "broadcast"
    num_senders: int = 1


@dataclass(frozen=True)
class SamplingSettings:
    """The settings of sampling, by their names in `actor_rollout_ref.rollout`.

    Attributes:
        temperature: 0 is greedy.
        max_tokens: end-of-sequence included.
        seed: response i of a prompt is sampled with seed + i; None: the engine's own random state.
        routes_from: how many tokens of the prompt need no experts recorded: those of an earlier turn.
    """

    n: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int | None
    ignore_eos: bool = False
    min_p: float = 0.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    routes_from: int = 0


def choose_layout(*, use_remove_padding: bool, use_prefix_grouper: bool) -> str:
    """The layout that verl's two keys ask for; prompts can be shared only where padding is removed."""
    if not use_remove_padding:
        return "padded"
    return "shared" if use_prefix_grouper else "packed"
