"""The settings of engines, as plain numbers and names. Loads neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from grpo_dist.assets import POLICY_KEY, POLICY_SECTION
from grpo_dist.engines.room import ACTOR_ROOM

# Rank of the actor in a weight group; those of the engines' workers follow.
SENDER = 0


@dataclass(frozen=True)
class LoraSettings:
    """LoRA, under verl's names.

    Attributes:
        rank: of the factors.
        alpha: scaling = alpha / rank.
        target_modules: "all-linear" (all but the output layer), or names of modules such as "q_proj".
        exclude_modules: names of modules that get no factors.
        adapter_path: folder of an adapter, from which training goes on; its layers get the factors. "": factors are
            drawn.
        base_model: name of the base model in exported adapters; "": its folder.
    """

    rank: int
    alpha: float
    target_modules: str | tuple[str, ...]
    exclude_modules: tuple[str, ...] = ()
    adapter_path: str = ""
    base_model: str = ""


@dataclass(frozen=True)
class ModelSettings:
    """How a model is loaded, sharded and fed.

    Attributes:
        model_dtype: "fp32" or "bf16", as is `compute_dtype`.
        override_config: entries of the model's config.json to change.
        layout: of sequences in a forward pass: "padded", "packed" or "shared".
        fsdp_size: ranks that hold one copy of the weights together; -1: all.
        defer_grad_sync: whether gradients are reduced over ranks only in a mini-batch's last micro-batch.
        param_offload: whether the weights are in CPU memory between the phases of a step.
        optimizer_offload: whether the optimizer's states are.
        activation_offload: whether the inputs of layers, all that `gradient_checkpointing` keeps of them, are until the
            backward pass needs them.
        shares_gpu: whether processes of other roles are on the same GPU.
        lora: train factors beside the weights; None: the weights themselves.
        max_model_len: most tokens of prompt and response, as the sampler has it; None: not known.
        num_labels: outputs per token of a classifier's head: 1 (reward models, critics), 2 (process reward models that
            tell bad from good); 0: a causal LM.
        judging_tokens: token ids of bad and good of a causal LM that judges steps by its next token: their rows of the
            output layer become a head of two outputs.
        new_head_seed: of a head that is drawn where the files, those of a causal LM, have none; None: then they are
            refused.
        small_new_head: whether that head is so small that its first values are near 0: a critic's.
        sequence_parallel_size: ranks that split the tokens of their micro-batches; see engines/train/ulysses.py.
        sequence_parallel_key: its config key, for messages.
        key: the config key of `path`, for messages.
        section: the section of the config with the model's other keys, for messages.
        room: what leaves more room on the GPU, for messages (room.py).
    """

    path: str
    trust_remote_code: bool
    model_dtype: str
    compute_dtype: str
    gradient_checkpointing: bool
    reshard_after_forward: bool
    layout: str = "shared"
    fsdp_size: int = -1
    defer_grad_sync: bool = False
    override_config: Mapping[str, Any] = field(default_factory=dict)
    param_offload: bool = False
    optimizer_offload: bool = False
    activation_offload: bool = False
    shares_gpu: bool = False
    lora: LoraSettings | None = None
    max_model_len: int | None = None
    num_labels: int = 0
    judging_tokens: tuple[int, int] | None = None
    new_head_seed: int | None = None
    small_new_head: bool = False
    sequence_parallel_size: int = 1
    sequence_parallel_key: str = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    key: str = POLICY_KEY
    section: str = POLICY_SECTION
    room: str = ACTOR_ROOM


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with linear warm-up, then constant, linear or cosine; counted in optimizer steps."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    lr_scheduler_type: str
    num_warmup_steps: int
    num_training_steps: int
    min_lr_ratio: float


@dataclass(frozen=True)
class ObjectiveSettings:
    """The options of `algorithms.objective.policy_objective`, under verl's names.

    Attributes:
        options: of the policy loss (clip_ratio, tau_pos, ...).
        loss_scale_factor: constant length for seq-mean-token-sum-norm.
        weighted: whether the batch has importance weights for the sampler's policy.
        selects_tokens: whether the policy loss treats some tokens in another way.
        correction: options of `algorithms.correction.current_weights`, or None: no such weights.
        on_policy: the old log-probs are those of the forward pass that trains, without gradient.
    """

    loss_mode: str
    loss_agg_mode: str
    options: Mapping[str, float | None]
    use_kl_loss: bool
    kl_loss_type: str
    kl_loss_coef: float
    entropy_coeff: float
    loss_scale_factor: float | None = None
    weighted: bool = False
    selects_tokens: bool = False
    correction: Mapping[str, Any] | None = None
    on_policy: bool = False

    @property
    def exact_kl(self) -> bool:
        """Whether the KL is taken over the vocabulary, from the reference's hidden states."""
        return self.use_kl_loss and self.kl_loss_type == "full"

    @property
    def columns(self) -> tuple[str, ...]:
        """Per-token columns the objective reads."""
        optional = {
            "old_log_probs": not self.on_policy,
            "advantages": True,
            "ref_log_probs": self.use_kl_loss and not self.exact_kl,
            "ref_hidden_states": self.exact_kl,
            "rollout_is_weights": self.weighted,
            "rollout_log_probs": self.on_policy and self.correction is not None,
            "selected_tokens": self.selects_tokens,
        }
        return tuple(name for name, wanted in optional.items() if wanted)


@dataclass(frozen=True)
class PreferenceSettings:
    """The loss of pairs, `algorithms.preference.pair_loss`. The two rows of a pair have the same uid."""

    columns: ClassVar[tuple[str, ...]] = ("labels",)


@dataclass(frozen=True)
class LabelSettings:
    """The loss of labelled tokens, `algorithms.preference.label_loss`."""

    columns: ClassVar[tuple[str, ...]] = ("labels",)


@dataclass(frozen=True)
class SFTSettings:
    """The loss of supervised fine-tuning, `algorithms.supervised.supervised_loss`, of tokens whose mask is 1."""

    columns: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class ValueSettings:
    """The loss of a critic, `algorithms.value_loss.compute_value_loss`, under verl's names.

    Attributes:
        cliprange_value: how far a value may move from what it was before the update.
        loss_scale_factor: constant length for seq-mean-token-sum-norm.
    """

    cliprange_value: float
    loss_agg_mode: str
    loss_scale_factor: float | None = None
    columns: ClassVar[tuple[str, ...]] = ("values", "returns")


# What a model is trained for; engines/train/objectives.py has the objective of each.
TrainingSettings = ObjectiveSettings | PreferenceSettings | LabelSettings | SFTSettings | ValueSettings


@dataclass(frozen=True)
class AgentSettings:
    """The agent loop that runs episodes, and their limits; None: there is none.

    Attributes:
        name: its class as `path/to/file.py:Class`.
        kwargs: its keyword arguments.
        timeout_s: seconds that an episode may spend outside the engine.
        episode_timeout_s: seconds that it may take in all.
        max_assistant_turns: turns that it may have.
        max_concurrent_episodes: how many may run at the same time.
        endpoint_kwargs: arguments of vLLM's server, for the endpoint that a loop may open.
        template_kwargs: variables of the chat template that prompts are rendered with.
    """

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    episode_timeout_s: float | None = None
    max_assistant_turns: int | None = None
    max_concurrent_episodes: int | None = None
    endpoint_kwargs: Mapping[str, Any] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineSettings:
    """What a rollout engine is started with; lengths in tokens.

    Attributes:
        kv_cache_memory_gib: size of the KV cache; None: what vLLM finds free.
        override_config: entries of the model's config.json to change.
        engine_kwargs: more arguments for vLLM.
        needs_tokenizer: whether sampling needs the tokenizer, for texts that stop a response or are forbidden.
        clear_kv_cache_on_update: whether running requests compute their cache again under new weights.
        partial_rollout: whether requests go on under new weights; false: an update waits until they have ended.
        agent: what runs the episodes that are a prompt's responses; None: a response is one turn.
        weight_transport: "object_store", "broadcast" or "ipc".
        gpus: of an engine of several processes that shares its GPUs: Ray assigns it a part of the first one only.
        footprint_gib: what must be free on each GPU before a replacement starts: what its predecessor took.
        free_cache_engine: whether the engine can release its memory until new weights come.
        collective_timeout_s: how long its processes wait for each other, in seconds; None: vLLM's default.
        engine: its name, for `base.rollout_engine`.
        lora: of the factors that come in place of whole weights; None: whole weights come, with factors merged.
        profile_dir: the folder into which vLLM's profiler writes, of this engine alone; None: it is never profiled.
    """

    model_path: str
    device: str
    dtype: str
    trust_remote_code: bool
    tensor_parallel_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_memory_gib: float | None
    enforce_eager: bool
    enable_chunked_prefill: bool
    seed: int
    override_config: Mapping[str, Any] = field(default_factory=dict)
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    needs_tokenizer: bool = False
    clear_kv_cache_on_update: bool = True
    partial_rollout: bool = True
    agent: AgentSettings | None = None
    weight_transport: str = "object_store"
    gpus: tuple[str, ...] = ()
    footprint_gib: float | None = None
    free_cache_engine: bool = False
    collective_timeout_s: int | None = None
    engine: str = "vllm"
    lora: LoraSettings | None = None
    profile_dir: str | None = None


@dataclass(frozen=True)
class GroupAddress:
    """Where the ranks of a weight group meet; see weights/broadcast.py.

    Attributes:
        host: of the store, which is in the process of rank 0; likewise `port`.
        generation: number of the group, unique in its store.
        world_size: number of senders and receivers.
        timeout_s: limit of every wait for another rank.
        backend: "broadcast" from rank 0 to all, or "ipc" from each sender to the receivers on its device.
        num_senders: number of senders, which have the first ranks.
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
    """How to sample.

    Attributes:
        n: responses per prompt.
        temperature: 0 is greedy.
        top_p: nucleus; 1 is off.
        top_k: k likeliest tokens; -1 is off.
        max_tokens: most tokens of a response, end-of-sequence included.
        seed: response i of a prompt is sampled with seed + i; None: the engine's own random state.
        ignore_eos: sample on past the end-of-sequence token.
        min_p: leaves out tokens less likely than this share of the likeliest one; 0 is off.
        min_tokens: fewest tokens of a response.
        stop: texts that end a response; their tokens belong to it.
        bad_words: texts that are never sampled.
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


def choose_layout(*, use_remove_padding: bool, use_prefix_grouper: bool) -> str:
    """The layout that verl's two keys ask for; prompts can be shared only where padding is removed."""
    if not use_remove_padding:
        return "padded"
    return "shared" if use_prefix_grouper else "packed"
