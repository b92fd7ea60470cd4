"""The forward pass: from rows of a batch to log-probs of their response tokens, and the check of layout and head.

Methods that run the model are collective.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grpo_dist.algorithms.aggregate import token_entropy, token_log_probs
from grpo_dist.engines.train.attention import (
    FLEX,
    GRADIENT_TOLERANCE,
    attention_inputs,
    flex_backward_fault,
    own_code,
    take_own_code,
    why_padded,
    windows_of,
)
from grpo_dist.engines.train.lm_head import (
    Compiler,
    HeadRequest,
    HeadValues,
    ReferenceHead,
    ResponseHead,
    TopTokens,
    exact_kl_error,
)
from grpo_dist.engines.train.micro_batch import MicroBatch, make_micro_batch
from grpo_dist.engines.train.micro_batch_plan import group_rows
from grpo_dist.engines.train.model_loading import HEAD
from grpo_dist.engines.train.recurrence import has_linear_layers, plan_recurrence
from grpo_dist.engines.train.router_replay import RouterReplay
from grpo_dist.engines.train.segment_attention import BATCHED_TOKENS
from grpo_dist.engines.train.sharded_tensors import local_shard
from grpo_dist.engines.train.ulysses import WHOLE, SequenceGroup
from grpo_dist.engines.train.vision import VisionTower
from grpo_dist.errors import in_a_line
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.fields import columns_for
from grpo_dist.protocol.sequences import PROMPT_ROUTES

logger = logging.getLogger(__name__)

# The check compares so many responses of so many prompts, cut to so many tokens, and the last tokens of the longest.
CHECKED_PROMPTS, CHECKED_RESPONSES, CHECKED_TOKENS = 2, 2, 128
# The model's own forward pass is asked about the first tokens of one sequence, at most so many.
OWN_TOKENS = 256
# Largest mean difference of log-probs, in nats, that rounding explains, by compute type. In bf16 those of SmolLM2-135M
# are 0.04 off from the fp32 ones in every layout, alone too, and by the batch 0.04 to 0.06 from each other; without the
# mask they are 0.6 to 0.9 off, with positions that go on from sequence to sequence 0.3 to 0.4. float16 has 3 bits more.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.02}

# What a model's code may raise at inputs that it does not take.
_REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError, AssertionError, ImportError)

LAYOUT_NAMES = {
    "padded": "padded sequences",
    "packed": "packed sequences",
    "shared": "shared prompts",  # each is computed once for all its responses
    "alone": "one sequence at a time",  # only a fallback: for models whose log-probs depend on the other sequences
}


class PolicyForward:
    """Runs a causal LM over micro-batches; `ValueForward` runs a model with a linear head.

    Args:
        layout: the wanted one: padded, packed or shared.
        sequence_group: ranks that split the tokens of packed and shared micro-batches; padded ones stay whole.

    Attributes:
        layout: the one in use; "alone": each sequence in a pass of its own.
        report: one sentence for the user on the layout and why; "" before the check.
        fault: why the model cannot be trained in any layout, for the user; "" if it can.
        batched_tokens: segments on CPU up to this long take their attention in batches.
    """

    computes, unit = "log-probs", " nats"
    without_head = ", logits of whole micro-batches"

    def __init__(
        self,
        model: Any,
        *,
        layout: str,
        temperature: float,
        compute_dtype: torch.dtype,
        device: torch.device,
        sequence_group: SequenceGroup = WHOLE,
    ) -> None:
        self.sequence_group = sequence_group
        self.model, self.temperature, self.compute_dtype, self.device = model, temperature, compute_dtype, device
        head = model.get_output_embeddings()
        self.head: ResponseHead | None = head if isinstance(head, ResponseHead) else None
        self.padding_id: int = model.config.pad_token_id or 0
        self._unfit = "" if layout == "padded" else why_padded(model)
        self.layout = "padded" if self._unfit else layout
        self.wanted = layout
        self.report, self.fault = "", ""
        self.windows, self._plainly = windows_of(model), False
        self._recurrent = self.layout != "padded" and has_linear_layers(model.config)
        self.batched_tokens = BATCHED_TOKENS
        self.compiler: Compiler | None = getattr(model, "compiler", None)
        self.replay: RouterReplay | None = getattr(model, "router_replay", None)
        self.tower: VisionTower | None = getattr(model, "tower", None)

    # --- forward -----------------------------------------------------------------------------------------------
    def micro_batch(self, data: DataProto, columns: Sequence[str], *, min_width: int = 0) -> MicroBatch:
        """The rows of `data` in the layout, in tensor rows of at least `min_width` tokens where they are not padded."""
        width = min_width
        if len(data):  # one row, without padding: the kernels skip pairs that are masked
            width = max(width, int(data["prompts"].lengths.sum() + data["responses"].lengths.sum()))
        layout = "padded" if self.layout == "alone" else self.layout
        made = make_micro_batch(
            data,
            columns,
            self.padding_id,
            layout=layout,
            row_width=width,
            min_width=min_width,
            multiple=self.sequence_group.size,
        )
        return made.to(self.device)

    def __call__(
        self,
        micro_batch: MicroBatch,
        *,
        reference: ReferenceHead | None = None,
        reference_states: Tensor | None = None,
        top: tuple[Tensor, Tensor] | None = None,
        **asked: bool,
    ) -> HeadValues:
        """Log-probs of the M response tokens, and what of `HeadRequest` is asked for: columns are given by rows."""
        group = self.group_of(micro_batch)
        numbers, predictors = group.own(micro_batch.predictors, micro_batch.input_ids.shape[1])
        if reference_states is not None and reference is not None:
            reference_states = _at_tokens(reference_states, micro_batch.slots[numbers], reference.weight.shape[1])
        told = None
        if top is not None:
            ids, of_top = (_at_tokens(column, micro_batch.slots[numbers], 1) for column in top)
            told = TopTokens(ids.long(), of_top / self.temperature)
        request = HeadRequest(
            predictors,
            micro_batch.targets[numbers],
            self.temperature,
            reference=reference,
            reference_states=reference_states,
            top=told,
            **asked,
        )
        if self.head is None:
            values = self._plain(micro_batch, request)
        else:
            with self.head.answering(request):
                values = self._run(micro_batch).logits
        count = len(micro_batch.targets)
        return HeadValues._make(None if part is None else group.whole(part, numbers, count) for part in values)

    def group_of(self, micro_batch: MicroBatch) -> SequenceGroup:
        """The ranks that split the tokens of a micro-batch."""
        return WHOLE if micro_batch.segments is None else self.sequence_group

    def _run(self, micro_batch: MicroBatch, **options: Any) -> Any:
        implementation, group = self.model.config._attn_implementation, self.group_of(micro_batch)
        deep, features = dict[str, Any](), micro_batch.features
        if self.tower is not None:
            deep = self.tower.show(micro_batch.pictures, None if features is None else group.part(features))
        if self._plainly:
            return self.model(input_ids=micro_batch.input_ids, use_cache=False)
        positions = micro_batch.position_ids
        inputs = attention_inputs(micro_batch.segments, positions, implementation, self.batched_tokens, self.windows)
        if self._recurrent and micro_batch.segments is not None:
            inputs["recurrence"] = plan_recurrence(micro_batch.segments)
        if group.size > 1:
            inputs["sequence_group"] = group
        tokens, positions = group.part(micro_batch.input_ids), group.part(positions)
        if micro_batch.shifts is not None:  # the text's own, then those of M-RoPE
            positions = torch.cat([positions[None], positions + group.part(micro_batch.shifts).permute(2, 0, 1)])
        if self.replay is not None:
            self.replay.set(None if micro_batch.routes is None else group.part(micro_batch.routes))
        return self.model(input_ids=tokens, position_ids=positions, use_cache=False, **inputs, **deep, **options)

    def _plain(self, micro_batch: MicroBatch, request: HeadRequest) -> HeadValues:
        """Return the head's values from the model's own logits, for models that change them after the output layer."""
        if request.hidden_states or request.reference is not None or request.top is not None:
            raise exact_kl_error(f"through the chunked output layer this model's log-probs are others: {self.report}")
        width = micro_batch.input_ids.shape[1] // self.group_of(micro_batch).size
        rows = request.predictors // width
        kept, columns = torch.unique(request.predictors % width, return_inverse=True)
        logits = self._run(micro_batch, logits_to_keep=kept).logits
        logits = logits[rows, request.predictors % width if logits.shape[1] == width else columns]
        log_probs = token_log_probs(logits, request.targets, self.temperature)
        entropies = token_entropy(logits, self.temperature) if request.entropies else None
        norms = None
        if request.gradient_norms:
            p = torch.softmax(logits.float() / self.temperature, -1)
            norms = 1 - 2 * log_probs.exp() + p.square().sum(-1)
        return HeadValues(log_probs, entropies=entropies, gradient_norms=norms)

    # --- check -------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def check(self, data: DataProto, width: int, agree: Callable[[float], float]) -> None:
        """Compare one sequence with the model's own forward pass, and the layout and the head with each sequence alone
        through the model's own logits; once.

        Fall back while they differ by more than rounding: first to padded sequences, then to the model's own logits,
        then to one sequence at a time.

        Args:
            data: this rank's rows, of which a few and the longest are compared.
            width: tokens of the widest tensor row that this layout makes of the data.
            agree: the largest of all ranks' differences, from this rank's, so that all ranks decide alike.
        """
        few, compiler = _sample_rows(data), self.compiler
        if compiler is not None:
            compiler.on = False
        reasons = [self._unfit] if self._unfit else []
        if why := self._unlike_own(few, agree):
            reasons.append(why)
            take_own_code(self.model)
            self.layout = "padded" if self.sequence_group.size == 1 else "alone"  # padded ones are not split
        if self.fault:
            return
        alone = self._alone(few)
        candidates = [(self.layout, self.head), ("padded", self.head), ("padded", None), ("alone", None)]
        if self.sequence_group.size > 1:
            candidates = [(self.layout, self.head), (self.layout, None), ("alone", None)]  # padded ones are not split
        for layout, head in dict.fromkeys(candidates):
            self.layout, self.head = layout, head
            if layout == "alone":
                difference = 0.0
                break
            difference, fault = self._difference(few, alone, width)
            difference = agree(difference)
            if difference <= TOLERANCE[self.compute_dtype]:
                break
            what = "the chunked output layer" if layout == "padded" and head is not None else LAYOUT_NAMES[layout]
            reasons.append(f"{what}: {fault or f'{self.computes} differ by {difference:.2g}{self.unit} on average'}")
        if fault := self._compiler_fault(few, agree):
            reasons.append(f"torch.compile: {fault}")
        self.report = self._report(reasons, difference)

    def _unlike_own(self, data: DataProto, agree: Callable[[float], float]) -> str:
        """Compare one sequence with what the model's own code says of it, unpadded: no layout is truer than that.

        Returns why they differ, or ""; `fault` says what is wrong with the model's own forward pass.
        """
        empty = torch.zeros(2, dtype=torch.int64)
        ids = torch.cat([data[name].rows()[0] for name in ("prompts", "responses")]) if len(data) else empty
        ids = ids[:OWN_TOKENS].long()
        changed, half, limit = ids.clone(), len(ids) // 2, TOLERANCE[self.compute_dtype]
        changed[half:] = (ids[half:] + 1) % (ids.max() + 1)
        row, other = (_one_sequence(tokens, self.padding_id).to(self.device) for tokens in (ids, changed))
        later = off = float("inf")
        error = why = ""
        try:
            self._plainly = True
            with own_code(self.model):
                own, before = self.compared_alone(row, OWN_TOKENS), self.compared_alone(other, OWN_TOKENS)
            judged, scale = bool(torch.isfinite(own).all()), self.scale(own)  # weights may overflow: no fault of code
            later = _apart(own[: half - 1], before[: half - 1], scale) if judged else 0.0
            self._plainly = False
            ours = self.compared_alone(row, OWN_TOKENS)
            off = _apart(own, ours, scale) if judged else 0.0
        except torch.OutOfMemoryError:
            raise
        except _REFUSALS as refusal:
            error = in_a_line(refusal)
        finally:
            self._plainly = False
        if (later := agree(later)) > limit:
            seen = f"{self.computes} of tokens change by {later:.2g}{self.unit} on average with the tokens after them"
            self.fault = f"its own forward pass fails: {error}" if error else seen
        elif (off := agree(off)) > limit:
            why = error or f"{self.computes} differ by {off:.2g}{self.unit} on average"
            why = f"{self.model.config._attn_implementation} attention in place of the model's own: {why}"
        return why

    @torch.enable_grad()
    def _compiler_fault(self, data: DataProto, agree: Callable[[float], float]) -> str:
        """Compare compiled layers with their own code; return why all ranks turn it off, "" if they do not."""
        compiler = self.compiler
        if compiler is None or compiler.unfit:
            return "" if compiler is None else compiler.unfit
        micro_batch, fault, results = self.micro_batch(data.slice(0, max(len(data) - 1, 0)), ()), "", []
        for compiler.on in (False, True):
            try:
                values = self.compared(micro_batch)
                if values.requires_grad:
                    values.sum().backward()
                results.append((values.detach(), gradient_norms(self.model)))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - compilers and drivers raise errors of many kinds
                fault = in_a_line(error)
                logger.warning("torch.compile: %s", fault)  # now: ranks that have none may wait for this one in a pass
                break
            finally:
                self.model.zero_grad(set_to_none=True)
        off = float("inf")
        if len(results) == 2:
            (own, norms), (values, norms_compiled) = results
            off = float((values - own).abs().mean() / self.scale(own) / TOLERANCE[self.compute_dtype])
            if len(norms):
                change = (norms_compiled - norms).abs().max() / norms.max()
                off = max(off, float(change) / GRADIENT_TOLERANCE[self.compute_dtype])
        compiler.on = agree(off) <= 1
        return "" if compiler.on else fault or f"{self.computes} or gradients differ from those of the model's own code"

    def _difference(self, data: DataProto, alone: Tensor, width: int) -> tuple[float, str]:
        """Mean difference to `alone`; infinite, with the reason, if the forward pass fails."""
        try:
            micro_batch = self.micro_batch(data, (), min_width=width)
            if fault := self._backward_fault(micro_batch):
                return float("inf"), fault
            values = micro_batch.to_rows(self.compared(micro_batch))
        except torch.OutOfMemoryError:  # nothing against the layout
            raise
        except _REFUSALS as error:
            return float("inf"), in_a_line(error)
        if not len(data):
            return 0.0, ""
        lengths = data["responses"].lengths.tolist()
        flat = torch.cat([row[:length][-CHECKED_TOKENS:] for row, length in zip(values, lengths, strict=True)])
        difference = _apart(flat, alone, self.scale(alone))
        return (difference, "") if np.isfinite(difference) else (difference, f"{self.computes} are not finite")

    def _report(self, reasons: list[str], difference: float) -> str:
        text = LAYOUT_NAMES[self.layout]
        text += "" if self.layout == self.wanted else f" instead of {LAYOUT_NAMES[self.wanted]}"
        text += f", split over {size} ranks" if (size := self.sequence_group.size) > 1 else ""
        text += "" if self.head is not None else self.without_head
        text += ", compiled" if self.compiler is not None and self.compiler.on else ""
        if reasons:
            text += f" ({'; '.join(reasons)})"
        apart = f"{self.computes} differ by {difference:.1g}{self.unit}"
        return f"{text}; checked: {apart} from those of one sequence at a time"

    def _backward_fault(self, micro_batch: MicroBatch) -> str:
        """Why the backward pass of the layout's attention is wrong; "" if it is right, or not needed."""
        trains = any(parameter.requires_grad for parameter in self.model.parameters())
        config, segments = self.model.config, micro_batch.segments
        if not trains or segments is None or config._attn_implementation != FLEX:
            return ""
        return flex_backward_fault(config, segments, self.compute_dtype)

    def _alone(self, data: DataProto) -> Tensor:
        """Log-probs of each row's last tokens, row after row alone; equally many forward passes on every rank."""
        parts = [torch.zeros(0, device=self.device)]
        for i in range(CHECKED_PROMPTS * CHECKED_RESPONSES + 1):
            row = make_micro_batch(data.slice(i, i + 1), (), self.padding_id, layout="padded").to(self.device)
            values = self.compared_alone(row)
            parts.append(values if i < len(data) else values[:0])
        return torch.cat(parts)

    def scale(self, alone: Tensor) -> float:
        """Return the number that a difference is divided by before it is compared with `TOLERANCE`."""
        return 1.0

    def compared(self, micro_batch: MicroBatch) -> Tensor:
        """Return the numbers that the check compares, one for each of the M response tokens."""
        return self(micro_batch).log_probs

    def compared_alone(self, row: MicroBatch, tokens: int = CHECKED_TOKENS) -> Tensor:
        """Return those numbers for the last tokens of a padded sequence, by the model's own output layer."""
        last = slice(-tokens, None)  # logits of a long response would fill the memory
        return self._plain(row, HeadRequest(row.predictors[last], row.targets[last], self.temperature)).log_probs


def _one_sequence(ids: Tensor, padding_id: int) -> MicroBatch:
    """A sequence of which all tokens but the first are the response."""
    response = Ragged.from_rows([ids[1:]], torch.int32)
    columns = {"responses": response, "response_mask": Ragged.from_rows([torch.ones(len(ids) - 1)], torch.int8)}
    data = DataProto({"prompts": Ragged.from_rows([ids[:1]], torch.int32), **columns})
    return make_micro_batch(data, (), padding_id, layout="padded")


def _apart(values: Tensor, others: Tensor, scale: float) -> float:
    """Mean difference in terms of the scale; infinite if it is no number, 0 of nothing."""
    difference = (values - others).abs().mean().item() / scale if len(values) else 0.0
    return difference if np.isfinite(difference) else float("inf")


def _at_tokens(states: Tensor, slots: Tensor, width: int) -> Tensor:
    """(N, T, H) -> (M, H); the stand-in (N, T) of a rank without rows gets its H."""
    if states.dim() == 2:
        states = states.unsqueeze(-1).expand(-1, -1, width)
    return states.flatten(0, 1)[slots]


def _sample_rows(data: DataProto) -> DataProto:
    """The beginnings of a few responses of the first prompts, and the longest sequence, whole."""
    if not len(data):
        return data
    groups = group_rows(data)
    rows = np.concatenate([np.flatnonzero(groups == g)[:CHECKED_RESPONSES] for g in range(CHECKED_PROMPTS)])
    longest = int((data["prompts"].lengths + data["responses"].lengths).argmax())
    names = [name for name in columns_for(data.columns(), "forward", "router") if name != "uid"]
    part = data.select(names).index(np.append(rows, longest))
    own = [name for name in names if name in part.batch and name not in ("prompts", PROMPT_ROUTES)]
    limits = [CHECKED_TOKENS] * len(rows) + [None]
    cut = {name: [row[:limit] for row, limit in zip(part[name].rows(), limits, strict=True)] for name in own}
    columns = {name: Ragged.from_rows(values, part[name].values.dtype) for name, values in cut.items()}
    return DataProto({**part.batch, **columns}, part.non_tensor_batch)


class Values(NamedTuple):
    """(M,) float32: the head's output at the token before each response token; of two (bad, good) the log odds."""

    values: Tensor


class ValueForward(PolicyForward):
    """Runs a token classifier over micro-batches, in the layouts of a policy.

    The value of a response token is read at the token that precedes it: what the model says of the state in which the
    token is chosen, as verl's critic. Who wants the value at a sequence's last token appends one more token to it.
    """

    computes, unit = "values", " of their size"
    without_head = ""

    def __call__(self, micro_batch: MicroBatch, **options: Any) -> Values:  # type: ignore[override]
        """The values of the response tokens; `options` are those of a policy, which has more to say."""
        logits = self._at_predictors(micro_batch, self._run(micro_batch).logits)
        return Values(logits[:, 0] if logits.shape[-1] == 1 else logits[:, 1] - logits[:, 0])

    def _at_predictors(self, micro_batch: MicroBatch, outputs: Tensor) -> Tensor:
        """(M, ...) float32 of the model's outputs at this rank's tokens, (B, L, ...)."""
        group = self.group_of(micro_batch)
        numbers, predictors = group.own(micro_batch.predictors, micro_batch.input_ids.shape[1])
        return group.whole(outputs.flatten(0, 1)[predictors].float(), numbers, len(micro_batch.targets))

    def scale(self, alone: Tensor) -> float:
        """Values have no unit: a reward model may give scores around 20, whose rounding is as much larger."""
        return max(1.0, alone.abs().mean().item())

    def compared(self, micro_batch: MicroBatch) -> Tensor:
        """The values of a drawn head: the model's own, near 0 as a critic's at first, would hide differences."""
        inputs: list[Tensor] = []
        with getattr(self.model, HEAD).register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0])):
            self._run(micro_batch)
        states = self._at_predictors(micro_batch, inputs[0])
        drawn = torch.randn(states.shape[1], generator=torch.Generator().manual_seed(0))
        return states @ (drawn / math.sqrt(states.shape[1])).to(states.device)

    def compared_alone(self, row: MicroBatch, tokens: int = CHECKED_TOKENS) -> Tensor:
        """The same values at the last tokens of a padded sequence."""
        return self.compared(row)[-tokens:]


def gradient_norms(model: Any) -> torch.Tensor:
    """Return the norm of the gradient of each parameter that trains, of this rank's shards, float32."""
    norms = [
        torch.linalg.vector_norm(local_shard(gradient).float())
        for gradient in (parameter.grad for parameter in model.parameters() if parameter.requires_grad)
        if gradient is not None
    ]
    return torch.stack(norms) if norms else torch.zeros(0)
