"""vLLM's weight transfer: buckets from shared memory files of the node, or sent by the actor to a group.

vLLM imports this module in each of its workers (`worker_extension_cls`) before it makes the transfer engine, and the
import registers it under the name `BACKEND`. vLLM calls it in this order: start, any number of updates, finish. The
workers of a tensor parallel engine are separate processes: each checks what it reads, loads its part of every tensor,
and reports the outcome in a receipt.

LoRA's factors arrive as weights do, and come into force all at once, without a file; the base model stays as it was
loaded. This relies on the internals of vLLM 0.32, whose own way in is a folder.
"""

from __future__ import annotations

import functools
import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from grpo_dist.assets.model_folder import some
from grpo_dist.engines.settings import GroupAddress
from grpo_dist.engines.vllm.arguments import BACKEND, adapter_request
from grpo_dist.engines.weights.broadcast import Receipt, WeightGroup, receive
from grpo_dist.engines.weights.buckets import Bucket, crc32, damage, read_bucket, unpack
from grpo_dist.errors import WeightSyncError
from grpo_dist.supervisor import end_with_parent

# --- what each operation gives ---------------------------------------------------------------------------------------
# To compare it with the trainer, the outputs have the names of transformers' modules: fused projections are taken
# apart, and the residual stream after a layer is the sum that vLLM takes in the next norm. `rope.q` and `rope.k` are
# what enters the attention.

_LAYER = re.compile(r"layers\.\d+$")


class Watching:
    """The part of `WorkerExtension` that watches the model, while a request is alone in the engine."""

    model_runner: Any
    _seen: defaultdict[str, list[Tensor]]
    _hooks: list[Any]

    def watch(self) -> None:
        """Begin to note outputs."""
        model = self.model_runner.get_model()
        self._seen, packed = defaultdict(list), getattr(model, "packed_modules_mapping", {})
        self._hooks = [
            module.register_forward_hook(functools.partial(self._note, name, packed))
            for name, module in model.named_modules()
        ]

    def watched(self) -> bytes:
        """End that; returns what `torch.save` makes of the outputs by name, (tokens, F) each."""
        for hook in self._hooks:
            hook.remove()
        file = io.BytesIO()
        torch.save({name: torch.cat(parts) for name, parts in self._seen.items()}, file)
        return file.getvalue()

    def attention_kernels(self) -> list[str]:
        """The classes of the model's attention kernels."""
        modules = self.model_runner.get_model().modules()
        return sorted({type(module.impl).__name__ for module in modules if hasattr(module, "impl")})

    def _note(self, name: str, packed: dict[str, list[str]], module: Any, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor):
            return
        if isinstance(output, tuple) and _LAYER.search(name):
            first = output[0] + output[1]
        parent, _, leaf = name.rpartition(".")
        parts, sizes = packed.get(leaf, []), getattr(getattr(module, "base_layer", module), "output_sizes", [])
        outputs = {name: first}
        if leaf == "attn":
            outputs = {f"{parent}.rope.q": inputs[0], f"{parent}.rope.k": inputs[1], f"{parent}.attention": first}
        elif leaf == "logits_processor":
            outputs = {"lm_head": first}
        elif parts and len(parts) == len(sizes) and sum(sizes) == first.shape[-1]:
            names = (f"{parent}.{part}" for part in parts)
            outputs = dict(zip(names, first.split(sizes, -1), strict=True))
        for key, values in outputs.items():
            self._seen[key].append(values.flatten(1).to("cpu", copy=True))


# --- weights ---------------------------------------------------------------------------------------------------------
@dataclass
class InitInfo(WeightTransferInitInfo):
    """The group to join (`GroupAddress`), and the rank of the engine's first worker in it."""

    address: dict[str, Any]
    first_rank: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket, in a file (weights/buckets.py) or, in one process, as it is; or (`version`) a whole sync.

    Attributes:
        file: what `read_bucket` takes. Entries are plain dicts: they cross a process boundary.
        bucket: the bucket, which has been checked.
    """

    file: dict[str, Any] | None = None
    bucket: Bucket | None = None
    version: int | None = None


class Adapter:
    """The factors of one worker of an engine, by their names in adapters in peft's form.

    Those of the sync under way are `arriving`, those in force `present`; {}: all are 0.
    """

    def __init__(self) -> None:
        self.arriving: dict[str, Tensor] = {}
        self.present: dict[str, Tensor] = {}

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keep some factors; their memory is used again."""
        self.arriving |= {name: tensor.to("cpu", copy=True) for name, tensor in tensors}

    def install(self, manager: Any, rank: int, alpha: float, *, complete: bool) -> str:
        """Put the factors that have arrived in force, or, if they are not complete, those before again.

        Args:
            manager: the worker's LRUCacheWorkerLoRAManager. Whatever it holds is replaced.
            alpha: scaling = alpha / rank.

        Returns:
            What vLLM does not take; "" if all is in force.
        """
        present, self.arriving = self.arriving if complete else self.present, {}
        request, slots = adapter_request(), manager._adapter_manager
        manager.remove_all_adapters()
        if not present:
            manager.add_dummy_lora(request, rank)
            return ""
        mapper = getattr(slots.model, "hf_to_vllm_mapper", None)
        model = LoRAModel.from_lora_tensors(
            request.lora_int_id,
            {name: factor.clone() for name, factor in present.items()},  # vLLM scales them in place
            PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[]),  # type: ignore[arg-type]
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        taken = {part for name in slots.modules for part in slots.packed_modules.get(name, [name])}
        if unknown := sorted(model.loras.keys() - taken):  # vLLM would leave them out without a word
            return f"vLLM has no place for the factors of {some(unknown)}"
        slots.add_adapter(model)
        slots.activate_adapter(model.id)
        self.present = present
        return ""


class LayerwiseWeightTransferEngine(WeightTransferEngine):
    """Loads tensors through vLLM's layerwise reload, which also fuses names and cuts tensor parallel shards.

    Errors go into `receipt`, since vLLM would lose their type; after one nothing more is loaded. With an adapter the
    tensors are its factors, which are kept until all have come.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    group: WeightGroup | None = None
    receipt = Receipt()
    adapter: Adapter | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.vllm_config.lora_config is not None:
            self.adapter = Adapter()
        elif self.device.type == "cpu":
            pack_experts_at_each_load(self.model)

    def start_weight_update(self) -> None:
        """Begin a reload of all layers."""
        self.receipt = Receipt()
        if self.adapter is None:
            initialize_layerwise_reload(self.model)

    def load(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Load some tensors. The reload keeps tensors of a layer until the layer is complete."""
        if self.adapter is not None:
            self.adapter.take(tensors)
            return
        model: Any = self.model
        model.load_weights((name, tensor.to(self.device, non_blocking=False)) for name, tensor in tensors)

    def finish_weight_update(self) -> None:
        """Post-process the layers, as after loading a checkpoint; a layer without new tensors keeps its weights."""
        if self.adapter is not None:  # vLLM drops it after this; then `WorkerExtension.install_factors` comes
            return
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_tied_embeddings(self.model)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join a group, and leave the one before."""
        self.shutdown()
        rank = init_info.first_rank + self.parallel_config.rank
        self.receipt = Receipt()
        try:
            self.group = WeightGroup(GroupAddress(**init_info.address), rank, self.device)
        except WeightSyncError as error:
            self.receipt = Receipt(fault=str(error))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Check one bucket, as every process that reads it from a file does, and load it; or receive a whole sync."""
        if update_info.version is not None:
            none = Receipt(fault="the engine is in no weight group")
            group = self.group
            self.receipt = none if group is None else receive(group, version=update_info.version, load=self.load)
            return
        loaded, fault, bucket = self.receipt.loaded, self.receipt.fault, update_info.bucket
        if bucket is None:
            assert update_info.file is not None
            bucket = read_bucket(update_info.file)
            fault = fault or damage(bucket, crc32(bucket))
        self.receipt = Receipt(loaded if fault else loaded + 1, fault)
        if not fault:
            self.load(unpack(bucket.data, bucket.entries))

    def shutdown(self) -> None:
        """Leave the group."""
        if self.group is not None:
            self.group.close()
            self.group = None


def repack_tied_embeddings(model: Any) -> None:
    """Pack the weights of an lm_head that shares its tensor with the embedding again.

    On CPU vLLM packs each linear layer's weight once, and the reload packs a layer anew only when that layer receives
    a weight. A tied lm_head receives none, so it would silently go on generating with its old weights.
    """
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


def pack_experts_at_each_load(model: Any) -> None:
    """Make layers of experts build their kernel again after every load.

    On CPU vLLM pads and packs the weights of experts when it builds the kernel, which it does at the first load only.
    Reloaded weights would stay unpacked, and the kernel would read them as packed.
    """

    def process(method: Any, packs: Callable[[Any], None], layer: Any) -> None:
        method.moe_kernel = None
        packs(layer)

    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            packs = method.process_weights_after_loading
            method.process_weights_after_loading = functools.partial(process, method, packs)


class WorkerExtension(Watching):
    """Mixed into vLLM's workers, which therefore import this module."""

    weight_transfer_engine: LayerwiseWeightTransferEngine

    def weight_receipt(self) -> dict[str, Any]:
        """The fields of this worker's `Receipt` for the last update, or the last group that it joined."""
        return asdict(self.weight_transfer_engine.receipt)

    def install_factors(self, rank: int, alpha: float, complete: bool) -> str:
        """See `Adapter.install`."""
        adapter = self.weight_transfer_engine.adapter
        assert adapter is not None, "vLLM was started for adapters"
        return adapter.install(self.model_runner.lora_manager, rank, alpha, complete=complete)

    def record_routes(self) -> None:
        """See `record_steps`."""
        from grpo_dist.engines.vllm.routed_experts import record_steps  # vLLM's scheduler, which only this needs

        record_steps(self.model_runner)

    def kv_cache_bytes(self) -> int | None:
        """The size that this worker has measured for its KV cache; None if the settings name it."""
        return getattr(self, "available_kv_cache_memory_bytes", None)

    def shared_memory(self) -> list[str]:
        """Names of the segments under /dev/shm that this worker has mapped."""
        return sorted(set(re.findall(r" /dev/shm/(\S+)$", Path("/proc/self/maps").read_text(), re.MULTILINE)))


# A worker that is a process of its own ends when the engine has. vLLM's workers watch a pipe, but not before they have
# started, and in vain while they wait for something else.
end_with_parent()

if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, LayerwiseWeightTransferEngine)
