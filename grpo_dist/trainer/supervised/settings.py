"""From the config of a command that trains one model to what its ranks are built from."""

from __future__ import annotations

from typing import Any

from grpo_dist.assets import TRAINED_MODEL_KEY
from grpo_dist.config.schema_supervised import SFTConfig, SupervisedConfig
from grpo_dist.engines.room import SUPERVISED_ROOM
from grpo_dist.engines.settings import ModelSettings, choose_layout
from grpo_dist.trainer.settings import lora_settings, optimizer_settings
from grpo_dist.workers.policy import PolicySettings


def worker_settings(config: SupervisedConfig, num_steps: int) -> PolicySettings:
    """What the ranks are built from."""
    model, engine, data, optim = config.model, config.engine, config.data, config.optim
    return PolicySettings(
        model=ModelSettings(
            path=model.path,
            trust_remote_code=model.trust_remote_code,
            model_dtype=engine.model_dtype,
            compute_dtype=engine.resolved_dtype(config.default_dtype),
            gradient_checkpointing=model.enable_gradient_checkpointing,
            reshard_after_forward=engine.reshard_after_forward,
            layout=choose_layout(use_remove_padding=model.use_remove_padding, use_prefix_grouper=True),
            fsdp_size=engine.fsdp_size,
            defer_grad_sync=engine.defer_grad_sync,
            override_config=model.override_config,
            param_offload=engine.param_offload,
            optimizer_offload=engine.optimizer_offload,
            max_model_len=data.max_length,
            key=TRAINED_MODEL_KEY,
            section="model",
            room=SUPERVISED_ROOM,
            **_parts(config),
        ),
        device=config.device,
        num_threads=config.num_threads,
        temperature=1.0,
        columns=(),
        log_prob_micro_batch_size=data.micro_batch_size_per_gpu,
        seed=config.trainer.seed,
        collective_timeout_s=config.trainer.nccl_timeout,
        optimizer=optimizer_settings(optim, num_steps),
        train_micro_batch_size=data.micro_batch_size_per_gpu,
        train_max_token_len=data.max_token_len,
        grad_clip=optim.clip_grad,
    )


def _parts(config: SupervisedConfig) -> dict[str, Any]:
    """The linear head of a reward model, drawn with the run's seed where there is none; of a causal LM the factors."""
    if isinstance(config, SFTConfig):
        return {"lora": lora_settings(config.model)}
    return {"num_labels": 1, "new_head_seed": config.trainer.seed}
