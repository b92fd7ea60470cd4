"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from grpo_dist.engines.settings import OptimizerSettings


def lr_ratio(step: int, settings: OptimizerSettings) -> float:
    """Share of the peak learning rate that optimizer step `step` (from 0) uses."""
    if step < settings.num_warmup_steps:
        return (step + 1) / settings.num_warmup_steps
    if settings.lr_scheduler_type == "constant":
        return 1.0
    decay_steps = max(settings.num_training_steps - settings.num_warmup_steps, 1)
    progress = min((step - settings.num_warmup_steps) / decay_steps, 1.0)
    left = 1.0 - progress if settings.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * left


def build_optimizer(
    parameters: Iterable[Tensor], settings: OptimizerSettings
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Fused AdamW over the parameters that train, and its schedule."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trainable, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_ratio(step, settings))
    return optimizer, schedule


@contextlib.contextmanager
def keep_settings(optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler) -> Iterator[None]:
    """Keep learning rate, betas and weight decay while the block loads a saved state; the schedule goes on from there.

    A saved state contains the settings of its run, which would silently replace those of the present config.
    """
    assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
    names = ("initial_lr", "betas", "weight_decay")
    built, peaks = [{name: group[name] for name in names} for group in optimizer.param_groups], list(schedule.base_lrs)
    yield
    schedule.base_lrs = peaks
    rates = [peak * ratio(schedule.last_epoch) for peak, ratio in zip(peaks, schedule.lr_lambdas, strict=True)]
    for group, settings, rate in zip(optimizer.param_groups, built, rates, strict=True):
        group.update(settings, lr=rate)
    schedule._last_lr = rates
