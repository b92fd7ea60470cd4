"""Workers that hold a model: the actor and the critic train it; the reference keeps the weights of its start."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile

from grpo_dist.algorithms.settings import TrainingSettings
from grpo_dist.assets.model_folder import Usage
from grpo_dist.config.schema_roles import AdamWConfig
from grpo_dist.engines.base import FSDP, SEQUENCE_COLUMNS
from grpo_dist.engines.rendezvous import LOOPBACK, START_TIMEOUT, init_process_group, open_store
from grpo_dist.engines.settings import SENDER, GroupAddress, ModelSettings, PassLimits
from grpo_dist.engines.train.memory_errors import remedied, smaller_passes, within_memory
from grpo_dist.engines.weights.broadcast import WeightGroup, send
from grpo_dist.engines.weights.buckets import check_buckets, pack, unpack
from grpo_dist.engines.weights.differences import Sent
from grpo_dist.errors import EngineError, TrainingDiverged
from grpo_dist.plugins.registry import load_attribute
from grpo_dist.protocol import DataProto, Metric, Ragged
from grpo_dist.protocol.branches import with_branches
from grpo_dist.protocol.fields import TEACHER
from grpo_dist.protocol.routes import with_routes
from grpo_dist.protocol.teacher_prompts import TEACHER_PROMPTS, as_teacher_reads
from grpo_dist.rewards.output_lines import printing_to
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.runtime.freed_memory import FreedMemory
from grpo_dist.runtime.process import Process

if TYPE_CHECKING:
    from grpo_dist.engines.train.durable_files import FileDigest
    from grpo_dist.engines.train.fsdp_engine import FSDPEngine


@dataclass(frozen=True)
class PolicySettings:
    """What a policy worker is built from.

    Attributes:
        model: what to load; the worker resolves a `builtin:` path on its own node.
        device: "cpu" or "cuda".
        num_threads: compute threads on CPU.
        columns: what a log-prob pass computes: a name of `FSDPEngine.compute_columns`, with `old_` or `ref_` before it
            where it is one of log-probs.
        update: the limits of a forward and backward pass; None: nothing trains.
        seed: of torch's random state.
        collective_timeout_s: how long a rank waits for the others in one operation.
        optimizer: the config's section; None for the reference.
        total_steps: optimizer steps of the whole run.
        keeps_output_layer: whether the loss takes the KL over the vocabulary to the model's own start, of whose output
            layer a copy is kept.
        teachers: those after the first one, which is `model`, where rows have teachers by their data source.
        reference_columns: of the actor with LoRA: what a pass without its factors computes.
        weight_bucket_bytes: size of the pieces in which weights travel, so that no process holds a second whole model.
        engine: the class of the train engine, as `pkg.module:Class`.
    """

    model: ModelSettings
    device: str
    num_threads: int
    temperature: float
    columns: tuple[str, ...]
    forward: PassLimits
    seed: int
    collective_timeout_s: float
    update: PassLimits | None = None
    optimizer: AdamWConfig | None = None
    total_steps: int = 1
    grad_clip: float = float("inf")
    keeps_output_layer: bool = False
    teachers: tuple[ModelSettings, ...] = ()
    reference_columns: tuple[str, ...] = ()
    weight_bucket_bytes: int = 256 << 20
    engine: str = FSDP

    def make_engine(self, model: ModelSettings) -> Any:
        """Load the model into a train engine, in a process that has joined the process group."""
        return load_attribute(self.engine, key="PolicySettings.engine")(
            model,
            device=self.device,
            temperature=self.temperature,
            optimizer=self.optimizer,
            total_steps=self.total_steps,
            grad_clip=self.grad_clip,
        )


@contextlib.contextmanager
def passes(limits: PassLimits, where: str, ranks: int = 1) -> Iterator[None]:
    """Name what is smaller in passes of these limits if memory is short; `where` begins the message of a divergence."""
    try:
        with smaller_passes(limits, ranks=ranks):
            yield
    except TrainingDiverged as error:
        raise TrainingDiverged(f"{where}{error}") from None


def on_device(*, optimizer: bool = False, reads: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a method that needs the weights, and with `optimizer` the optimizer's states, on the device.

    One that only `reads` the weights says so: then none are copied back to CPU memory where they are offloaded.

    If the device's memory is not enough, the error names a setting that takes less of it.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(self: PolicyWorker, *args: Any) -> Any:
            with (
                remedied(self.settings.model.room),
                within_memory(method.__name__),
                self.engine.on_device(optimizer=optimizer, reads=reads),
                torch.profiler.record_function(method.__name__),
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
    freed_memory: FreedMemory | None = None
    _profile: TorchProfile | None = None

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        import transformers.modeling_utils  # noqa: F401 - slow: now, while the driver still reads the prompts

    def open_store(self, host: str) -> int:
        """Rank 0: open the store at which the ranks meet, at an address of this machine; returns its port."""
        self._store = open_store(host)
        return self._store.port

    def start(self, settings: PolicySettings, host: str, port: int) -> None:
        """Join the role's process group, at rank 0's store, and load the model."""
        self.check_build(settings.device)
        self.settings = settings
        torch.set_num_threads(settings.num_threads)  # by default every process would use all cores
        if settings.device == "cpu":
            self.freed_memory = FreedMemory()
        torch.manual_seed(settings.seed)
        store = self._store if self.rank == 0 else dist.TCPStore(host, port, timeout=START_TIMEOUT)
        init_process_group(
            device=settings.device,
            rank=self.rank,
            world_size=self.world_size,
            store=store,
            timeout_s=settings.collective_timeout_s,
        )
        models = [replace(m, path=self.find_model(m.path, m.key)) for m in (settings.model, *settings.teachers)]
        with remedied(settings.model.room), within_memory("the weights of the model"):
            self.teachers = [settings.make_engine(model) for model in models]
        self.engine = self.teachers[0]
        with self.engine.on_device():  # after the block weights that are offloaded wait on CPU
            if settings.keeps_output_layer:
                # before the first step, and before a checkpoint is read, the policy is the reference
                self.engine.reference_head = self.engine.output_layer(settings.device)

    @on_device(reads=True)
    def compute_log_probs(self, rows: DataProtoRef) -> tuple[Label, DataProto]:
        """The columns `settings.columns` of this rank's rows: `old_log_probs`, `ref_hidden_states`, ..."""
        one, several = self.engine.compute_columns, self.settings.teachers
        compute = functools.partial(self._by_teacher, rows.small[TEACHER]) if several else one
        columns = self._columns(rows, self.settings.columns, compute)
        if self.freed_memory is not None and self.settings.optimizer is None:  # else updates decide
            self.freed_memory.after_pass()
        return columns

    def _by_teacher(self, of: np.ndarray, data: DataProto, names: Sequence[str], **sizes: Any) -> dict[str, Ragged]:
        """The columns of each row by its own teacher: all ranks ask one teacher after the other."""
        rows = [np.flatnonzero(of == number) for number in range(len(self.teachers))]
        parts = []
        for engine, own in zip(self.teachers, rows, strict=True):
            with engine.on_device(reads=True):
                parts.append(engine.compute_columns(data.index(own), names, **sizes))
        order = np.argsort(np.concatenate(rows))
        return {name: Ragged.concat([part[name] for part in parts])[order] for name in names}

    def _columns(
        self, rows: DataProtoRef, names: tuple[str, ...], compute: Callable[..., Mapping[str, Ragged]]
    ) -> tuple[Label, DataProto]:
        plain = {name.removeprefix("old_").removeprefix("ref_"): name for name in names}
        limits, ranks = self.settings.forward, self.settings.model.sequence_parallel_size
        with passes(limits, f"{', '.join(names)}, ", ranks):
            sequences = self._sequences(rows, {TEACHER_PROMPTS}.intersection(rows.columns))
            computed = compute(as_teacher_reads(rows.fetch(sequences)), tuple(plain), **limits.sizes)
        if self.rank % ranks:  # the first rank of the group returns the same
            computed = {}
        return _labelled({plain[name]: values for name, values in computed.items()})

    def _sequences(self, rows: DataProtoRef, more: Iterable[str] = ()) -> tuple[str, ...]:
        """Name the columns of a pass: the sequences, and `more`."""
        wanted = with_routes if self.settings.model.replays_routes else with_branches
        return wanted((*SEQUENCE_COLUMNS, *more, "uid"), rows.columns)

    def forward_report(self) -> str:
        """One sentence on how sequences are laid out, and why; "" before the first pass."""
        return self.engine.report

    @on_device()
    def load_weights(self, buckets: Sequence[ray.ObjectRef], share: float) -> None:
        """Move this role's weights towards those in the buckets: w = share * theirs + (1 - share) * w."""
        arrived = ray.get(list(buckets))
        check_buckets(arrived)
        for bucket in arrived:
            self.engine.mix_parameters(unpack(bucket.data, bucket.entries), share)

    @on_device(reads=True)
    def export_output_layer(self) -> list[ray.ObjectRef]:
        """Put the output layer into the object store, for actors that take the exact KL; rank 0 returns it."""
        head = self.engine.output_layer("cpu")
        return [ray.put(head)] if self.rank == 0 else []

    def start_profile(self) -> None:
        """Begin to record this process's operators and kernels."""
        self._profile = TorchProfile()

    def stop_profile(self, path: str) -> None:
        """Write what was recorded since `start_profile`, as a gzip'ed trace."""
        profile, self._profile = self._profile, None
        assert profile is not None, "start_profile comes before"
        profile.write(Path(path))

    def checkpoint_bytes(self) -> int:
        """Bytes of all tensors that the ranks together write into a checkpoint."""
        return self.engine.checkpoint_bytes()

    @on_device(optimizer=True, reads=True)
    def begin_save(self, folder: str) -> None:
        """Copy this rank's shard of the state to CPU memory, and begin to write it into `folder`."""
        self.engine.begin_save(Path(folder))

    def finished_save(self, wait: bool) -> dict[str, FileDigest] | None:
        """The files that this rank has written since `begin_save`; None while it writes, unless `wait`.

        Raises:
            CheckpointError: they cannot be written.
        """
        return self.engine.finished_save(wait=wait)

    @on_device(optimizer=True)
    def load_checkpoint(self, folder: str) -> None:
        """Read the state from `folder`; the number of ranks may differ."""
        self.engine.load_checkpoint(Path(folder))

    @on_device(reads=True)
    def export_hf_model(self, folder: str, dtype: str, usage: Usage) -> None:
        """Write the model in `dtype` and its tokenizer as a Hugging Face folder (rank 0 writes)."""
        self.engine.export_hf_model(Path(folder), dtype, usage)


def _labelled(columns: Mapping[str, Ragged]) -> tuple[Label, DataProto]:
    data = DataProto.from_dict(columns)
    return Label.of(data, ()), data


class TrainedWorker(PolicyWorker):
    """One rank of a model that trains on responses: the base of the actor and the critic."""

    role: ClassVar[str]

    @on_device()
    def update(
        self, rows: DataProtoRef, mini_batches: Sequence[np.ndarray], objective: TrainingSettings, step: int
    ) -> tuple[tuple[list[dict[str, Metric]], Label | None], DataProto | None]:
        """Take one optimizer step per mini-batch.

        Args:
            rows: this rank's rows of the whole batch.
            mini_batches: for each mini-batch, the positions in `rows` that belong to it.
            step: for messages.

        Returns:
            ((this rank's metrics, one dict per mini-batch; label), on policy the rows' `old_log_probs`, else None).
        """
        limits, ranks = self.settings.update, self.settings.model.sequence_parallel_size
        assert limits is not None, "it trains"
        data = rows.fetch(self._sequences(rows, objective.columns))
        results = []
        for number, mini_batch in enumerate(mini_batches):
            where = f"step {step}, {self.role}, mini-batch {number + 1} of {len(mini_batches)}: "
            with passes(limits, where, ranks), printing_to(self.printed):
                rows_of = data.index(mini_batch)
                results.append(self.engine.train_mini_batch(rows_of, objective=objective, **limits.sizes))
        if self.freed_memory is not None:
            self.freed_memory.after_pass()
        metrics, log_probs = [result.metrics for result in results], results[0].log_probs
        if log_probs is None:
            return (metrics, None), None
        label, old = _labelled({"old_log_probs": log_probs})  # on policy: one mini-batch
        return (metrics, label), old


class CriticWorker(TrainedWorker):
    """One rank of the critic, whose passes compute `values`."""

    role = "critic"


class ActorWorker(TrainedWorker):
    """One rank of the policy."""

    role = "actor"
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
        return self._columns(rows, ("rollout_log_probs",), lambda data, names, **_: {names[0]: compute(data)})

    def load_reference_head(self, head: Sequence[ray.ObjectRef]) -> None:
        """Take the reference's present output layer for the exact KL."""
        self.engine.reference_head = ray.get(head[0]).to(self.settings.device)

    @on_device(reads=True)
    def export_weights(self, dtype: str) -> list[ray.ObjectRef]:
        """Put what rollout engines get into the object store, bucket by bucket; rank 0 returns them."""
        return self._put(self._sent(dtype, "cpu", sends=self.rank == 0))

    @on_device(reads=True)
    def export_changes(self, dtype: str, whole: bool) -> tuple[list[ray.ObjectRef], float]:
        """The same of what has changed since the last call, unless `whole`; and its bytes by those of all weights."""
        changes = functools.partial(self._last_sent.changes, whole=whole)
        return self._put(self._sent(dtype, "cpu", sends=self.rank == 0), changes), self._last_sent.share

    @on_device(reads=True)
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

    @on_device(reads=True)
    def broadcast_weights(self, dtype: str, version: int) -> None:
        """Send what rollout engines get to the weight group, bucket by bucket."""
        group = self._weight_group
        if group is None or not group.sends:
            _use_up(self._sent(dtype, self.settings.device, sends=False))
        else:
            tensors = self._sent(dtype, self.settings.device, sends=True)
            send(group, tensors, version=version, bucket_bytes=self.settings.weight_bucket_bytes)


def _use_up(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Take part in gathering tensors, which is collective, and drop them."""
    for _ in tensors:
        pass


# Calls of modules that are recorded, some 20 forward passes of a model of 30 layers. With their operators and those of
# the backward passes they take 1 to 2 GiB when torch makes a trace of them: 7.5 kB for each operator.
MOST_MODULE_CALLS = 10_000


class TorchProfile:
    """A torch profile of this process: its operators, and the kernels of its GPU.

    It records the thread that makes it, and its backward passes: until it is written, or has seen so many modules.
    """

    def __init__(self) -> None:
        self._thread, self._module_calls, self._records = threading.get_ident(), 0, True
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *gpu])
        self._profile.start()
        self._hook = register_module_forward_pre_hook(self._count)

    def _count(self, module: torch.nn.Module, inputs: Any) -> None:
        if threading.get_ident() == self._thread:  # only this one can stop it
            self._module_calls += 1
            if self._module_calls > MOST_MODULE_CALLS:
                self._stop()

    def _stop(self) -> None:
        if self._records:
            self._records = False
            self._hook.remove()
            self._profile.stop()

    def write(self, path: Path) -> None:
        """Stop, and write the trace as gzip'ed JSON in Chrome's format, whole or not at all.

        Raises:
            EngineError: it cannot be written.
        """
        temporary = path.with_name(f".{path.name}")
        try:
            self._stop()
            self._profile.export_chrome_trace(str(temporary))  # compressed, since the name ends in .gz
            temporary.replace(path)
        except (OSError, RuntimeError) as error:
            raise EngineError(f"the trace {path} cannot be written: {error}") from None
