"""`torch.compile` for shapes that change with every micro-batch: of single kernels, of layers, of the output layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from grpo_dist.engines.train.sharded_tensors import local_shard
from grpo_dist.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


class Compiler:
    """Compiles functions of a model, and runs them compiled while it is on.

    What it compiles is that of the layers between the points where FSDP2 gathers their weights, so the hooks that do
    this stay outside. All layers of a model share one graph for each of training, passes without gradients, and
    recomputation.

    Attributes:
        on: whether the compiled functions run, or else the functions themselves.
    """

    def __init__(self) -> None:
        self.on = True

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Return a function that does as `function`, whose tensors may have other sizes in each call.

        What changes is found out when it changes: told that everything may, the compiler would take the numbers in
        modules that FSDP2 manages, such as the size of a head, for changing ones, and FlexAttention needs to know them.
        """
        compiled = torch.compile(function)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            return (compiled if self.on else function)(*args, **kwargs)

        return run


def compiled_whole(function: Callable[P, T], **options: Any) -> Callable[P, T]:
    """Compile a function as a whole: it stops where it would go on uncompiled.

    Uncompiled, FlexAttention computes all pairs of tokens, masked or not: time and memory would explode unseen.
    """
    compiled = torch.compile(function, dynamic=True, fullgraph=True, **options)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return compiled(*args, **kwargs)
        except FailOnRecompileLimitHit as error:
            raise ConfigError(
                f"actor_rollout_ref.model.use_remove_padding=true: {function.__name__} was compiled "
                f"{torch._dynamo.config.recompile_limit} times for ever new shapes, and would be slow from now on; set "
                "it to false (padded sequences under SDPA), or install flash-attn and set "
                "actor_rollout_ref.actor.use_prefix_grouper=false. TORCH_LOGS=recompiles shows what changed"
            ) from error

    return run


def gradient_norms(model: Any) -> torch.Tensor:
    """Return the norm of the gradient of each parameter that trains, of this rank's shards, float32."""
    norms = [
        torch.linalg.vector_norm(local_shard(gradient).float())
        for gradient in (parameter.grad for parameter in model.parameters() if parameter.requires_grad)
        if gradient is not None
    ]
    return torch.stack(norms) if norms else torch.zeros(0)
