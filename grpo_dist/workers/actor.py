"""The actor: the policy, which trains and sends its weights to the rollout engines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_dist.engines.rendezvous import LOOPBACK, open_store
from grpo_dist.engines.settings import SENDER, GroupAddress
from grpo_dist.engines.weights.broadcast import WeightGroup, send
from grpo_dist.engines.weights.buckets import Sent, pack
from grpo_dist.protocol import DataProto
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.workers.gang import ReferenceGroup, TrainedGroup, TrainedWorker, on_device


class ActorWorker(TrainedWorker):
    """One rank of the policy."""

    _weight_store: dist.TCPStore | None = None
    _weight_group: WeightGroup | None = None

    @functools.cached_property
    def _last_sent(self) -> Sent:
        return Sent()

    @on_device(reads=True)
    def compute_reference(self, rows: DataProtoRef) -> tuple[Label, DataProto]:
        """Compute `settings.reference_columns` with LoRA: by the model without its factors."""
        return self._columns(rows, self.settings.reference_columns, self.engine.compute_reference_columns)

    @on_device(reads=True)
    def compute_in_type(self, rows: DataProtoRef, dtype: str) -> tuple[Label, DataProto]:
        """Compute log-probs by passes in another type, as a sampler of that type has them: `rollout_log_probs`."""
        from grpo_dist.engines.train.watching import log_probs_in

        compute = functools.partial(log_probs_in, self.engine, dtype=getattr(torch, dtype))
        return self._columns(rows, ("rollout_log_probs",), lambda data, names, _: {names[0]: compute(data)})

    def load_reference_head(self, head: Sequence[ray.ObjectRef]) -> None:
        """Take the reference's present output layer for the exact KL."""
        self.engine.reference_head = ray.get(head[0]).to(self.settings.device)

    @on_device(weights=False)
    def export_weights(self, dtype: str) -> list[ray.ObjectRef]:
        """Put what rollout engines get into the object store, bucket by bucket; rank 0 returns them."""
        return self._put(self._sent(dtype, "cpu", sends=self.rank == 0))

    @on_device(weights=False)
    def export_changes(self, dtype: str, whole: bool) -> tuple[list[ray.ObjectRef], float]:
        """The same of what has changed since the last call, unless `whole`; and its bytes by those of all weights."""
        changes = functools.partial(self._last_sent.changes, whole=whole)
        return self._put(self._sent(dtype, "cpu", sends=self.rank == 0), changes), self._last_sent.share

    @on_device(weights=False)
    def export_parameters(self) -> list[ray.ObjectRef]:
        """Put the whole weights into the object store for a reference, in float32 under the names of the model."""
        return self._put(self.engine.full_parameters("float32"))

    def _sent(self, dtype: str, device: str, *, sends: bool) -> Iterator[tuple[str, Tensor]]:
        """What rollout engines get: the weights under the names of the model's files, or LoRA's factors; collective."""
        if self.settings.model.sends_factors:
            return self.engine.lora_factors(dtype, device)
        return self.engine.full_parameters(dtype, device, as_in_files=sends)

    def _put(self, tensors: Iterable[tuple[str, Tensor]], sent: Callable[..., Iterator[Any]] = iter) -> list[Any]:
        if self.rank != 0:
            _use_up(tensors)
            return []
        return [ray.put(part) for part in sent(pack(tensors, bucket_bytes=self.settings.weight_bucket_bytes))]

    def open_weight_store(self, others: Sequence[str]) -> tuple[str, int]:
        """Rank 0: open the store at which weight groups meet, unless it is open; returns its host and port.

        It is on loopback if `others`, the addresses of the receivers' nodes, are all this node's.
        """
        own = self.address().ip
        host = LOOPBACK if set(others) == {own} else own
        if self._weight_store is None or self._weight_store.host != host:
            self._weight_store = open_store(host)
        return host, self._weight_store.port

    def join_weight_group(self, address: GroupAddress) -> None:
        """A sender: join the weight group to which it will send, and leave the one before."""
        if self._weight_group is not None:
            self._weight_group.close()
        store = self._weight_store if self.rank == SENDER else None
        self._weight_group = WeightGroup(address, self.rank, torch.device(self.settings.device), store)

    @on_device(weights=False)
    def broadcast_weights(self, dtype: str, version: int) -> None:
        """Send what rollout engines get to the weight group, bucket by bucket."""
        group = self._weight_group
        tensors = self._sent(dtype, self.settings.device, sends=group is not None and group.sends)
        if group is None or not group.sends:
            _use_up(tensors)
        else:
            send(group, tensors, version=version, bucket_bytes=self.settings.weight_bucket_bytes)


def _use_up(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Take part in gathering tensors, which is collective, and drop them."""
    for _ in tensors:
        pass


class ActorGroup(TrainedGroup):
    """The policy."""

    update_stage = "update"

    async def take_reference_head(self, ref: ReferenceGroup) -> None:
        """Copy the reference's current output layer to the actor, for the exact KL (`kl_loss_type=full`)."""
        head = (await ref.workers.ask_all("sync_reference", "export_output_layer"))[0]
        await self.workers.ask_all("sync_reference", "load_reference_head", head)
