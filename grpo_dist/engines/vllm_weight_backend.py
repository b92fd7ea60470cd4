"""A weight-transfer backend for vLLM that reads buckets from shared memory files of its node.

vLLM imports this module in each of its workers (`worker_extension_cls`) before it makes the transfer engine, and that
import registers the backend under `BACKEND`. The life cycle is vLLM's: start, any number of updates, finish.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from grpo_dist.engines.weight_buckets import Entry, unpack

BACKEND = "shared_memory"


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """One bucket: the file that holds it and the entries in it (as plain lists: they cross a process boundary)."""

    path: str
    num_bytes: int
    entries: list[list[Any]]


class SharedMemoryWeightTransferEngine(WeightTransferEngine):
    """Loads buckets through vLLM's layerwise reload, so fused names and tensor parallel shards are vLLM's business."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Begin a reload of all layers."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Load one bucket. The reload keeps views of it, and so the mapping alive, until `finish_weight_update`."""
        entries = [Entry(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in update_info.entries]
        data = torch.from_file(update_info.path, shared=True, size=update_info.num_bytes, dtype=torch.uint8)
        model: Any = self.model
        model.load_weights((name, tensor.to(self.device, non_blocking=False)) for name, tensor in unpack(data, entries))

    def finish_weight_update(self) -> None:
        """Post-process the layers, as after loading a checkpoint."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_tied_embeddings(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""


def repack_tied_embeddings(model: Any) -> None:
    """Pack the weights of an lm_head that shares its tensor with the embedding again.

    On CPU vLLM packs each linear layer's weight once, and the reload packs a layer anew only when that layer receives
    a weight. A tied lm_head receives none, so it would silently go on generating with its old weights.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    sharing: dict[int, list[Any]] = {}
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            weight: Any = module.weight
            if weight.numel():
                sharing.setdefault(weight.data_ptr(), []).append(module)
    for modules in sharing.values():
        if len(modules) > 1:
            for module in modules:
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class WorkerExtension:
    """Mixed into vLLM's workers: naming this class makes them import the module, which registers the backend."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryWeightTransferEngine)
