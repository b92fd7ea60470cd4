"""The weights of a sharded model: how they go out, come in, and are saved. Every method is collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo_dist.assets.adapter_folder import ADAPTER_FOLDER
from grpo_dist.assets.model_folder import Usage
from grpo_dist.engines.settings import ModelSettings
from grpo_dist.engines.train.checkpoint import ShardWriter, load_training_state, num_bytes, training_state
from grpo_dist.engines.train.durable_files import FileDigest
from grpo_dist.engines.train.hf_export import export_adapter, export_hf_model
from grpo_dist.engines.train.hf_names import as_in_files as named_as_in_files
from grpo_dist.engines.train.lm_head import ReferenceHead, copy_output_layer
from grpo_dist.engines.train.lora import full_factors, full_parameters
from grpo_dist.engines.train.model_loading import DTYPES
from grpo_dist.engines.train.optimizer import Offload
from grpo_dist.engines.train.sharded_tensors import free_gathered


class FSDPWeights:
    """Base of `FSDPEngine`: what it does with its weights besides forward and backward passes.

    Attributes:
        optimizer: None for a frozen model; likewise `schedule`.
        offload: moves the tensors between device and CPU.
    """

    settings: ModelSettings
    device: torch.device
    model: Any
    optimizer: Any = None
    schedule: Any = None
    offload: Offload
    _writer: ShardWriter | None = None

    def on_device(self, *, optimizer: bool = False, reads: bool = False) -> AbstractContextManager[None]:
        """See `Offload.on_device`."""
        return self.offload.on_device(optimizer=optimizer, reads=reads)

    def full_parameters(
        self, dtype: str, device: str = "cpu", *, as_in_files: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """The whole weights on `device`, tensor by tensor, with LoRA's factors merged; dtype is torch's name.

        With `as_in_files` they have the names and the form of the model's files, as rollout engines load them, not
        those of the model. Ranks that drop the tensors leave it out, since it holds some of them for a while.
        """
        head = DTYPES[self.settings.head_dtype] if self.settings.head_dtype else None
        tensors = full_parameters(self.model, getattr(torch, dtype), device, head_dtype=head)
        return named_as_in_files(self.model, tensors, device) if as_in_files else tensors

    def lora_factors(self, dtype: str, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
        """Yield LoRA's whole factors one by one, under the names of adapters in peft's form."""
        return full_factors(self.model, getattr(torch, dtype), device)

    @torch.no_grad()
    def mix_parameters(self, tensors: Iterable[tuple[str, Tensor]], share: float) -> None:
        """Move the weights towards those of another `full_parameters`: w = share * other + (1 - share) * w."""
        free_gathered(self.model)
        own = dict(self.model.named_parameters())
        for name, tensor in tensors:
            parameter = own[name]
            other = tensor.to(self.device, parameter.dtype)
            if isinstance(parameter, DTensor):
                other = distribute_tensor(other, parameter.device_mesh, parameter.placements)
            parameter.mul_(1 - share).add_(other, alpha=share)

    def output_layer(self, device: str) -> ReferenceHead:
        """A copy of the output layer in the type that it is multiplied in, for another engine's `reference_head`."""
        return copy_output_layer(self.model, device, DTYPES[self.settings.head_dtype or self.settings.compute_dtype])

    def checkpoint_bytes(self) -> int:
        """Bytes of all tensors that the ranks together write into a checkpoint. Not collective."""
        return num_bytes(self.model, self.optimizer)

    def begin_save(self, folder: Path) -> None:
        """Copy the weights and, if it trains, optimizer, schedule and random states, and begin to write them.

        Raises:
            CheckpointError: the checkpoint before is still being written.
        """
        self._writer = self._writer or ShardWriter()
        self._writer.begin_save(training_state(self.model, self.optimizer, self.schedule), folder)

    def finished_save(self, *, wait: bool) -> dict[str, FileDigest] | None:
        """See `ShardWriter.finished`."""
        assert self._writer is not None, "begin_save comes first"
        return self._writer.finished(wait=wait)

    def load_checkpoint(self, folder: Path) -> None:
        """Read what `begin_save` wrote; see `load_training_state`."""
        load_training_state(folder, self.model, self.optimizer, self.schedule)

    def export_hf_model(self, folder: Path, dtype: str, usage: Usage | None = None) -> None:
        """See `export_hf_model`; LoRA's factors come beside it, and first: once the model is there, all is written."""
        if self.settings.lora is not None:
            export_adapter(self.model, self.settings, folder.with_name(ADAPTER_FOLDER), dtype, usage)
        export_hf_model(self.model, self.settings, folder, dtype, usage)
