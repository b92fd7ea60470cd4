"""Gangs: roles whose ranks hold one sharded model and run every call together. A rank is a worker, all are a group.

If one rank is lost, the others cannot continue. If the model can be loaded again, all ranks are restarted and the call
is repeated (`Gang.restart`). If only a checkpoint has the weights, the whole run starts again from it (training.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile

from grpo_dist.algorithms.settings import TrainingSettings
from grpo_dist.assets.model_folder import Usage
from grpo_dist.engines.rendezvous import LOOPBACK, START_TIMEOUT, init_process_group, open_store
from grpo_dist.engines.settings import PassLimits, RankSettings
from grpo_dist.engines.train.durable_files import FileDigest
from grpo_dist.engines.train.memory_errors import remedied, smaller_passes, within_memory
from grpo_dist.engines.train.micro_batch_plan import Lengths, balance
from grpo_dist.engines.weights.buckets import check_buckets, unpack
from grpo_dist.errors import EngineError, GrpoDistError, TrainingDiverged, WorkerError, WorkerLost
from grpo_dist.protocol import DataProto, Mean, Metric, Ragged, Sum, merge_metrics
from grpo_dist.protocol.fields import FIELDS, TEACHER, columns_for
from grpo_dist.protocol.sequences import as_teacher_reads
from grpo_dist.rewards.scorer import printing_to
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.runtime.call import Call
from grpo_dist.runtime.freed_memory import FreedMemory
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.nodes import RestartBudget
from grpo_dist.runtime.process import Process

if TYPE_CHECKING:
    from grpo_dist.engines.train.fsdp_engine import FSDPEngine

T = TypeVar("T")

# Calls of modules that are recorded, some 20 forward passes of a model of 30 layers. With their operators and those of
# the backward passes they take 1 to 2 GiB when torch makes a trace of them: 7.5 kB for each operator.
MOST_MODULE_CALLS = 10_000


@contextlib.contextmanager
def passes(limits: PassLimits, where: str, ranks: int = 1) -> Iterator[None]:
    """Name what is smaller in passes of these limits if memory is short; `where` begins the message of a divergence."""
    try:
        with smaller_passes(limits, ranks=ranks):
            yield
    except TrainingDiverged as error:
        raise TrainingDiverged(f"{where}{error}") from None


def on_device(**phase: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a method that needs the weights, and with `optimizer` the optimizer's states, on the device.

    One that only `reads` the weights says so: then none are copied back to CPU memory where they are offloaded. One
    that needs no more than a tensor at a time there is without `weights`: what is offloaded stays in CPU memory. If the
    device's memory is not enough, the error names a setting that takes less of it.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(self: PolicyWorker, *args: Any) -> Any:
            with (
                remedied(self.settings.model.room),
                within_memory(method.__name__),
                self.engine.on_device(**phase),
                torch.profiler.record_function(method.__name__),
            ):
                return method(self, *args)

        return run

    return decorate


class TorchProfile:
    """Records the thread that makes it, and its backward passes: until it is written, or has seen so many modules."""

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
        """Stop, and write the trace as gzip'ed JSON in Chrome's format, whole or not at all."""
        temporary = path.with_name(f".{path.name}")
        try:
            self._stop()
            self._profile.export_chrome_trace(str(temporary))  # compressed, since the name ends in .gz
            temporary.replace(path)
        except (OSError, RuntimeError) as error:
            raise EngineError(f"the trace {path} cannot be written: {error}") from None


class PolicyWorker(Process):
    """One rank of a sharded model that computes log-probs: the reference, and the base of the actor.

    Every method is collective over the ranks of the role.
    """

    settings: RankSettings
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

    def start(self, settings: RankSettings, host: str, port: int) -> None:
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
        with self.engine.on_device():  # after the block weights and states that are offloaded wait on CPU
            if settings.model.shares_gpu:
                self.engine.make_states()
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

    def _by_teacher(
        self, of: np.ndarray, data: DataProto, names: Sequence[str], limits: PassLimits
    ) -> dict[str, Ragged]:
        """The columns of each row by its own teacher: all ranks ask one teacher after the other."""
        rows = [np.flatnonzero(of == number) for number in range(len(self.teachers))]
        parts = []
        for engine, own in zip(self.teachers, rows, strict=True):
            with engine.on_device(reads=True):
                parts.append(engine.compute_columns(data.index(own), names, limits))
        order = np.argsort(np.concatenate(rows))
        return {name: Ragged.concat([part[name] for part in parts])[order] for name in names}

    def _columns(
        self, rows: DataProtoRef, names: tuple[str, ...], compute: Callable[..., Mapping[str, Ragged]]
    ) -> tuple[Label, DataProto]:
        outputs = {FIELDS[name].output: name for name in names}
        limits, ranks = self.settings.forward, self.settings.model.sequence_parallel_size
        with passes(limits, f"{', '.join(names)}, ", ranks):
            data = rows.fetch((*self._sequences(rows), *columns_for(rows.columns, "teacher")))
            computed = compute(as_teacher_reads(data), tuple(outputs), limits)
        if self.rank % ranks:  # the first rank of the group returns the same
            computed = {}
        return _labelled({outputs[name]: values for name, values in computed.items()})

    def _sequences(self, rows: DataProtoRef) -> tuple[str, ...]:
        return columns_for(rows.columns, "forward", *(("router",) if self.settings.model.replays_routes else ()))

    def forward_report(self) -> str:
        """One sentence on how sequences are laid out, and why; "" before the first pass."""
        compiler = self.engine.forward.compiler
        return self.engine.forward.report + (f"; {compiler.variants}" if compiler is not None and compiler.on else "")

    @on_device(weights=False)
    def load_weights(self, buckets: Sequence[ray.ObjectRef], share: float) -> None:
        """Move this role's weights towards those in the buckets: w = share * theirs + (1 - share) * w."""
        arrived = ray.get(list(buckets))
        check_buckets(arrived)
        for bucket in arrived:
            self.engine.mix_parameters(unpack(bucket.data, bucket.entries), share)

    @on_device(weights=False)
    def export_output_layer(self) -> list[ray.ObjectRef]:
        """Put the output layer into the object store, for actors that take the exact KL; rank 0 returns it."""
        head = self.engine.output_layer("cpu")
        return [ray.put(head)] if self.rank == 0 else []

    def start_profile(self) -> None:
        """Begin to record this process's operators and kernels."""
        self._profile = TorchProfile()

    def stop_profile(self, path: str) -> None:
        """Write what was recorded since `start_profile`, as a gzip'ed trace."""
        recorded, self._profile = self._profile, None
        assert recorded is not None, "start_profile comes before"
        recorded.write(Path(path))

    def checkpoint_bytes(self) -> int:
        """Bytes of all tensors that the ranks together write into a checkpoint."""
        return self.engine.checkpoint_bytes()

    @on_device(weights=False)
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

    @on_device(weights=False)
    def export_hf_model(self, folder: str, dtype: str, usage: Usage) -> None:
        """Write the model in `dtype` and its tokenizer as a Hugging Face folder (rank 0 writes)."""
        self.engine.export_hf_model(Path(folder), dtype, usage)


def _labelled(columns: Mapping[str, Ragged]) -> tuple[Label, DataProto]:
    data = DataProto.from_dict(columns)
    return Label.of(data), data


class TrainedWorker(PolicyWorker):
    """One rank of a model that trains on responses: the base of the actor and the critic."""

    @on_device()
    def update(
        self, rows: DataProtoRef, mini_batches: Sequence[np.ndarray], objective: TrainingSettings, step: int
    ) -> tuple[tuple[list[dict[str, Metric]], Label | None], DataProto | None]:
        """Take one optimizer step per mini-batch: positions in `rows`, which are this rank's of the whole batch.

        Returns:
            ((this rank's metrics, one dict per mini-batch; label), on policy the rows' `old_log_probs`, else None).
        """
        from grpo_dist.engines.train.objectives import OBJECTIVES

        limits, ranks = self.settings.update, self.settings.model.sequence_parallel_size
        assert limits is not None, "it trains"
        data = rows.fetch((*self._sequences(rows), *objective.columns))
        results = []
        for number, mini_batch in enumerate(mini_batches):
            where = f"step {step}, {OBJECTIVES[type(objective)].role}, mini-batch {number + 1} of {len(mini_batches)}: "
            with passes(limits, where, ranks), printing_to(self.printed):
                rows_of = data.index(mini_batch)
                results.append(self.engine.train_mini_batch(rows_of, objective, limits))
        if self.freed_memory is not None:
            self.freed_memory.after_pass()
        metrics, log_probs = [result.metrics for result in results], results[0].log_probs
        if log_probs is None:
            return (metrics, None), None
        label, old = _labelled({"old_log_probs": log_probs})  # on policy: one mini-batch
        return (metrics, label), old


class Turn:
    """Who has the GPUs that gangs share: `alone` or, for scores that come while engines sample, `beside_engines`.

    A GPU gives two processes slices of time, other ones on every GPU, so that the ranks of one gang would wait in a
    collective for those that are not in their slice.

    Args:
        make_room: has engines on these GPUs sleep, which do so until the next sync; None: none of them sleeps.
    """

    def __init__(self, make_room: Callable[[], Awaitable[None]] | None = None) -> None:
        self.beside_engines, self._make_room = asyncio.Lock(), make_room

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Within the block neither another gang computes nor engines have their memory."""
        async with self.beside_engines:
            if self._make_room is not None:
                await self._make_room()
            yield


class Gang:
    """Ranks that hold one sharded model: the base of models that train and of those that do not.

    Where the weights differ from those of the model folder (`has_moved`) only a checkpoint has them.
    """

    has_moved = True

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers = workers
        self._settings: RankSettings | None = None
        self.turn = Turn()  # one pass at a time: a queued pass would use up its time limit while waiting

    async def start(self, settings: RankSettings) -> None:
        """Form the process group and load the model."""
        self._settings = settings
        addresses = await self.workers.call_home()
        host = LOOPBACK if len({address.ip for address in addresses}) == 1 else addresses[0].ip
        port = await self.workers.ask(0, "start", "open_store", host)
        await self.workers.ask_all("start", "start", settings, host, port)

    async def restart(self, error: GrpoDistError) -> None:
        """Start all ranks again after one was lost.

        Raises:
            GrpoDistError: `error`, if a restart cannot recover the weights.
        """
        raise error

    async def compute_log_probs(
        self,
        stage: str,
        batch: DataProtoRef,
        method: str = "compute_log_probs",
        *arguments: Any,
        needs: Sequence[str] = (),
    ) -> DataProtoRef:
        """Log-probs or other columns of all rows, in the order of the batch; `needs`: read besides the sequences."""
        rows, parts = self._parts(batch, (*columns_for(batch.columns, "forward", "router"), *needs))

        def send() -> list[Call]:
            by_rank = enumerate(self._to_ranks(parts))
            return [self.workers.submit_for_data(rank, stage, method, part, *arguments) for rank, part in by_rank]

        async with self.turn.alone():
            calls, labels = await self._ask(send)
        handles = [call.handle(label) for call, label in self._of_groups(list(zip(calls, labels, strict=True)))]
        return DataProtoRef.concat(handles).reorder(np.argsort(np.concatenate(rows)))

    def _parts(self, batch: DataProtoRef, columns: Sequence[str]) -> tuple[list[np.ndarray], list[DataProtoRef]]:
        rows = _shares(batch, np.arange(len(batch)), len(self.workers) // self._group_size)
        inputs = batch.select(columns)
        return rows, [inputs.reorder(part) for part in rows]

    @property
    def _group_size(self) -> int:
        """Ranks that split sequences, and so work on the same rows: consecutive ones."""
        return 1 if self._settings is None else self._settings.model.sequence_parallel_size

    def _to_ranks(self, parts: Sequence[T]) -> list[T]:
        return [part for part in parts for _ in range(self._group_size)]

    def _of_groups(self, answers: Sequence[T]) -> Sequence[T]:
        """Return the answer of each group's first rank: the others have the same."""
        return answers[:: self._group_size]

    async def _ask(self, send: Callable[[], list[Call]]) -> tuple[list[Call], list[Any]]:
        """Send a call to all ranks, again after each successful restart: (the calls, their answers)."""
        while True:
            calls = send()
            try:
                return calls, await self.workers.answers(calls)
            except WorkerError as error:
                await self.restart(error)

    async def forward_report(self) -> str:
        """One sentence on how the ranks batch sequences (packed or padded), and why."""
        return (await self.workers.ask_all("report", "forward_report"))[0]

    async def checkpoint_bytes(self) -> int:
        """Bytes of all tensors that the ranks together write into a checkpoint."""
        return int(await self.workers.ask(0, "save_checkpoint", "checkpoint_bytes"))

    async def begin_save(self, folder: str) -> None:
        """Start writing a checkpoint into `folder` in the background; returns once the state has been copied."""
        await self.workers.ask_all("save_checkpoint", "begin_save", folder)

    async def finished_save(self, *, wait: bool) -> dict[str, FileDigest] | None:
        """The files of that checkpoint by name; see `PolicyWorker.finished_save`."""
        parts = await self.workers.ask_all("save_checkpoint", "finished_save", wait)
        return None if None in parts else {name: digest for part in parts for name, digest in part.items()}

    async def load_checkpoint(self, folder: str) -> None:
        """Load a checkpoint on all ranks."""
        async with self.turn.alone():
            await self.workers.ask_all("load_checkpoint", "load_checkpoint", folder)

    async def export_hf_model(self, folder: str, dtype: str, usage: Usage) -> None:
        """Write the model into `folder` in Hugging Face format, with weights in `dtype`: "fp32" or "bf16"."""
        async with self.turn.alone():
            await self.workers.ask_all("export_hf_model", "export_hf_model", folder, dtype, usage)


class FrozenGroup(Gang):
    """A model that is as its folder has it, at least at first: the base of the reference and the reward model."""

    has_moved = False

    def __init__(self, workers: WorkerGroup, restarts: RestartBudget | None = None) -> None:
        super().__init__(workers)
        self.restarts = restarts or RestartBudget()

    async def restart(self, error: GrpoDistError) -> None:
        """See `Gang.restart`.

        Raises:
            GrpoDistError: `error`, if no process was lost, the restarts are used up, or the weights have moved, so that
                only a checkpoint has them; another one, if a machine was lost and no other one has room.
        """
        while True:
            if not isinstance(error, WorkerLost) or self.has_moved:
                raise error
            await self.restarts.judge(error, self.workers.node_id(error.rank))
            for rank in range(len(self.workers)):
                self.workers.retire(rank)
            await self.restarts.nodes.wait_for_room(self.workers.role, self.workers.bundles)
            for rank in range(len(self.workers)):
                self.workers.respawn(rank)
            assert self._settings is not None, "it was started before"
            try:
                return await self.start(self._settings)
            except WorkerError as another:
                error = another

    async def load_checkpoint(self, folder: str) -> None:
        """Load a checkpoint on all ranks. From then on only a checkpoint has the weights."""
        self.has_moved = True
        await super().load_checkpoint(folder)


class ReferenceGroup(FrozenGroup):
    """The reference of the KL term: the policy's start, or a teacher; in iterative GRPO its weights move."""

    async def move_towards(self, actor: Gang, share: float) -> None:
        """Move the weights towards the actor's: share * actor + (1 - share) * reference."""
        self.has_moved = True
        async with self.turn.alone():
            buckets = (await actor.workers.ask_all("sync_reference", "export_parameters"))[0]
            await self.workers.ask_all("sync_reference", "load_weights", buckets, share)


class TrainedGroup(Gang):
    """A model that trains on responses: the critic, and the base of the actor."""

    update_stage = "update_critic"  # the name of its time limit

    async def update(
        self, batch: DataProtoRef, mini_batches: Sequence[np.ndarray], objective: TrainingSettings, step: int
    ) -> tuple[DataProtoRef, dict[str, Metric]]:
        """Take one optimizer step per mini-batch (an array of row indices), each split over the groups of ranks.

        Returns:
            (the batch, if on-policy with the `old_log_probs` that the update computed; the metrics, merged over groups
            and averaged over mini-batches).
        """
        groups = len(self.workers) // self._group_size
        shares = [_shares(batch, rows, groups) for rows in mini_batches]
        arguments = []
        for group in range(groups):
            own = np.unique(np.concatenate([share[group] for share in shares]))
            positions = [np.searchsorted(own, share[group]) for share in shares]
            arguments.append((batch.reorder(own), positions, objective, step))
        async with self.turn.alone():
            stage, by_rank = self.update_stage, enumerate(self._to_ranks(arguments))
            calls = [self.workers.submit_for_data(rank, stage, "update", *a) for rank, a in by_rank]
            results = self._of_groups(await self.workers.answers(calls))
        merged = [merge_metrics(parts) for parts in zip(*(metrics for metrics, _ in results), strict=True)]
        labels = [label for _, label in results if label is not None]
        if labels:  # on-policy
            old = DataProtoRef.concat([c.handle(la) for c, la in zip(self._of_groups(calls), labels, strict=True)])
            batch = batch.union(old.reorder(np.argsort(np.concatenate(shares[0]))))
        return batch, averaged(merged)


async def find_model(groups: Sequence[WorkerGroup], path: str, key: str) -> None:
    """Find or download the model once per node, so that the other processes of the node find it on disk.

    Raises:
        GrpoDistError: a node does not have the model and cannot download it; the message names the node.
    """
    first: dict[str, tuple[WorkerGroup, int]] = {}
    for group in groups:
        for rank, address in zip(group.present, await group.call_home(), strict=True):
            first.setdefault(address.node_id, (group, rank))
    await asyncio.gather(*(group.ask(rank, "start", "find_model", path, key) for group, rank in first.values()))


def _shares(batch: DataProtoRef, rows: np.ndarray, num_groups: int) -> list[np.ndarray]:
    columns = (batch[name][rows] for name in ("uid", "prompt_length", "response_length"))
    return [rows[part] for part in balance(Lengths(*columns), num_groups)]


def averaged(mini_batches: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """The metrics of optimizer steps, each merged over ranks: a sum over ranks becomes a mean over steps."""
    means = ({name: Mean(m.value, 1) if isinstance(m, Sum) else m for name, m in row.items()} for row in mini_batches)
    return merge_metrics([*means])
