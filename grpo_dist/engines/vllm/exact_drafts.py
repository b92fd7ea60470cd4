"""Drafts that change no token: a draft is accepted if it is the token that the request's own sampler draws there.

vLLM's speculative decoding accepts drafts by rejection sampling (arXiv:2211.17192): its responses have the right
distribution, and are others than those of the same seeds without drafts. Here each place is sampled as it is without
drafts, with the generator of the request, and the first place whose token is not the draft is the last one that counts.
A generator has then drawn once for each token of the response, as ever. Where the model's outputs do not depend on how
many tokens a step computes responses and log-probs are the same to the bit; elsewhere they are what they are in any
other batch.

vLLM's ways in: `speculative_config` with `method=custom_class` makes `Drafter`, which is a documented interface. The
sampler that checks drafts is an attribute of the older model runner, `rejection_sampler`, called with (metadata of the
drafts, their probabilities, logits, sampling metadata) in `_sample`; the newer runner takes no custom class.
`use_drafts` replaces it, and fails if it is not there. Both rely on the internals of vLLM 0.32.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

from grpo_dist.engines.base import DraftCounts
from grpo_dist.engines.vllm.draft_length import BOUNDS, DraftLength
from grpo_dist.engines.vllm.draft_table import CONTEXTS, DraftTables

NO_TOKEN = -1


class ExactSampler:
    """Checks drafts by sampling; in the place of vLLM's `RejectionSampler`.

    Args:
        sampler: vLLM's sampler of one token of each request.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __call__(self, drafts: Any, draft_probs: Any, logits: Tensor, sampling: SamplingMetadata) -> SamplerOutput:
        """Sample the next tokens of all requests, up to the first that is not the draft.

        Args:
            drafts: vLLM's SpecDecodeMetadata.
            draft_probs: not read.
            logits: (places, V), of each request one for every draft and one more.
            sampling: of the requests.

        Returns:
            Tokens (requests, most drafts + 1), `NO_TOKEN` behind the last one; log-probs of all those places in a row.
        """
        counts, given = drafts.num_draft_tokens, drafts.draft_token_ids.tolist()
        first = [0, *accumulate(count + 1 for count in counts)]
        of_request = [given[first[i] - i : first[i + 1] - i - 1] for i in range(len(counts))]
        tokens = torch.full((len(counts), max(counts) + 1), NO_TOKEN, dtype=torch.int32, device=logits.device)
        log_probs: list[Tensor] = []
        live, metadata = list(range(len(counts))), sampling
        for place in range(tokens.shape[1]):
            output = self.sampler(logits=logits[[first[i] + place for i in live]], sampling_metadata=metadata)
            tokens[live, place] = output.sampled_token_ids[:, 0]
            if output.logprobs_tensors is not None:
                _put(log_probs, output.logprobs_tensors, tokens.shape, place, live)
            drawn = output.sampled_token_ids[:, 0].tolist()
            live = [i for i, token in zip(live, drawn, strict=True) if of_request[i][place : place + 1] == [token]]
            if not live:
                break
            metadata = _of_requests(sampling, live, [of_request[i][: place + 1] for i in live])
        flat = None
        if log_probs:
            ids, values, ranks = (column.flatten(0, 1) for column in log_probs)
            flat = LogprobsTensors(ids, values, ranks)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=flat)


def _put(columns: list[Tensor], found: LogprobsTensors, shape: torch.Size, place: int, live: Sequence[int]) -> None:
    """Write the log-probs of a place into columns for all places, which the first call makes."""
    parts = (found.logprob_token_ids, found.logprobs, found.selected_token_ranks)
    if not columns:
        columns.extend(part.new_zeros(*shape, *part.shape[1:]) for part in parts)
    for column, part in zip(columns, parts, strict=True):
        column[live, place] = part


def _of_requests(sampling: SamplingMetadata, rows: Sequence[int], behind: Sequence[Sequence[int]]) -> SamplingMetadata:
    """The sampling metadata of some requests, with tokens behind those that they have.

    Processors that keep a state by request are left out: a request that one of them acts on is given no drafts.
    """

    def some(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[list(rows)]

    pairs = list(enumerate(rows))
    outputs = sampling.output_token_ids
    return replace(
        sampling,
        temperature=some(sampling.temperature),
        top_p=some(sampling.top_p),
        top_k=some(sampling.top_k),
        generators={i: sampling.generators[row] for i, row in pairs if row in sampling.generators},
        prompt_token_ids=some(sampling.prompt_token_ids),
        frequency_penalties=sampling.frequency_penalties[list(rows)],
        presence_penalties=sampling.presence_penalties[list(rows)],
        repetition_penalties=sampling.repetition_penalties[list(rows)],
        output_token_ids=[[*outputs[row], *more] for row, more in zip(rows, behind, strict=True)] if outputs else [],
        allowed_token_ids_mask=some(sampling.allowed_token_ids_mask),
        bad_words_token_ids={
            i: sampling.bad_words_token_ids[row] for i, row in pairs if row in sampling.bad_words_token_ids
        },
        logitsprocs=LogitsProcessors(),
        spec_token_ids=None,
    )


# --- drafts --------------------------------------------------------------------------------------------------------
@dataclass
class _Request:
    """A running request.

    Attributes:
        prompt: hash of its prompt.
        counted: how many of its tokens its prompt's table knows.
    """

    prompt: int
    counted: int


class Drafter:
    """Drafts from earlier responses to a prompt, as long as they pay; vLLM makes it by `method=custom_class`.

    Attributes:
        counts: what they have done so far.
        runner: vLLM's model runner, whose batch says whose rows are whose; None: nothing is drafted.
        began: `time.monotonic()` at the start of the engine's step.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.counts, self.runner, self.began = DraftCounts(), None, 0.0
        self._most_tokens = vllm_config.model_config.max_model_len
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._tables, self._length = DraftTables(), DraftLength()
        self._requests: dict[str, _Request] = {}
        self._drafted: dict[str, int] = {}  # tokens of each request of the step under way
        self._running: set[str] = set()
        self._ended = 0.0  # of the last step

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is none."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return drafts for each request of the batch, after a step that has sampled these tokens for it."""
        batch: Any = None if self.runner is None else self.runner.input_batch
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if batch is None:
            return drafts
        names = batch.req_ids
        self._note(names, sampled_token_ids)
        rows = [] if _has_state(batch) else [i for i, new in enumerate(sampled_token_ids) if new]
        found = self._look_up(rows, names, token_ids_cpu, num_tokens_no_spec, batch.num_prompt_tokens)
        lengths = self._length.choose([chances for _, chances in found])
        for i, (text, _), length in zip(rows, found, lengths, strict=True):
            drafts[i] = text[:length]
        self._drafted = {name: len(draft) for name, draft in zip(names, drafts, strict=False) if draft}
        self._ended = time.monotonic()
        return drafts

    def _look_up(
        self, rows: Sequence[int], names: Sequence[str], tokens: np.ndarray, ends: np.ndarray, prompt_ends: np.ndarray
    ) -> list[tuple[list[int], list[float]]]:
        """What may follow in some rows, with chances, once their new tokens are counted; nothing when time is up."""
        found: list[tuple[list[int], list[float]]] = [([], [])] * len(rows)
        until = time.monotonic() + self._length.seconds_to_look(len(rows))
        for place, i in enumerate(rows):
            if time.monotonic() >= until:
                break
            name, end = names[i], int(ends[i])
            if name not in self._requests:  # or it was pushed out of the batch, and has come back
                prompt = int(prompt_ends[i])
                self._requests[name] = _Request(hash(tokens[i, :prompt].tobytes()), prompt)
            request = self._requests[name]
            begin = max(request.counted - CONTEXTS[0], 0)
            text = tokens[i, begin:end].tolist()
            self._tables.add(request.prompt, text, request.counted - begin)
            request.counted = end
            room = min(self._most, self._most_tokens - end - 1)
            found[place] = self._tables.of(request.prompt).draft(text, room, BOUNDS[-1])
        return found

    def _note(self, names: Sequence[str], sampled: Sequence[Sequence[int]]) -> None:
        """Count what the step has given, and what it took if no prompt was computed in it."""
        before, drafted = self._running, sum(self._drafted.values())
        running = {name for name, new in zip(names, sampled, strict=False) if new}
        self.counts = DraftCounts(
            self.counts.drafted + drafted,
            self.counts.accepted
            + sum(len(new) - 1 for name, new in zip(names, sampled, strict=False) if new and name in self._drafted),
            self.counts.tokens + sum(map(len, sampled)),
            self._tables.num_bytes,
        )
        if running and len(running) == len(names) and running <= before:
            now = time.monotonic()
            step = now - self.began
            between = min(self.began - self._ended, step)  # the engine may have been held
            self._length.note(len(running) + drafted, drafted > 0, step + between)
        if running != before:
            self._running, self._requests = running, {n: r for n, r in self._requests.items() if n in running}


def _has_state(batch: Any) -> bool:
    """Tell if a processor of logits acts by request: fewest tokens, and what else no draft may be checked under."""
    processors = batch.logitsprocs.non_argmax_invariant
    holder = batch.thinking_budget_state_holder
    return any(getattr(each, "min_toks", None) for each in processors) or (
        holder is not None and holder.has_tracked_requests()
    )


def use_drafts(runner: Any) -> None:
    """Have a worker's model runner check drafts by sampling, and its `Drafter` make them.

    Args:
        runner: vLLM's older model runner, started with `Drafter`.

    Raises:
        AttributeError: it has no sampler that checks drafts.
    """
    drafter, runner.rejection_sampler = runner.drafter, ExactSampler(runner.rejection_sampler.sampler)
    drafter.runner, execute_model = runner, runner.execute_model

    def execute(*args: Any, **kwargs: Any) -> Any:
        drafter.began = time.monotonic()
        return execute_model(*args, **kwargs)

    runner.execute_model = execute
