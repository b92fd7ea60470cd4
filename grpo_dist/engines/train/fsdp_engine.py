"""The train engine on FSDP2: log-probs and optimizer steps of a sharded model. Every method is collective.

Losses are divided by counts of the whole mini-batch, summed over ranks before the first backward pass, so the result
does not depend on micro-batches, layout or the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo_dist.algorithms.settings import TrainingSettings
from grpo_dist.assets.model_folder import ADAPTER_FOLDER, Usage
from grpo_dist.config.schema_roles import AdamWConfig
from grpo_dist.engines.base import MiniBatchResult
from grpo_dist.engines.settings import ModelSettings, PassLimits
from grpo_dist.engines.train import model_loading
from grpo_dist.engines.train.checkpoint import ShardWriter, load_training_state, make_states, num_bytes, training_state
from grpo_dist.engines.train.durable_files import FileDigest
from grpo_dist.engines.train.forward import PolicyForward, ValueForward
from grpo_dist.engines.train.fsdp_model import gradient_sync, load_sharded_model
from grpo_dist.engines.train.hf_export import export_adapter, export_hf_model
from grpo_dist.engines.train.lm_head import ReferenceHead, copy_output_layer
from grpo_dist.engines.train.lora import adapters_off, full_factors, full_parameters
from grpo_dist.engines.train.loss_scale import LossScale
from grpo_dist.engines.train.memory_errors import remedied, within_memory
from grpo_dist.engines.train.micro_batch import MicroBatch, response_tokens
from grpo_dist.engines.train.micro_batch_plan import Lengths, group_rows, plan_micro_batches
from grpo_dist.engines.train.model_loading import DTYPES, VISION
from grpo_dist.engines.train.objectives import OBJECTIVES, Loss, Objective, read_metrics
from grpo_dist.engines.train.optimizer import Offload, build_optimizer
from grpo_dist.engines.train.sharded_tensors import free_gathered, local_shard, whole
from grpo_dist.engines.train.ulysses import SequenceGroup
from grpo_dist.engines.train.vision import VisionTower
from grpo_dist.errors import ConfigError, TrainingDiverged
from grpo_dist.protocol import DataProto, Mean, Metric, Ragged, merge_metrics

NOT_TAKEN = "the optimizer step was not taken"


class FSDPEngine:
    """A causal LM, or a backbone with a linear head, sharded over the default process group: one rank of it.

    It computes log-probs (a linear head: values) and, if it is given an optimizer, trains. All ranks call every method
    together, each with its own rows (a rank may have none).

    Args:
        temperature: the sampling temperature; logits are divided by it before every softmax.
        total_steps: optimizer steps of the whole run, at whose end the schedule ends.

    Attributes:
        reference_head: the reference's output layer, which the exact KL needs; None: the loss has no such KL.
        loss_scale: of passes in float16; None: in other types gradients need none.
    """

    def __init__(
        self,
        model: ModelSettings,
        *,
        device: str,
        temperature: float,
        optimizer: AdamWConfig | None = None,
        total_steps: int = 1,
        grad_clip: float = float("inf"),
    ) -> None:
        self.settings, self.device, self.grad_clip = model, torch.device(device), grad_clip
        self.optimizer: Any = None  # of a frozen model; likewise the schedule
        self.schedule: Any = None
        self._writer: ShardWriter | None = None
        self.loss_scale = LossScale() if DTYPES[model.compute_dtype] == torch.float16 else None
        self.model: Any = load_sharded_model(model, device, frozen=optimizer is None)
        self.reference_head: ReferenceHead | None = None
        if model.sees_images:
            self.model.tower = VisionTower(model, self.model, self.device)
        vision = self.model._modules.pop(VISION, None)  # layouts are those of the language part
        forward = ValueForward if model.num_labels else PolicyForward
        self.forward = forward(
            self.model,
            layout=model.layout,
            temperature=temperature,
            compute_dtype=DTYPES[model.compute_dtype],
            device=self.device,
            sequence_group=SequenceGroup(model.sequence_parallel_size, device),
        )
        if vision is not None:
            setattr(self.model, VISION, vision)
        if optimizer is None:
            self.model.requires_grad_(False)
        else:
            self.optimizer, self.schedule = build_optimizer(self.model.parameters(), optimizer, total_steps)
        self.offload = Offload(
            self.model,
            self.optimizer,
            self.device,
            parameters=model.fsdp_config.param_offload,
            optimizer_states=model.optimizer_offload,
            shares_device=model.shares_gpu,
        )

    # --- log-probs ---------------------------------------------------------------------------------------------
    def compute_log_probs(self, data: DataProto, limits: PassLimits) -> Ragged:
        """Log-probs of the response tokens, in nats, at the sampling temperature; see `compute_columns`."""
        return self.compute_columns(data, ("log_probs",), limits)["log_probs"]

    @torch.no_grad()
    def compute_columns(self, data: DataProto, names: Sequence[str], limits: PassLimits) -> dict[str, Ragged]:
        """Return the columns that a forward pass gives for the response tokens.

        Args:
            data: what a forward pass reads (protocol/fields.py).
            names: of "log_probs" (nats, at the sampling temperature), "entropies" (nats, likewise),
                "gradient_norms" (squared, of the log-prob by the logits: 1 - 2 p + sum p^2) and "hidden_states" (H
                numbers a token: the input of the output layer, in the compute type); of a model with a linear head
                "values" (its output at the token before, of two outputs the second less the first).

        Returns:
            By name, one row per row of `data`; float32 except for hidden states.

        Raises:
            TrainingDiverged: on all ranks, if any rank's log-probs are not finite.
        """
        self._check_forward(data, limits)
        parts: dict[str, list[Tensor]] = {name: [torch.empty(0)] * len(data) for name in names}
        plan = self._plan(data, limits)
        asked: Any = dict.fromkeys({"entropies", "hidden_states", "gradient_norms"}.intersection(names), True)
        for i, rows in enumerate(plan):
            part = data.index(rows)
            micro_batch = self.forward.micro_batch(part, ())
            with within_memory(f"the forward pass of {_describe(micro_batch, i, plan)}"):
                values = self.forward(micro_batch, **asked)._asdict()
            for name in names:
                _take_rows(parts[name], rows, part, micro_batch.to_rows(values[name]))
        computed = parts.get("log_probs", parts.get("values", ()))
        bad = [row for row, numbers in enumerate(computed) if not torch.isfinite(numbers).all()]
        self._stop_if_any(f"{self.forward.computes} of {_name_rows(data.index(bad))} are not finite" if bad else "")
        hidden = DTYPES[self.settings.compute_dtype]
        dtypes = {name: hidden if name == "hidden_states" else torch.float32 for name in names}
        return {name: Ragged.from_rows(parts[name], dtypes[name]) for name in names}

    def compute_reference_columns(self, data: DataProto, names: Sequence[str], limits: PassLimits) -> dict[str, Ragged]:
        """Return `compute_columns` of the model without its LoRA factors."""
        with adapters_off(self.model):
            return self.compute_columns(data, names, limits)

    # --- training ----------------------------------------------------------------------------------------------
    def train_mini_batch(self, data: DataProto, objective: TrainingSettings, limits: PassLimits) -> MiniBatchResult:
        """Take one optimizer step on this rank's rows of a mini-batch; none if no token of it trains on any rank.

        The schedule counts the steps that were taken. In float16 there is none either where the gradient, times the
        loss scale, is not finite: then the scale is halved.

        Args:
            data: what a forward pass and the objective read; for the losses of a reward model `response_mask` may be
                missing, and for pairs, which stay whole, there is `uid`, with both rows of a pair on the same rank.

        Returns:
            The metrics of this rank's rows, to be merged over ranks, and on policy the log-probs before the step.

        Raises:
            TrainingDiverged: on all ranks, before the step, if any rank's loss or the gradient is not finite; in
                float16 the gradient at the smallest loss scale, 1.
        """
        trained, data, counts, plan, losses = self._accumulate(data, objective, limits)
        metrics = self._finite_metrics(losses, data, plan, NOT_TAKEN)
        grad_norm = whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip))
        finite, scale = bool(torch.isfinite(grad_norm)), self.loss_scale
        overflows = not finite and scale is not None and scale.halve()
        self._stop_if_any("" if finite or overflows else f"gradient norm {grad_norm.item()}; {NOT_TAKEN}")
        lr = self.schedule.get_last_lr()[0]
        # without a trained token AdamW would still decay the weights, and move them by its momentum
        trains = finite and trained.trains(counts)
        if trains:
            with remedied(self.settings.room), within_memory("the optimizer step"), self.offload.states_on_device():
                self.optimizer.step()
            self.schedule.step()
            if scale is not None:
                scale.count_step()
        self.optimizer.zero_grad(set_to_none=True)
        step: dict[str, Metric] = {
            f"{trained.role}/grad_norm": Mean(grad_norm.item(), 1) if finite else Mean(0.0, 0),
            f"{trained.role}/lr": Mean(float(lr), 1),
            f"{trained.role}/skipped_updates": Mean(float(not trains), 1),
        }
        if scale is not None:
            step[f"{trained.role}/loss_scale"] = Mean(scale.value, 1)
        old = None
        if losses[-1].log_probs is not None:
            log_probs = [torch.empty(0)] * len(data)
            for rows, result in zip(plan, losses, strict=True):
                assert result.log_probs is not None
                _take_rows(log_probs, rows, data.index(rows), result.log_probs)
            old = Ragged.from_rows(log_probs, torch.float32)
        return MiniBatchResult(merge_metrics([metrics, step]), old)

    def gradient(self, data: DataProto, objective: TrainingSettings, limits: PassLimits) -> list[Tensor]:
        """This rank's shards of the gradient of `train_mini_batch`, before any clip; in float16 perhaps infinite."""
        _, data, _, plan, losses = self._accumulate(data, objective, limits)
        self._finite_metrics(losses, data, plan, NOT_TAKEN)
        gradients = [local_shard(parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return gradients

    @torch.no_grad()
    def evaluate(self, data: DataProto, objective: TrainingSettings, limits: PassLimits) -> dict[str, Metric]:
        """The metrics of an objective on this rank's rows, to be merged over ranks, without a step."""
        judged = OBJECTIVES[type(objective)](objective, self.forward, self.reference_head)
        data, counts, plan = self._begin(judged, data, limits)
        losses: list[Loss] = []
        for i, rows in enumerate(plan):
            micro_batch = self.forward.micro_batch(data.index(rows), objective.columns)
            with within_memory(f"the forward pass of {_describe(micro_batch, i, plan)}"):
                losses.append(judged(micro_batch, counts))
        return self._finite_metrics(losses, data, plan, "the model is as before")

    # --- weights -----------------------------------------------------------------------------------------------
    def on_device(self, **phase: bool) -> AbstractContextManager[None]:
        """Within the block the weights, and with `optimizer` its states, are on the device (`Offload.on_device`)."""
        return self.offload.on_device(**phase)

    def full_parameters(
        self, dtype: str, device: str = "cpu", *, as_in_files: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """The whole weights on `device`, tensor by tensor, with LoRA's factors merged; dtype is torch's name.

        With `as_in_files` they have the names and the form of the model's files, as rollout engines load them. Ranks
        that drop the tensors leave it out, since it holds some of them for a while.
        """
        head = DTYPES[self.settings.head_dtype] if self.settings.head_dtype else None
        tensors = full_parameters(self.model, getattr(torch, dtype), device, head_dtype=head)
        return model_loading.as_in_files(self.model, tensors, device) if as_in_files else tensors

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
            parameter.mul_(1 - share).add_(other.to(parameter.device), alpha=share)

    def output_layer(self, device: str) -> ReferenceHead:
        """A copy of the output layer in the type that it is multiplied in, for another engine's `reference_head`."""
        return copy_output_layer(self.model, device, DTYPES[self.settings.head_dtype or self.settings.compute_dtype])

    def checkpoint_bytes(self) -> int:
        """Bytes of all tensors that the ranks together write into a checkpoint. Not collective."""
        return num_bytes(self.model, self.optimizer)

    def make_states(self) -> None:
        """Make the optimizer's states, if it trains: then a save before the first step finds them where they wait."""
        if self.optimizer is not None:
            make_states(self.model, self.optimizer)

    def begin_save(self, folder: Path) -> None:
        """Copy the weights and, if it trains, optimizer, schedule and random states, and begin to write them."""
        self._writer = self._writer or ShardWriter()
        self._writer.begin_save(training_state(self.model, self.optimizer, self.schedule, self.loss_scale), folder)

    def finished_save(self, *, wait: bool) -> dict[str, FileDigest] | None:
        """The files that this rank has written since, flushed to disk; None while it writes."""
        assert self._writer is not None, "begin_save comes first"
        return self._writer.finished(wait=wait)

    def load_checkpoint(self, folder: Path) -> None:
        """Read what `begin_save` wrote, on any number of ranks."""
        load_training_state(folder, self.model, self.optimizer, self.schedule, self.loss_scale)

    def export_hf_model(self, folder: Path, dtype: str, usage: Usage | None = None) -> None:
        """Write a Hugging Face folder; LoRA's factors come beside it, and first: once it is there, all is written."""
        if self.settings.lora is not None:
            export_adapter(self.model, self.settings, folder.with_name(ADAPTER_FOLDER), dtype, usage)
        export_hf_model(self.model, self.settings, folder, dtype, usage)

    # --- parts -------------------------------------------------------------------------------------------------
    def _accumulate(
        self, data: DataProto, objective: TrainingSettings, limits: PassLimits
    ) -> tuple[Objective, DataProto, Tensor, list[Any], list[Loss]]:
        """Leave the gradient of a mini-batch in the parameters; returns what `_begin` does, and each pass's loss."""
        trained = OBJECTIVES[type(objective)](objective, self.forward, self.reference_head)
        data, counts, plan = self._begin(trained, data, limits)
        losses: list[Loss] = []
        factor = dist.get_world_size() * (1.0 if self.loss_scale is None else self.loss_scale.value)
        for i, rows in enumerate(plan):
            micro_batch = self.forward.micro_batch(data.index(rows), objective.columns)
            with (
                within_memory(f"the forward and backward pass of {_describe(micro_batch, i, plan)}"),
                gradient_sync(self.model, self.settings, last=i == len(plan) - 1),
            ):
                loss = trained(micro_batch, counts)
                (loss.loss * factor).backward()  # FSDP2 averages gradients over ranks: undone only here
            losses.append(loss.detached())
        if self.loss_scale is not None:
            self.loss_scale.unscale(self.model.parameters())
        return trained, data, counts, plan, losses

    def _begin(self, objective: Objective, data: DataProto, limits: PassLimits) -> tuple[DataProto, Tensor, list[Any]]:
        """The rows as the objective takes them, the counts of all ranks that divide the loss, and the micro-batches."""
        data = objective.prepared(data)
        groups = objective.groups(data)
        # the rows of a sequence group are counted by each of its ranks
        counts = self._all_reduce(objective.counts(data), dist.ReduceOp.SUM) / self.settings.sequence_parallel_size
        self._check_forward(data, limits, groups)
        return data, counts, self._plan(data, limits, groups)

    def _check_forward(self, data: DataProto, limits: PassLimits, whole_groups: np.ndarray | None = None) -> None:
        """Before the first forward pass, compare the layout with each sequence alone."""
        if not self.forward.report:
            plan = self._plan(data, limits, whole_groups)
            width = max(self.forward.micro_batch(data.index(rows), ()).input_ids.shape[1] for rows in plan)
            with within_memory(f"the comparison of layouts, in rows of {width} tokens"):
                self.forward.check(data, width, lambda mine: self._all_reduce([mine], dist.ReduceOp.MAX).item())
        if self.forward.fault:
            raise ConfigError(
                f"{self.settings.setting}: this model cannot be trained: {self.forward.fault}; use a model of another "
                "family, such as Qwen3 or Llama"
            )
        if self.settings.sequence_parallel_size > 1 and self.forward.layout == "alone":
            raise ConfigError(
                f"{self.settings.sequence_parallel_key}={self.settings.sequence_parallel_size}, "
                f"{self.settings.setting}: this model takes {self.forward.report}; its sequences cannot be split over "
                "ranks; set the size to 1"
            )

    def _plan(self, data: DataProto, limits: PassLimits, whole_groups: np.ndarray | None = None) -> list[Any]:
        """Rows of each micro-batch; the number of micro-batches is the same on all ranks."""
        if self.forward.layout == "alone":
            if whole_groups is not None:
                raise ConfigError(
                    f"{self.settings.setting}: this model takes {self.forward.report}; both sequences of a "
                    "pair must be in one pass, so it cannot be trained on pairs; use a model of another family"
                )
            limits = replace(limits, micro_batch_size=1, max_token_len=None)
        empty = np.empty(0, dtype=np.int64)
        lengths = Lengths(empty, empty, empty)
        if len(data):
            prompts = data["prompts"]
            groups = group_rows(data) if whole_groups is None else whole_groups
            lengths = Lengths(groups, prompts.lengths.numpy(), response_tokens(data, self.forward.layout))
        return plan_micro_batches(
            lengths,
            micro_batch_size=limits.micro_batch_size,
            max_token_len=limits.max_token_len,
            shared=self.forward.layout == "shared",
            split=whole_groups is None,
            agree=lambda count: int(self._all_reduce([count], dist.ReduceOp.MAX)),
        )

    def _finite_metrics(
        self, losses: Sequence[Loss], data: DataProto, plan: Sequence[np.ndarray], then: str
    ) -> dict[str, Metric]:
        """Read the metrics of a mini-batch, after its last pass: until then the device has work, and nobody waits."""
        values, metrics = read_metrics(losses)
        bad = next((i for i, value in enumerate(values) if not np.isfinite(value)), None)
        fault = ""
        if bad is not None:
            where = f"micro-batch {bad + 1} of {len(plan)}, {_name_rows(data.index(plan[bad]))}"
            fault = f"loss {values[bad]} in {where}; {then}"
        self._stop_if_any(fault)  # before any norm: one rank's bad loss makes the gradient norm bad on every rank
        return metrics

    def _all_reduce(self, values: list[float], operation: Any) -> Tensor:
        dtype = torch.float64 if self.device.type == "cpu" else torch.float32
        tensor = torch.tensor(values, dtype=dtype, device=self.device)
        dist.all_reduce(tensor, operation)
        return tensor

    def _stop_if_any(self, fault: str) -> None:
        """Raise on every rank if any rank found a fault, naming the first one."""
        if not self._all_reduce([float(bool(fault))], dist.ReduceOp.MAX).item():
            return
        faults: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(faults, fault)
        rank, first = next((rank, text) for rank, text in enumerate(faults) if text)
        self.model.zero_grad(set_to_none=True)
        raise TrainingDiverged(f"rank {rank}: {first}")


def _take_rows(parts: list[Tensor], rows: np.ndarray, part: DataProto, values: Tensor) -> None:
    """Put a micro-batch's values, (N, T, ...), at the positions of its rows, on CPU."""
    lengths = part["responses"].lengths.tolist() if len(rows) else []
    for row, numbers, length in zip(rows.tolist(), values.cpu(), lengths, strict=False):
        parts[row] = numbers[:length]


def _describe(micro_batch: MicroBatch, i: int, plan: Sequence[Any]) -> str:
    tokens, sequences = micro_batch.input_ids.numel(), len(micro_batch.response_mask)
    return f"micro-batch {i + 1} of {len(plan)} ({tokens:,} tokens, {sequences} sequences)"


def _name_rows(part: DataProto) -> str:
    uids = sorted({str(uid) for uid in part.non_tensor_batch.get("uid", [])})
    return f"prompts {', '.join(uids[:4])}{', ...' if len(uids) > 4 else ''}" if uids else f"{len(part)} sequences"
