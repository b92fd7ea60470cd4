"""A second rollout engine: transformers' `generate`, a group at a time, with weights that come in buckets alone."""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, GenerationConfig

from grpo_dist.engines.base import EngineLoad, Response
from grpo_dist.engines.settings import EngineSettings, SamplingSettings
from grpo_dist.engines.weights.buckets import Bucket, check_buckets, unpack
from grpo_dist.errors import BatchError, WeightSyncError


class BucketWeights:
    """Weights of a transformers model whose names are those of its files; no group is joined, nothing sleeps."""

    def __init__(self) -> None:
        self.version, self.model = -1, None
        self.idle = asyncio.Lock()  # held by a group that is sampled, so each has one version

    async def pause(self) -> None:
        """Let the groups that run end: `load` waits for them."""

    async def load(self, buckets: Sequence[Bucket], version: int) -> None:
        check_buckets(buckets)
        tensors = dict(pair for bucket in buckets for pair in unpack(bucket.data, bucket.entries))
        async with self.idle:
            missing, unknown = self.model.load_state_dict(tensors, strict=False)
            tied = set(self.model.all_tied_weights_keys)
            if unknown or not tied.issuperset(missing):
                raise WeightSyncError(f"unknown: {unknown}; missing: {sorted({*missing} - tied)}")
            self.version = version


class TransformersEngine:
    """See `RolloutEngine`. Samples as `SamplingSettings` say, but for `bad_words` and `min_tokens`."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings, self.load, self.weights = settings, EngineLoad(), BucketWeights()
        self.aborted: set[str | None] = set()

    async def start(self) -> None:
        """Load the model of the settings' folder, with its list of tokens that end a response."""
        folder, dtype = self.settings.model.path, getattr(torch, self.settings.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.weights.model, ends = self.model, self.model.generation_config.eos_token_id
        self.ends = [ends] if isinstance(ends, int) else list(ends or ())

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingSettings, request_id: str | None = None, media: Any = None
    ) -> list[Response] | None:
        room = self.settings.max_model_len - len(prompt)
        if room < 1:
            raise BatchError(f"a prompt of {len(prompt)} tokens, and max_model_len={self.settings.max_model_len}")
        async with self.weights.idle:
            if request_id in self.aborted:
                return None
            self.load = EngineLoad(running=sampling.n)
            responses = await asyncio.to_thread(self._sample, prompt, sampling, min(room, sampling.max_tokens))
            self.load = EngineLoad()
        return None if request_id in self.aborted else responses

    async def abort(self, request_id: str) -> None:
        """See `RolloutEngine.abort`; a group that is being sampled is thrown away at its end."""
        self.aborted.add(request_id)

    def shutdown(self) -> None:
        """It has no processes."""

    def _sample(self, prompt: Sequence[int], sampling: SamplingSettings, most: int) -> list[Response]:
        return [self._response(prompt, sampling, most, i) for i in range(sampling.n)]

    @torch.inference_mode()
    def _response(self, prompt: Sequence[int], sampling: SamplingSettings, most: int, index: int) -> Response:
        greedy = sampling.temperature == 0
        options: dict[str, Any] = {"do_sample": not greedy, "max_new_tokens": most, "output_logits": True}
        if not greedy:
            options |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p or None}
            options["top_k"] = max(0, sampling.top_k)
        ends = [] if sampling.ignore_eos else self.ends
        config = GenerationConfig(**options, eos_token_id=ends or None, pad_token_id=0, return_dict_in_generate=True)
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed + index)
        ids = torch.tensor([list(prompt)])
        made = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        tokens = made.sequences[0, len(prompt) :]
        logits = torch.cat(made.logits).float() / (sampling.temperature or 1.0)
        log_probs = log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0]
        truncated = tokens[-1].item() not in ends
        return Response(tokens.tolist(), log_probs.tolist(), truncated, [self.weights.version] * len(tokens))
