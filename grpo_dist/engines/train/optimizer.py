"""AdamW and its learning-rate schedule, and what waits in CPU memory while it is not needed.

Weights and optimizer states wait there between the phases of a step (verl's `param_offload`), and within a pass the
inputs of layers (its `enable_activation_offload`).
"""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from grpo_dist.config.field_types import EIGHT_BIT, NEEDS_TORCHAO
from grpo_dist.config.keys import shown
from grpo_dist.config.schema_roles import AdamWConfig, OptimConfig
from grpo_dist.engines.train.sharded_tensors import free_gathered, local_shard
from grpo_dist.errors import ConfigError

# Smaller tensors may share a page with others.
PINNED_BYTES = 1 << 20


def lr_ratio(step: int, optim: AdamWConfig, total_steps: int) -> float:
    """Return the share of the peak learning rate that optimizer step `step` (from 0) of `total_steps` uses."""
    if not isinstance(optim, OptimConfig):
        return 1.0
    warmup_steps = optim.warmup_steps(total_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if optim.lr_scheduler_type == "constant":
        return 1.0
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    left = 1.0 - progress if optim.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * left


def optimizer_class(optim: AdamWConfig, dtype: torch.dtype) -> Callable[..., Optimizer]:
    """Return the class of the optimizer of weights of this type.

    Raises:
        ConfigError: there is no torchao, which 8-bit states and bf16 weights need.
    """
    name = getattr(optim, "optimizer", "AdamW")
    if name != EIGHT_BIT and dtype != torch.bfloat16:
        return torch.optim.AdamW
    try:
        from grpo_dist.engines.train.low_memory_adamw import LowMemoryAdamW
    except ImportError as error:
        raise ConfigError(f"optim.optimizer={name}, weights in {dtype}: {NEEDS_TORCHAO} ({error})") from None
    return LowMemoryAdamW


def check_overrides(optim: AdamWConfig, dtype: torch.dtype, key: str) -> None:
    """Take a step over one weight of this type with `override_optimizer_config`, whose dotted name is `key`.

    Raises:
        ConfigError: the optimizer has no such setting, or refuses the value.
    """
    build, more = optimizer_class(optim, dtype), optim.override_optimizer_config or {}
    # amsgrad keeps a third state, which a checkpoint without it lacks and no estimate of memory counts
    known = inspect.signature(build).parameters.keys() - {"params", "amsgrad", *type(optim).model_fields}
    setting, names = f"{key}={shown(more)}", ", ".join(sorted(known))
    if unknown := [name for name in more if name not in known]:
        raise ConfigError(f"{setting}: {unknown[0]} is no setting of {build.__name__} here; it has {names}")
    weight = nn.Parameter(torch.zeros(1, dtype=dtype))
    weight.grad = torch.zeros_like(weight)
    try:
        optimizer, _schedule = build_optimizer([weight], optim, 1)
        optimizer.step()
    except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{setting}: {build.__name__} refuses it ({error}); set another value, or leave it out"
        ) from error


def build_optimizer(
    parameters: Iterable[Tensor], optim: AdamWConfig, total_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Build AdamW (`optimizer_class`) over what trains of the parameters, and its schedule, of `total_steps`."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    build, more = optimizer_class(optim, trainable[0].dtype), optim.override_optimizer_config or {}
    own: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "weight_decay": optim.weight_decay}
    if build is torch.optim.AdamW:
        optimizer: Optimizer = build(trainable, **own, **{"fused": True, **more})
    else:
        # with all entries of torch's group, so that a checkpoint of one is a checkpoint of the other
        group = {**torch.optim.AdamW(trainable, **own, fused=True).param_groups[0]}
        group |= {name: more[name] for name in group.keys() & more.keys()}
        block = 256 if getattr(optim, "optimizer", "") == EIGHT_BIT else math.inf
        optimizer = build([group], **{"block_size": block, "bf16_stochastic_round": True, **more})
        optimizer.param_groups[0]["lr"] = optim.lr  # torchao made a tensor of it
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_ratio(step, optim, total_steps))
    return optimizer, schedule


@contextlib.contextmanager
def keep_settings(optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler) -> Iterator[None]:
    """Keep all that the optimizer was built with while the block loads a saved state; the schedule goes on from there.

    A saved state contains the settings of its run, which would silently replace those of the present config.
    """
    assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
    [group], peaks = optimizer.param_groups, list(schedule.base_lrs)
    built = {name: value for name, value in group.items() if name not in ("params", "lr")}
    yield
    schedule.base_lrs = peaks
    schedule._last_lr = [peaks[0] * schedule.lr_lambdas[0](schedule.last_epoch)]
    optimizer.param_groups[0].update(built, lr=schedule._last_lr[0])


@dataclass
class Offload:
    """Moves a role's tensors to its device for a phase, and back.

    Attributes:
        device: where phases run. On CPU nothing moves.
        parameters: whether the weights are offloaded; `optimizer_states`: whether these are.
        shares_device: whether other processes need the device's memory between phases: then torch's cache is emptied.
    """

    model: nn.Module
    optimizer: Optimizer | None
    device: torch.device
    parameters: bool = False
    optimizer_states: bool = False
    shares_device: bool = False
    _homes: dict[Any, Tensor] = field(default_factory=dict)  # of what a phase has on the device: its places on CPU

    def away(self, *, reads: bool = False) -> None:
        """Move the offloaded tensors to CPU, and free the device's memory; `reads`: the weights are there still."""
        if self.device.type == "cpu":
            return
        if self.parameters:
            self._send_home(reads=reads)
        if self.optimizer_states:
            move_states(self.optimizer, torch.device("cpu"), self._homes)
        self._homes = {}
        self._free()

    def _free(self) -> None:
        if self.device.type == "cuda" and (self.parameters or self.optimizer_states or self.shares_device):
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def on_device(self, *, weights: bool = True, optimizer: bool = False, reads: bool = False) -> Iterator[None]:
        """Within the block the weights, and with `optimizer` its states, are on the device; `reads`: none go back.

        Without `weights` all stays where it is: the block takes what it reads to the device, tensor by tensor.
        """
        moves = weights and self.device.type != "cpu" and self.parameters
        if moves:
            shards = {name: local_shard(tensor).detach() for name, tensor in self._tensors()}
            self._homes = {name: shard for name, shard in shards.items() if shard.device.type == "cpu"}
        try:
            if moves:
                self.model.to(self.device)
            if self.device.type != "cpu" and self.optimizer_states and optimizer:
                self._homes |= move_states(self.optimizer, self.device)
            yield
        finally:
            self.away(reads=reads) if weights else self._free()

    def _send_home(self, *, reads: bool) -> None:
        """Have the weights be on CPU again; those that were only read are still there."""
        names = {id(tensor): name for name, tensor in self._tensors()}

        def at_home(tensor: Tensor) -> Tensor:
            home = self._homes.get(names.get(id(tensor)))
            if home is None:
                return pinned(tensor.to("cpu"))
            if not reads:
                home.copy_(local_shard(tensor))
            # not by `from_local`, which would send it to the device of the mesh
            return DTensor(home, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else home

        self.model._apply(at_home)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        free_gathered(self.model)  # which would stand in place of the shards
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    @contextlib.contextmanager
    def states_on_device(self) -> Iterator[None]:
        """Within the block, an optimizer step, the states are on the device: never together with activations."""
        if self.device.type == "cpu" or not self.optimizer_states:
            yield
            return
        homes = move_states(self.optimizer, self.device)
        try:
            yield
        finally:
            move_states(self.optimizer, torch.device("cpu"), homes)


def saved_in_cpu_memory(device: str) -> contextlib.AbstractContextManager[Any]:
    """Within the block, what autograd saves on a GPU waits in pinned CPU memory; no copy holds the host up."""
    return save_on_cpu(pin_memory=True) if device == "cuda" else contextlib.nullcontext()


def move_states(
    optimizer: Optimizer | None, device: torch.device, homes: Mapping[Any, Tensor] = MappingProxyType({})
) -> dict[tuple[Tensor, str], Tensor]:
    """Move all tensors of the optimizer's states to `device`; return them as they were, the `homes` of the way back."""
    before = {}
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        for name, value in [(name, value) for name, value in state.items() if isinstance(value, Tensor)]:
            before[parameter, name] = value
            if (home := homes.get((parameter, name))) is not None:
                local_shard(home).copy_(local_shard(value))
            state[name] = pinned(value.to(device)) if home is None else home
    return before


def pinned(tensor: Tensor) -> Tensor:
    """Pin the pages of a tensor on CPU, or of its shard, in place; return the tensor.

    What torch pins itself lies in blocks of a power of two, which takes 1.4 times the memory.
    """
    shard = local_shard(tensor)
    if hasattr(shard, "codes"):  # of 8-bit states, where the rest is small
        pinned(shard.codes)
    if not torch.cuda.is_available() or type(shard) is not Tensor or shard.device.type != "cpu":
        return tensor
    if shard.nbytes >= PINNED_BYTES and not shard.is_pinned():
        runtime, start = torch.cuda.cudart(), shard.data_ptr()
        if int(runtime.cudaHostRegister(start, shard.nbytes, 0)) == 0:
            weakref.finalize(shard.untyped_storage(), runtime.cudaHostUnregister, start).atexit = False
        else:
            warnings.warn("CUDA cannot pin what is offloaded: copies to the GPU and back are slower", stacklevel=2)
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # or the next kernel would be told of that error
    return tensor
