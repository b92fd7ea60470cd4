"""What engines are built from and called with. Plain numbers and names: loads neither torch nor vLLM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSettings:
    """How a model is loaded and sharded; dtypes are "fp32" or "bf16"."""

    path: str
    trust_remote_code: bool
    model_dtype: str
    compute_dtype: str
    gradient_checkpointing: bool
    reshard_after_forward: bool


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with linear warm-up, then constant or cosine; counted in optimizer steps."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    lr_scheduler_type: str
    num_warmup_steps: int
    num_training_steps: int
    min_lr_ratio: float


@dataclass(frozen=True)
class ObjectiveSettings:
    """The options of `algorithms.objective.policy_objective`, under verl's names."""

    loss_mode: str
    loss_agg_mode: str
    clip_ratio: float
    clip_ratio_low: float | None
    clip_ratio_high: float | None
    clip_ratio_c: float
    use_kl_loss: bool
    kl_loss_type: str
    kl_loss_coef: float
    entropy_coeff: float

    @property
    def columns(self) -> tuple[str, ...]:
        """Per-token columns the objective reads."""
        return ("old_log_probs", "advantages") + (("ref_log_probs",) if self.use_kl_loss else ())


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with; lengths in tokens, memory in GiB (None: what vLLM finds free)."""

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
    """

    n: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int | None
