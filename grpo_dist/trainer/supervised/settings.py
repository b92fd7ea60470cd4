"""From the config of a command that trains one model to what its ranks are built from."""

from __future__ import annotations

from grpo_dist.config.schema_supervised import SupervisedConfig
from grpo_dist.trainer.model_settings import trained_model
from grpo_dist.trainer.settings import optimizer_settings
from grpo_dist.workers.policy import PolicySettings


def worker_settings(config: SupervisedConfig, num_steps: int) -> PolicySettings:
    """What the ranks are built from."""
    data, optim = config.data, config.optim
    return PolicySettings(
        model=trained_model(config),
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
