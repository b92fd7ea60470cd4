"""The train engine on FSDP2: log-probs and optimizer steps of a sharded model. Every method is collective.

Losses are divided by counts of the whole mini-batch, summed over ranks before the first backward pass, so the result
does not depend on micro-batches, layout or the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_dist.algorithms import policy_objective
from grpo_dist.engines.base import MiniBatchResult
from grpo_dist.engines.settings import ModelSettings, ObjectiveSettings, OptimizerSettings
from grpo_dist.engines.train.forward import PolicyForward
from grpo_dist.engines.train.fsdp_model import gradient_sync, load_sharded_model
from grpo_dist.engines.train.fsdp_weights import FSDPWeights
from grpo_dist.engines.train.lm_head import ReferenceHead
from grpo_dist.engines.train.lora import adapters_off
from grpo_dist.engines.train.memory_errors import ACTOR_ROOM, remedied, within_memory
from grpo_dist.engines.train.micro_batch import MicroBatch
from grpo_dist.engines.train.micro_batch_plan import Lengths, group_rows, plan_micro_batches
from grpo_dist.engines.train.model_loading import DTYPES
from grpo_dist.engines.train.offload import Offload
from grpo_dist.engines.train.optimizer import build_optimizer
from grpo_dist.engines.train.sharded_tensors import whole
from grpo_dist.errors import TrainingDiverged
from grpo_dist.protocol import DataProto, Mean, Metric, Ragged, Sum, merge_metrics

NOT_TAKEN = "the optimizer step was not taken"


class FSDPEngine(FSDPWeights):
    """A causal LM sharded over the default process group; see `TrainEngine`. It trains if it is given an optimizer.

    Args:
        model: what to load and how to shard it.
        device: "cpu" or "cuda".
        temperature: the sampling temperature; logits are divided by it before every softmax.
        optimizer: None for a frozen model (the reference).
        grad_clip: largest gradient norm.
    """

    def __init__(
        self,
        model: ModelSettings,
        *,
        device: str,
        temperature: float,
        optimizer: OptimizerSettings | None = None,
        grad_clip: float = float("inf"),
    ) -> None:
        self.settings, self.device, self.grad_clip = model, torch.device(device), grad_clip
        self.model: Any = load_sharded_model(model, device, frozen=optimizer is None)
        self.reference_head: ReferenceHead | None = None
        self.forward = PolicyForward(
            self.model,
            layout=model.layout,
            temperature=temperature,
            compute_dtype=DTYPES[model.compute_dtype],
            device=self.device,
        )
        if optimizer is None:
            self.model.requires_grad_(False)
        else:
            self.optimizer, self.schedule = build_optimizer(self.model.parameters(), optimizer)
        self.offload = Offload(
            self.model,
            self.optimizer,
            self.device,
            parameters=model.param_offload,
            optimizer_states=model.optimizer_offload,
            shares_device=model.shares_gpu,
        )

    @property
    def report(self) -> str:
        """See `TrainEngine.report`."""
        return self.forward.report

    # --- log-probs ---------------------------------------------------------------------------------------------
    def compute_log_probs(self, data: DataProto, *, micro_batch_size: int, max_token_len: int | None = None) -> Ragged:
        """Log-probs of the response tokens, in nats, at the sampling temperature; see `compute_columns`."""
        limits = {"micro_batch_size": micro_batch_size, "max_token_len": max_token_len}
        return self.compute_columns(data, ("log_probs",), **limits)["log_probs"]  # type: ignore[arg-type]

    @torch.no_grad()
    def compute_columns(
        self, data: DataProto, names: Sequence[str], *, micro_batch_size: int, max_token_len: int | None = None
    ) -> dict[str, Ragged]:
        """See `TrainEngine.compute_columns`."""
        self._check_forward(data, micro_batch_size, max_token_len)
        parts: dict[str, list[Tensor]] = {name: [torch.empty(0)] * len(data) for name in names}
        plan = self._plan(data, micro_batch_size, max_token_len)
        for i, rows in enumerate(plan):
            part = data.index(rows)
            micro_batch = self.forward.micro_batch(part, ())
            with within_memory(f"the forward pass of {_describe(micro_batch, i, plan)}"):
                values = self.forward(
                    micro_batch, entropies="entropies" in names, hidden_states="hidden_states" in names
                )._asdict()
            for name in names:
                _take_rows(parts[name], rows, part, micro_batch.to_rows(values[name]))
        bad = [row for row, values in enumerate(parts.get("log_probs", ())) if not torch.isfinite(values).all()]
        self._stop_if_any(f"log-probs of {_name_rows(data.index(bad))} are not finite" if bad else "")
        hidden = DTYPES[self.settings.compute_dtype]
        dtypes = {name: hidden if name == "hidden_states" else torch.float32 for name in names}
        return {name: Ragged.from_rows(parts[name], dtypes[name]) for name in names}

    def compute_reference_columns(
        self, data: DataProto, names: Sequence[str], *, micro_batch_size: int, max_token_len: int | None = None
    ) -> dict[str, Ragged]:
        """See `TrainEngine.compute_reference_columns`."""
        with adapters_off(self.model):
            return self.compute_columns(data, names, micro_batch_size=micro_batch_size, max_token_len=max_token_len)

    # --- training ----------------------------------------------------------------------------------------------
    def train_mini_batch(
        self,
        data: DataProto,
        *,
        micro_batch_size: int,
        objective: ObjectiveSettings,
        max_token_len: int | None = None,
    ) -> MiniBatchResult:
        """See `TrainEngine.train_mini_batch`. The schedule counts the steps that were taken."""
        self._check_forward(data, micro_batch_size, max_token_len)
        tokens, sequences = self._global_counts(data)
        metrics: list[dict[str, Metric]] = []
        log_probs = [torch.empty(0)] * len(data)
        fault = ""
        plan = self._plan(data, micro_batch_size, max_token_len)
        for i, rows in enumerate(plan):
            part = data.index(rows)
            micro_batch = self.forward.micro_batch(part, objective.columns)
            with (
                within_memory(f"the forward and backward pass of {_describe(micro_batch, i, plan)}"),
                gradient_sync(self.model, self.settings, last=i == len(plan) - 1),
            ):
                found = self._log_probs(micro_batch, objective)
                loss, values = self._objective(micro_batch, found, objective, tokens, sequences)
                (loss * dist.get_world_size()).backward()  # FSDP2 averages gradients over ranks: undone here, only here
            if objective.on_policy:
                _take_rows(log_probs, rows, part, found[0].detach())
            metrics.append(self._micro_batch_metrics(micro_batch, loss, values))
            if not torch.isfinite(loss):
                where = f"micro-batch {i + 1} of {len(plan)}, {_name_rows(part)}"
                fault = fault or f"loss {loss.item()} in {where}; {NOT_TAKEN}"
        self._stop_if_any(fault)  # first: one rank's bad loss makes the gradient norm bad on every rank
        grad_norm = whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip))
        self._stop_if_any("" if torch.isfinite(grad_norm) else f"gradient norm {grad_norm.item()}; {NOT_TAKEN}")
        lr = self.schedule.get_last_lr()[0]
        trains = bool(tokens > 0)  # else AdamW would still decay the weights, and move them by its momentum
        if trains:
            with remedied(ACTOR_ROOM), within_memory("the optimizer step"), self.offload.states_on_device():
                self.optimizer.step()
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        step: dict[str, Metric] = {
            "actor/grad_norm": Mean(grad_norm.item(), 1),
            "actor/lr": Mean(float(lr), 1),
            "actor/skipped_updates": Mean(float(not trains), 1),
        }
        old = Ragged.from_rows(log_probs, torch.float32) if objective.on_policy else None
        return MiniBatchResult(merge_metrics([*metrics, step]), old)

    # --- parts -------------------------------------------------------------------------------------------------
    def _log_probs(
        self, micro_batch: MicroBatch, settings: ObjectiveSettings
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(N, T) log-probs, with the gradient, and where the loss asks for them entropies and the exact KL."""
        assert self.reference_head is not None or not settings.exact_kl, "start with `exact_kl`"
        values = self.forward(
            micro_batch,
            entropies=settings.entropy_coeff != 0,
            reference=self.reference_head if settings.exact_kl else None,
            reference_states=micro_batch.columns.get("ref_hidden_states"),
        )
        entropies, exact_kl = (None if v is None else micro_batch.to_rows(v) for v in values[1:3])
        return micro_batch.to_rows(values.log_probs), entropies, exact_kl

    def _objective(
        self,
        micro_batch: MicroBatch,
        found: tuple[Tensor, Tensor | None, Tensor | None],
        settings: ObjectiveSettings,
        tokens: Tensor,
        sequences: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs, entropy, exact_kl = found
        return policy_objective(
            log_probs=log_probs,
            old_log_probs=log_probs.detach() if settings.on_policy else micro_batch.columns["old_log_probs"],
            advantages=micro_batch.columns["advantages"],
            response_mask=micro_batch.response_mask,
            ref_log_probs=micro_batch.columns.get("ref_log_probs"),
            entropy=entropy,
            loss_mode=settings.loss_mode,
            loss_agg_mode=settings.loss_agg_mode,
            options=settings.options,
            kl_loss_type=settings.kl_loss_type if settings.use_kl_loss else None,
            kl_loss_coef=settings.kl_loss_coef,
            entropy_coeff=settings.entropy_coeff,
            global_tokens=tokens,
            global_sequences=sequences,
            loss_scale_factor=settings.loss_scale_factor,
            exact_kl=exact_kl,
            rollout_is_weights=micro_batch.columns.get("rollout_is_weights"),
            selected=micro_batch.columns.get("selected_tokens"),
            rollout_log_probs=micro_batch.columns.get("rollout_log_probs"),
            correction=settings.correction,
        )

    def _check_forward(self, data: DataProto, micro_batch_size: int, max_token_len: int | None) -> None:
        """Before the first forward pass, compare the layout with each sequence alone."""
        if self.forward.report:
            return
        plan = self._plan(data, micro_batch_size, max_token_len)
        width = max(self.forward.micro_batch(data.index(rows), ()).input_ids.shape[1] for rows in plan)
        with within_memory(f"the comparison of layouts, in rows of {width} tokens"):
            self.forward.check(data, width, lambda mine: self._all_reduce([mine], dist.ReduceOp.MAX).item())

    def _plan(self, data: DataProto, micro_batch_size: int, max_token_len: int | None) -> list[Any]:
        """Rows of each micro-batch; the number of micro-batches is the same on all ranks."""
        if self.forward.layout == "alone":
            micro_batch_size, max_token_len = 1, None
        empty = np.empty(0, dtype=np.int64)
        lengths = Lengths(empty, empty, empty)
        if len(data):
            prompts, responses = data["prompts"], data["responses"]
            lengths = Lengths(group_rows(prompts), prompts.lengths.numpy(), responses.lengths.numpy())
        return plan_micro_batches(
            lengths,
            micro_batch_size=micro_batch_size,
            max_token_len=max_token_len,
            shared=self.forward.layout == "shared",
            agree=lambda count: int(self._all_reduce([count], dist.ReduceOp.MAX)),
        )

    def _global_counts(self, data: DataProto) -> tuple[Tensor, Tensor]:
        """Response tokens and sequences with at least one token, over all ranks."""
        if len(data) == 0:
            return self._all_reduce([0.0, 0.0], dist.ReduceOp.SUM).unbind()  # type: ignore[return-value]
        mask = data["response_mask"].to_padded(0)
        local = [float(mask.sum()), float((mask.sum(-1) > 0).sum())]
        return self._all_reduce(local, dist.ReduceOp.SUM).unbind()  # type: ignore[return-value]

    def _all_reduce(self, values: list[float], operation: Any) -> Tensor:
        tensor = torch.tensor(values, dtype=torch.float64 if self.device.type == "cpu" else torch.float32)
        tensor = tensor.to(self.device)
        dist.all_reduce(tensor, operation)
        return tensor

    def _micro_batch_metrics(
        self, micro_batch: MicroBatch, loss: Tensor, values: dict[str, Tensor]
    ) -> dict[str, Metric]:
        tokens = float(micro_batch.response_mask.sum())
        metrics: dict[str, Metric] = {k: Mean(float(v) * tokens, tokens) for k, v in values.items()}
        for name, value in {"actor/loss": loss.detach(), "actor/pg_loss": values["actor/pg_loss"]}.items():
            metrics[name] = Sum(float(value))
        return metrics

    def _stop_if_any(self, fault: str) -> None:
        """Raise on every rank if any rank found a fault, naming the first one."""
        if not self._all_reduce([float(bool(fault))], dist.ReduceOp.MAX).item():
            return
        faults: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(faults, fault)
        rank, first = next((rank, text) for rank, text in enumerate(faults) if text)
        self.model.zero_grad(set_to_none=True)
        raise TrainingDiverged(f"rank {rank}: {first}")


def _take_rows(parts: list[Tensor], rows: np.ndarray, part: DataProto, found: Tensor) -> None:
    """Put a micro-batch's values, (N, T, ...), at the positions of its rows, on CPU."""
    lengths = part["responses"].lengths.tolist() if len(rows) else []
    for row, numbers, length in zip(rows.tolist(), found.cpu(), lengths, strict=False):
        parts[row] = numbers[:length]


def _describe(micro_batch: MicroBatch, i: int, plan: Sequence[Any]) -> str:
    tokens, sequences = micro_batch.input_ids.numel(), len(micro_batch.response_mask)
    return f"micro-batch {i + 1} of {len(plan)} ({tokens:,} tokens, {sequences} sequences)"


def _name_rows(part: DataProto) -> str:
    uids = sorted({str(uid) for uid in part.non_tensor_batch.get("uid", [])})
    return f"prompts {', '.join(uids[:4])}{', ...' if len(uids) > 4 else ''}" if uids else f"{len(part)} sequences"
