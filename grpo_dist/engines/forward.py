"""From rows of a batch to numbers of their response tokens: the layout, the head, and the check of both.

Every method is collective where it runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_dist.algorithms.masking import token_entropy, token_log_probs
from grpo_dist.engines.attention import DENSE_TOKENS, attention_inputs, why_padded
from grpo_dist.engines.exact_kl import ReferenceHead
from grpo_dist.engines.head import HeadRequest, HeadValues, ResponseHead
from grpo_dist.engines.micro_batch import MicroBatch, make_micro_batch
from grpo_dist.engines.micro_batch_plan import group_rows
from grpo_dist.protocol import DataProto, Ragged

# Packed rows on CPU grow to this many tokens: SDPA computes all pairs of a row, masked or not.
CPU_ROW_TOKENS = 256
# The check compares so many responses of so many prompts, cut to so many tokens.
CHECKED_PROMPTS, CHECKED_RESPONSES, CHECKED_TOKENS = 2, 2, 128
# Largest mean difference of log-probs, in nats, that rounding explains, by compute type.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}

SHOWN = {"padded": "padded sequences", "packed": "packed sequences", "shared": "shared prompts"}


class PolicyForward:
    """Runs a causal LM over micro-batches.

    Args:
        model: in which `ResponseHead.install` was tried.
        layout: padded, packed or shared: what to use if the model can.
        temperature: logits are divided by it.
        compute_dtype: of the forward pass, for the tolerance of the check.
        device: where it runs.

    Attributes:
        layout: what is used.
        report: one sentence for the user on the layout and why; "" before the check.
        dense_tokens: rows on CPU up to this long take their attention under a dense mask.
    """

    def __init__(
        self, model: Any, *, layout: str, temperature: float, compute_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.model, self.temperature, self.compute_dtype, self.device = model, temperature, compute_dtype, device
        head = model.get_output_embeddings()
        self.head: ResponseHead | None = head if isinstance(head, ResponseHead) else None
        self.padding_id: int = model.config.pad_token_id or 0
        self._unfit = "" if layout == "padded" else why_padded(model.config)
        self.layout = "padded" if self._unfit else layout
        self.wanted = layout
        self.report = ""
        self.dense_tokens = DENSE_TOKENS

    # --- forward -----------------------------------------------------------------------------------------------
    def micro_batch(self, data: DataProto, columns: Sequence[str]) -> MicroBatch:
        """The rows of `data` in the layout."""
        width = 0
        if self.layout == "packed" and self.device.type == "cpu":
            width = CPU_ROW_TOKENS
        elif self.device.type == "cuda" and len(data):  # one row: the kernels skip pairs that are masked
            width = int(data["prompts"].lengths.sum() + data["responses"].lengths.sum())
        layout = {"layout": self.layout, "row_width": width}
        return make_micro_batch(data, columns, self.padding_id, **layout).to(self.device)  # type: ignore[arg-type]

    def __call__(
        self,
        micro_batch: MicroBatch,
        *,
        entropies: bool = False,
        hidden_states: bool = False,
        reference: ReferenceHead | None = None,
        reference_states: Tensor | None = None,
    ) -> HeadValues:
        """Log-probs of the M response tokens, and what else is asked for; see `HeadRequest`."""
        if reference_states is not None and reference is not None:
            reference_states = _at_tokens(reference_states, micro_batch.slots, reference.weight.shape[1])
        request = HeadRequest(
            micro_batch.predictors,
            micro_batch.targets,
            self.temperature,
            entropies,
            hidden_states,
            reference,
            reference_states,
        )
        if self.head is None:
            return self._plain(micro_batch, request)
        with self.head.answering(request):
            return self._run(micro_batch).logits

    def _run(self, micro_batch: MicroBatch, **options: Any) -> Any:
        implementation = self.model.config._attn_implementation
        mask = attention_inputs(micro_batch.segments, micro_batch.position_ids, implementation, self.dense_tokens)
        return self.model(
            input_ids=micro_batch.input_ids, position_ids=micro_batch.position_ids, use_cache=False, **mask, **options
        )

    def _plain(self, micro_batch: MicroBatch, request: HeadRequest) -> HeadValues:
        """The same through the model's own logits, for models that change them after the output layer."""
        rows = request.predictors // micro_batch.input_ids.shape[1]
        kept, columns = torch.unique(request.predictors % micro_batch.input_ids.shape[1], return_inverse=True)
        seen: list[Tensor] = []
        hook = self.model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            logits = self._run(micro_batch, logits_to_keep=kept).logits[rows, columns]
        finally:
            hook.remove()
        return HeadValues(
            token_log_probs(logits, request.targets, self.temperature),
            token_entropy(logits, self.temperature) if request.entropies else None,
            None,
            seen[0][rows, columns].detach() if request.hidden_states else None,
        )

    # --- check -------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def check(self, data: DataProto, agree: Callable[[float], float]) -> None:
        """Compare the layout and the head with each sequence alone through the model's own logits; once.

        What differs by more than rounding is not used: first the layout is given up, then the head.

        Args:
            data: this rank's rows, of which a few are compared.
            agree: from this rank's difference to the largest of all ranks, so that all decide alike.
        """
        if self.report:
            return
        was_training = self.model.training
        self.model.eval()
        self.dense_tokens = 0  # the few are short: long rows' attention is what may not fit the model
        few = _a_few(data)
        alone = self._alone(few)
        reasons = [self._unfit] if self._unfit else []
        for layout, head in dict.fromkeys([(self.layout, self.head), ("padded", self.head), ("padded", None)]):
            self.layout, self.head = layout, head
            difference, fault = self._difference(few, alone)
            difference = agree(difference)
            if difference <= TOLERANCE[self.compute_dtype] or (layout, head) == ("padded", None):
                break
            what = SHOWN[layout] if layout != "padded" else "the chunked output layer"
            reasons.append(f"{what}: {fault or f'log-probs differ by {difference:.2g} nats on average'}")
        self.model.train(was_training)
        self.dense_tokens = DENSE_TOKENS
        self.report = _report(self.wanted, self.layout, self.head is not None, reasons, difference)

    def _difference(self, data: DataProto, alone: Tensor) -> tuple[float, str]:
        """Mean difference to `alone`; infinite, with the reason, if the forward pass fails."""
        try:
            micro_batch = self.micro_batch(data, ())
            found = micro_batch.to_rows(self(micro_batch).log_probs)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
            return float("inf"), f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if not len(data):
            return 0.0, ""
        flat = torch.cat([row[:length] for row, length in zip(found, data["responses"].lengths.tolist(), strict=True)])
        difference = (flat - alone).abs().mean().item() if len(flat) else 0.0
        return (difference, "") if np.isfinite(difference) else (float("inf"), "log-probs are not finite")

    def _alone(self, data: DataProto) -> Tensor:
        """Log-probs of each row alone, one after another; equally many forward passes on every rank."""
        parts = [torch.zeros(0, device=self.device)]
        for i in range(CHECKED_PROMPTS * CHECKED_RESPONSES):
            row = make_micro_batch(data.slice(i, i + 1), (), self.padding_id, layout="padded").to(self.device)
            request = HeadRequest(row.predictors, row.targets, self.temperature)
            log_probs = self._plain(row, request).log_probs
            parts.append(log_probs if i < len(data) else log_probs[:0])
        return torch.cat(parts)


def _at_tokens(states: Tensor, slots: Tensor, width: int) -> Tensor:
    """(N, T, H) -> (M, H); the stand-in (N, T) of a rank without rows gets its H."""
    if states.dim() == 2:
        states = states.unsqueeze(-1).expand(-1, -1, width)
    return states.flatten(0, 1)[slots]


def _a_few(data: DataProto) -> DataProto:
    """A few short responses of the first prompts."""
    if not len(data):
        return data
    groups = group_rows(data["prompts"])
    rows = np.concatenate([np.flatnonzero(groups == g)[:CHECKED_RESPONSES] for g in range(CHECKED_PROMPTS)])
    part = data.select(("prompts", "responses", "response_mask")).index(rows)
    cut = {name: [row[:CHECKED_TOKENS] for row in part[name].rows()] for name in ("responses", "response_mask")}
    columns = {name: Ragged.from_rows(values, part[name].values.dtype) for name, values in cut.items()}
    return DataProto({"prompts": part["prompts"], **columns})


def _report(wanted: str, layout: str, chunked: bool, reasons: list[str], difference: float) -> str:
    text = SHOWN[layout] + ("" if layout == wanted else f" instead of {SHOWN[wanted]}")
    text += "" if chunked else ", logits of whole micro-batches"
    if reasons:
        text += f" ({'; '.join(reasons)})"
    return f"{text}; log-probs equal those of each sequence alone within {difference:.1g} nats"
