"""Workers that hold the model: the actor trains it, the reference keeps its first weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from grpo_dist.engines.settings import SENDER, GroupAddress, ModelSettings, ObjectiveSettings, OptimizerSettings
from grpo_dist.errors import TrainingDiverged
from grpo_dist.protocol import DataProto, Metric, Ragged
from grpo_dist.workers.batch_ref import DataProtoRef, Label
from grpo_dist.workers.process import Process, keep_freed_memory, use_threads

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_dist.engines.train.checkpoint import ShardWriter
    from grpo_dist.engines.train.durable_files import FileDigest
    from grpo_dist.engines.train.fsdp_engine import FSDPEngine
    from grpo_dist.engines.weights.broadcast import WeightGroup


@dataclass(frozen=True)
class PolicySettings:
    """What a policy worker is built from.

    Attributes:
        model: what to load; a `builtin:` path is resolved on the worker's own node.
        device: "cpu" or "cuda".
        num_threads: compute threads on CPU.
        temperature: the sampling temperature.
        columns: what a log-prob pass computes: `old_` or `ref_` and a name of `FSDPEngine.compute_columns`.
        log_prob_micro_batch_size: sequences per forward pass.
        log_prob_max_token_len: tokens per forward pass; None: sequences count.
        seed: of torch's random state.
        collective_timeout_s: how long a rank waits for the others in one operation.
        optimizer: None for the reference.
        train_micro_batch_size: sequences per forward/backward pass.
        train_max_token_len: tokens per forward/backward pass; None: sequences count.
        grad_clip: largest gradient norm.
        exact_kl: the loss takes the KL over the vocabulary, and needs the reference's output layer.
        reference_columns: of the actor with LoRA: what a pass without its factors computes.
        weight_bucket_bytes: weights travel in pieces of this size, so that no process needs room for a second whole
            model at once.
    """

    model: ModelSettings
    device: str
    num_threads: int
    temperature: float
    columns: tuple[str, ...]
    log_prob_micro_batch_size: int
    seed: int
    collective_timeout_s: float
    log_prob_max_token_len: int | None = None
    optimizer: OptimizerSettings | None = None
    train_micro_batch_size: int = 0
    train_max_token_len: int | None = None
    grad_clip: float = float("inf")
    exact_kl: bool = False
    reference_columns: tuple[str, ...] = ()
    weight_bucket_bytes: int = 256 << 20


def on_device(*, optimizer: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """While a method runs, the weights, and with `optimizer` its states, are on the device (engines/train/offload.py).

    If its memory is not enough for something whose size no other key sets, the error says what takes less of it.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(self: PolicyWorker, *args: Any) -> Any:
            from grpo_dist.engines.train.memory_errors import remedied, within_memory

            with (
                remedied(self.room()),
                within_memory(method.__name__),
                self.engine.offload.on_device(optimizer=optimizer),
            ):
                return method(self, *args)

        return run

    return decorate


class PolicyWorker(Process):
    """One rank of a sharded model that computes log-probs: the reference, and the base of the actor.

    Every method is collective over the ranks of the role.
    """

    settings: PolicySettings
    engine: FSDPEngine
    log_prob_section = "actor_rollout_ref.ref"
    _shard_writer: ShardWriter | None = None

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        import_engine()

    def room(self) -> str:
        """What makes room on the GPU."""
        from grpo_dist.engines.train.memory_errors import ACTOR_ROOM, REF_ROOM

        return REF_ROOM if self.settings.optimizer is None else ACTOR_ROOM

    def open_store(self, host: str) -> int:
        """Rank 0: open the store at which the ranks meet, at an address of this machine; returns its port."""
        from grpo_dist.engines.rendezvous import open_store

        self._store = open_store(host)
        return self._store.port

    def start(self, settings: PolicySettings, host: str, port: int) -> None:
        """Join the role's process group, at rank 0's store, and load the model."""
        import torch
        import torch.distributed as dist

        from grpo_dist.engines.rendezvous import START_TIMEOUT
        from grpo_dist.engines.train.fsdp_engine import FSDPEngine
        from grpo_dist.engines.train.fsdp_model import init_process_group
        from grpo_dist.engines.train.memory_errors import remedied, within_memory

        self.check_build(settings.device)
        self.settings = settings
        use_threads(settings.num_threads)
        if settings.device == "cpu":
            keep_freed_memory()
        torch.manual_seed(settings.seed)
        store = self._store if self.rank == 0 else dist.TCPStore(host, port, timeout=START_TIMEOUT)
        init_process_group(
            device=settings.device,
            rank=self.rank,
            world_size=self.world_size,
            store=store,
            timeout_s=settings.collective_timeout_s,
        )
        model = replace(settings.model, path=self.find_model(settings.model.path))
        with remedied(self.room()), within_memory("the weights of the model"):
            self.engine = FSDPEngine(
                model,
                device=settings.device,
                temperature=settings.temperature,
                optimizer=settings.optimizer,
                grad_clip=settings.grad_clip,
            )
        if settings.exact_kl:
            # before the first step, and before a checkpoint is read, the policy is the reference
            self.engine.reference_head = self.engine.output_layer(settings.device)
        self.engine.offload.away()

    @on_device()
    def compute_log_probs(self, rows: DataProtoRef) -> tuple[Label, DataProto]:
        """The columns `settings.columns` of this rank's rows: `old_log_probs`, `ref_hidden_states`, ..."""
        return self._columns(rows, self.settings.columns, self.engine.compute_columns)

    def _columns(
        self, rows: DataProtoRef, names: tuple[str, ...], compute: Callable[..., dict[str, Ragged]]
    ) -> tuple[Label, DataProto]:
        from grpo_dist.engines.train.fsdp_engine import SEQUENCE_COLUMNS
        from grpo_dist.engines.train.memory_errors import smaller_passes

        plain = {name.partition("_")[2]: name for name in names}  # without old_ or ref_
        size, tokens = self.settings.log_prob_micro_batch_size, self.settings.log_prob_max_token_len
        try:
            with smaller_passes(f"{self.log_prob_section}.log_prob_", size, tokens):
                found = compute(
                    rows.fetch((*SEQUENCE_COLUMNS, "uid")), tuple(plain), micro_batch_size=size, max_token_len=tokens
                )
        except TrainingDiverged as error:
            raise TrainingDiverged(f"{', '.join(names)}, {error}") from None
        return _labelled({plain[name]: values for name, values in found.items()})

    def forward_report(self) -> str:
        """One sentence on how sequences are laid out, and why; "" before the first pass."""
        return self.engine.forward.report

    @on_device()
    def load_weights(self, buckets: Sequence[ray.ObjectRef], share: float) -> None:
        """Move this role's weights towards those in the buckets: `share` of them, the rest of its own."""
        from grpo_dist.engines.weights.buckets import check_buckets, unpack

        found = ray.get(list(buckets))
        check_buckets(found)
        for bucket in found:
            self.engine.mix_parameters(unpack(bucket.data, bucket.entries), share)

    @on_device()
    def export_output_layer(self) -> list[ray.ObjectRef]:
        """Put the output layer into the object store, for actors that take the exact KL; rank 0 returns it."""
        head = self.engine.output_layer("cpu")
        return [ray.put(head)] if self.rank == 0 else []

    @on_device()
    def begin_save(self, folder: str) -> None:
        """Copy this rank's shard of the weights to CPU memory, and begin to write it into `folder`."""
        from grpo_dist.engines.train.checkpoint import weights_state

        self._begin_save(weights_state(self.engine), folder)

    def _begin_save(self, state: dict[str, Any], folder: str) -> None:
        from grpo_dist.engines.train.checkpoint import ShardWriter

        self._shard_writer = self._shard_writer or ShardWriter()
        self._shard_writer.begin_save(state, Path(folder))

    def finished_save(self, wait: bool) -> dict[str, FileDigest] | None:
        """The files that this rank wrote since `begin_save`; None while it writes, unless `wait`.

        Raises:
            CheckpointError: they cannot be written.
        """
        assert self._shard_writer is not None, "begin_save comes first"
        return self._shard_writer.finished(wait=wait)

    @on_device()
    def load_checkpoint(self, folder: str) -> None:
        """Read the weights from `folder`; the number of ranks may differ."""
        from grpo_dist.engines.train.checkpoint import load_parameters

        load_parameters(self.engine, Path(folder))


def _labelled(columns: Mapping[str, Ragged]) -> tuple[Label, DataProto]:
    data = DataProto.from_dict(columns)
    return Label.of(data, ()), data


def import_engine() -> None:
    """The slow imports of a policy worker: its constructor makes them while the driver still reads the prompts."""
    import transformers.modeling_utils  # noqa: F401


class ActorWorker(PolicyWorker):
    """One rank of the policy that trains."""

    log_prob_section = "actor_rollout_ref.rollout"
    _weight_store: Any = None
    _weight_group: WeightGroup | None = None

    @on_device()
    def compute_reference(self, rows: DataProtoRef) -> tuple[Label, DataProto]:
        """With LoRA: `settings.reference_columns`, by the model without its factors."""
        return self._columns(rows, self.settings.reference_columns, self.engine.compute_reference_columns)

    @on_device()
    def update(
        self, rows: DataProtoRef, mini_batches: Sequence[np.ndarray], objective: ObjectiveSettings, step: int
    ) -> tuple[tuple[list[dict[str, Metric]], Label | None], DataProto | None]:
        """One optimizer step per mini-batch.

        Args:
            rows: this rank's rows of the whole batch.
            mini_batches: for each mini-batch, the positions in `rows` that belong to it.
            objective: the loss.
            step: training step, for messages.

        Returns:
            ((metrics of this rank, one dict per mini-batch; label), on policy the rows' `old_log_probs`, else None).
        """
        from grpo_dist.engines.train.fsdp_engine import SEQUENCE_COLUMNS
        from grpo_dist.engines.train.memory_errors import smaller_passes

        data = rows.fetch((*SEQUENCE_COLUMNS, *objective.columns, "uid"))
        results = []
        for number, mini_batch in enumerate(mini_batches):
            size, tokens = self.settings.train_micro_batch_size, self.settings.train_max_token_len
            try:
                with smaller_passes("actor_rollout_ref.actor.ppo_", size, tokens):
                    results.append(
                        self.engine.train_mini_batch(
                            data.index(mini_batch), micro_batch_size=size, max_token_len=tokens, objective=objective
                        )
                    )
            except TrainingDiverged as error:
                where = f"step {step}, actor, mini-batch {number + 1} of {len(mini_batches)}"
                raise TrainingDiverged(f"{where}: {error}") from None
        metrics, log_probs = [result.metrics for result in results], results[0].log_probs
        if log_probs is None:
            return (metrics, None), None
        label, old = _labelled({"old_log_probs": log_probs})  # on policy: one mini-batch
        return (metrics, label), old

    def load_reference_head(self, head: Sequence[ray.ObjectRef]) -> None:
        """Take the reference's present output layer for the exact KL."""
        self.engine.reference_head = ray.get(head[0]).to(self.settings.device)

    @on_device()
    def export_weights(self, dtype: str) -> list[ray.ObjectRef]:
        """Put the whole weights into the object store as the model's files have them, for engines; rank 0 returns them
        bucket by bucket.
        """
        from grpo_dist.engines.train.hf_names import as_in_files

        tensors = self.engine.full_parameters(dtype)
        return self._put(as_in_files(self.engine.model, tensors) if self.rank == 0 else tensors)

    @on_device()
    def export_parameters(self) -> list[ray.ObjectRef]:
        """The same in float32 under the names that they have in the model, for a reference."""
        return self._put(self.engine.full_parameters("float32"))

    def _put(self, tensors: Iterable[tuple[str, Tensor]]) -> list[ray.ObjectRef]:
        from grpo_dist.engines.weights.buckets import pack

        if self.rank != 0:
            for _ in tensors:  # gathering is collective: the other ranks take part and drop the result
                pass
            return []
        return [ray.put(bucket) for bucket in pack(tensors, bucket_bytes=self.settings.weight_bucket_bytes)]

    def open_weight_store(self, others: Sequence[str]) -> tuple[str, int]:
        """Rank 0: open the store at which weight groups meet, if it is not open: on loopback if all are on this node.

        Args:
            others: addresses of the nodes of those who will meet it there.

        Returns:
            (its host, its port).
        """
        from grpo_dist.engines.rendezvous import LOOPBACK, open_store

        own = self.address().ip
        host = LOOPBACK if set(others) == {own} else own
        if self._weight_store is None or self._weight_store.host != host:
            self._weight_store = open_store(host)
        return host, self._weight_store.port

    def join_weight_group(self, address: GroupAddress) -> None:
        """A sender: join the group to which it will send, in place of the one before."""
        import torch

        from grpo_dist.engines.weights.broadcast import WeightGroup

        if self._weight_group is not None:
            self._weight_group.close()
        store = self._weight_store if self.rank == SENDER else None
        self._weight_group = WeightGroup(address, self.rank, torch.device(self.settings.device), store)

    @on_device()
    def broadcast_weights(self, dtype: str, version: int) -> None:
        """Send the whole weights to the group, bucket by bucket."""
        from grpo_dist.engines.train.hf_names import as_in_files
        from grpo_dist.engines.weights.broadcast import send

        device = self.settings.device
        tensors = self.engine.full_parameters(dtype, device)
        if self._weight_group is None or not self._weight_group.sends:
            for _ in tensors:  # as in `_put`
                pass
            return
        sent = as_in_files(self.engine.model, tensors, device)
        send(self._weight_group, sent, version=version, bucket_bytes=self.settings.weight_bucket_bytes)

    @on_device(optimizer=True)
    def begin_save(self, folder: str) -> None:
        """Copy this rank's shard of model, optimizer and schedule to CPU memory, and begin to write it."""
        from grpo_dist.engines.train.checkpoint import engine_state

        self._begin_save(engine_state(self.engine), folder)

    @on_device(optimizer=True)
    def load_checkpoint(self, folder: str) -> None:
        """Read model, optimizer, schedule and, on as many ranks, random states from `folder`."""
        from grpo_dist.engines.train.checkpoint import load_engine

        load_engine(self.engine, Path(folder))

    @on_device()
    def export_hf_model(self, folder: str, dtype: str) -> None:
        """Write the policy in `dtype` and its tokenizer as a Hugging Face folder (rank 0 writes)."""
        from grpo_dist.engines.train.hf_export import export_hf_model

        export_hf_model(self.engine, Path(folder), dtype)
