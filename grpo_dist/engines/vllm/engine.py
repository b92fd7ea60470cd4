"""The rollout engine on vLLM: AsyncLLM, or on CPU LocalLLM (local_llm.py). It works on token ids, without Ray and
tokenizer.

New weights come while requests run (weight_update.py), and each token has the version that sampled it. A call into vLLM
ends when the engine dies, and has a time limit. Calls that last as long as responses do have the driver's limit.
"""

from __future__ import annotations

import asyncio
import io
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from grpo_dist.engines.base import AppSample, EngineLoad, Footprint, Response
from grpo_dist.engines.settings import EngineSettings, SamplingSettings
from grpo_dist.engines.vllm.arguments import adapter_request, clear_traces, engine_args, take_traces
from grpo_dist.engines.vllm.local_llm import LocalLLM
from grpo_dist.engines.vllm.pictures import picture_maker, with_pictures
from grpo_dist.engines.vllm.starting import (
    GPU,
    footprint,
    gpus,
    knows_internals,
    plain_errors,
    tied_core,
    wait_until_free,
)
from grpo_dist.engines.vllm.weight_update import WeightUpdater
from grpo_dist.engines.weights.buckets import clear_left_behind, note_segments, remove
from grpo_dist.errors import BatchError, ConfigError, EngineError, GrpoDistError
from grpo_dist.protocol.media import Media
from grpo_dist.protocol.sequences import unknown_routes

# An engine call that takes longer than this hangs.
CALL_TIMEOUT_S = 600.0
DEATH_POLL_S = 1.0


class VLLMEngine:
    """One vLLM engine; see `RolloutEngine`. `folder` has its sockets and its tokenizer."""

    weights: WeightUpdater

    def __init__(self, settings: EngineSettings, folder: TemporaryDirectory[str]) -> None:
        self.settings, self._folder = settings, folder
        self._load = EngineLoad()
        self._running: dict[str | None, set[str]] = {}  # ours -> vLLM's ids
        self._llm: Any = None
        self._segments: Path | None = None
        self._vocab_size = 0
        self._picture_maker: Any = None
        self._stop_token_ids: list[int] = []

    @property
    def load(self) -> EngineLoad:
        """See `RolloutEngine.load`."""
        return self._llm.load if isinstance(self._llm, LocalLLM) else self._load

    async def start(self) -> Footprint | None:
        """See `RolloutEngine.start`; on GPUs once there is enough free memory.

        Raises:
            ConfigError: vLLM refuses the settings.
            EngineError: its GPUs are full.
            RuntimeError: vLLM did not start; says where the reason is.
        """
        clear_left_behind()
        on_gpus = self.settings.device == "cuda"
        before = await wait_until_free(self.settings) if on_gpus else []
        with plain_errors():
            self._llm = self._start_llm()
        config = self._llm.vllm_config.model_config
        self._vocab_size = config.get_vocab_size()
        if self.settings.sees_images:
            self._picture_maker = picture_maker(config)
        self._stop_token_ids = _stop_token_ids(config)
        self.weights = WeightUpdater(self._llm, self._call, settings=self.settings)
        await self.weights.install_factors(complete=False)
        if self.settings.records_routes and not on_gpus:
            await self._call(self._llm.collective_rpc("record_routes"))
        if self.settings.rollout.tensor_model_parallel_size > 1:
            segments = await self._call(self._llm.collective_rpc("shared_memory"))
            self._segments = note_segments({name for names in segments for name in names})
        return await self._footprint(before) if on_gpus else None

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingSettings,
        request_id: str | None = None,
        media: Media | None = None,
    ) -> list[Response] | None:
        """See `RolloutEngine.generate`; concurrent calls share vLLM's batch."""
        self.weights.check_not_mixed()
        self._check_prompt(prompt)
        params = _sampling_params(sampling, self._stop_token_ids)
        # as long as it takes: the limit is the driver's, who knows how long a group may wait and run
        output = await self._call(self._final_output(list(prompt), params, request_id, media), timeout_s=None)
        done = [] if output is None else [r for r in output.outputs if r.finish_reason not in (None, "abort")]
        if len(done) < sampling.n:
            return None
        return [_response(r) for r in sorted(done, key=lambda r: r.index)]

    async def score(self, prompt: Sequence[int], response: Sequence[int], media: Media | None = None) -> Response:
        """Return a given response as if it had been sampled at temperature 1."""
        tokens = [*prompt, *response]
        self._check_prompt(tokens)
        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        output = await self._call(self._final_output(tokens, params, None, media))
        places = list(zip(tokens, output.prompt_logprobs, strict=True))[len(prompt) :]
        log_probs = [known[token].logprob for token, known in places]
        return Response(list(response), log_probs, False, [self.weights.version] * len(response))

    async def watched(self, prompt: Sequence[int], sampling: SamplingSettings) -> tuple[Response, dict[str, Any]]:
        """Sample a response alone in the engine, and note what each operation gives on the way; see `Watching`.

        Returns:
            (the response, (tokens, F) outputs by the module's name; {} where the model is compiled).
        """
        await self._call(self._llm.collective_rpc("watch"))
        try:
            responses = await self.generate(prompt, sampling)
        finally:
            seen, *_ = await self._call(self._llm.collective_rpc("watched"))
        assert responses is not None, "nobody aborts it"
        return responses[0], torch.load(io.BytesIO(seen), weights_only=True)

    async def attention_kernels(self) -> list[str]:
        """The classes of the attention kernels."""
        return list((await self._call(self._llm.collective_rpc("attention_kernels")))[0])

    async def openai_app(self, sample: AppSample) -> Any:
        """An OpenAI-compatible ASGI app over a function that samples; the engine must have its tokenizer."""
        from grpo_dist.engines.vllm.openai_app import openai_app  # vLLM's server, which few engines need

        engine = self._llm.engine if isinstance(self._llm, LocalLLM) else self._llm
        options = self.settings.rollout.agent.endpoint_kwargs
        return await openai_app(engine, self.settings.model.path, sample, options)

    async def abort(self, request_id: str) -> None:
        """See `RolloutEngine.abort`."""
        for vllm_id in list(self._running.get(request_id, ())):
            if self._llm is not None:  # shut down, at the end of a run
                await self._call(self._llm.abort(vllm_id))

    async def start_profile(self) -> None:
        """Begin to record the engine's steps, the first ones of which are kept."""
        clear_traces(self.settings)
        await self._call(self._llm.start_profile())

    async def stop_profile(self, path: Path) -> None:
        """End that, and write the trace: a gzip'ed JSON file; of several processes `path` with the number of each."""
        await self._call(self._llm.stop_profile())
        take_traces(self.settings, path)

    def shutdown(self) -> None:
        """Stop the engine and every process it started."""
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None
            self._folder.cleanup()
            if self._segments is not None:
                remove(self._segments)  # vLLM may not have come to it yet

    def _start_llm(self) -> Any:
        arguments = engine_args(self.settings, folder=self._folder.name)
        local = self.settings.device == "cpu" and self.settings.rollout.tensor_model_parallel_size == 1
        if local and knows_internals():
            return LocalLLM(arguments)
        with tied_core():
            return AsyncLLM.from_engine_args(arguments, stat_loggers=[self._stat_logger()])

    async def _footprint(self, before: list[GPU]) -> Footprint:
        sizes = await self._call(self._llm.collective_rpc("kv_cache_bytes"))
        measured = [size for size in sizes if size is not None]
        after = gpus(self.settings.rollout.tensor_model_parallel_size)
        return footprint(self.settings, before, after, min(measured, default=None))

    async def _final_output(
        self, prompt: list[int], params: Any, request_id: str | None, media: Media | None = None
    ) -> Any:
        request: Any = {"prompt_token_ids": prompt}
        if media is not None:
            request = with_pictures(self._picture_maker, prompt, media)
        vllm_id = uuid.uuid4().hex
        if not self.settings.rollout.clear_kv_cache_on_update:
            # blocks of older weights serve no new request; which weights one is run with that comes now is open
            request["cache_salt"] = vllm_id if self.weights.updating else f"weights {self.weights.version}"
        running = self._running.setdefault(request_id, set())
        running.add(vllm_id)
        try:
            adapter = None if self.settings.lora is None else adapter_request()
            outputs = [o async for o in self._llm.generate(request, params, vllm_id, lora_request=adapter)]
        finally:
            running.discard(vllm_id)
            if not running:
                self._running.pop(request_id, None)
        return outputs[-1] if outputs else None

    def _stat_logger(self) -> Any:
        """The class that vLLM calls after each step; it keeps `load` up to date."""
        engine = self

        class LoadLogger(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

            def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
                if scheduler_stats is not None:
                    engine._load = EngineLoad(scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs)

            def log_engine_initialized(self) -> None: ...

        return LoadLogger

    async def _call(self, call: Coroutine[Any, Any, Any], timeout_s: float | None = CALL_TIMEOUT_S) -> Any:
        """Await a vLLM call; its exceptions become ours, since vLLM's own cannot be sent to another process.

        A call that is pending when vLLM's processes die never ends, so this checks every `DEATH_POLL_S` if they live.
        """
        task = asyncio.ensure_future(call)
        try:
            async with asyncio.timeout(timeout_s):
                while not (await asyncio.wait({task}, timeout=DEATH_POLL_S))[0]:
                    if self._llm is None or self._llm.errored:
                        raise EngineError("vLLM's core, or a process of it, has died, or was shut down")
                return await task
        except TimeoutError:
            raise EngineError(f"vLLM did not answer within {timeout_s:.0f} s") from None
        except GrpoDistError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises
            raise EngineError(f"vLLM failed: {type(error).__name__}: {error}") from None
        finally:
            task.cancel()

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        longest = self.settings.max_model_len - 1
        if not 0 < len(prompt) <= longest:
            raise BatchError(
                f"a prompt of {len(prompt)} tokens: the engine takes 1 to {longest} "
                f"(actor_rollout_ref.rollout.max_model_len={self.settings.max_model_len})"
            )
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            raise BatchError(  # it would kill vLLM
                f"prompt ids {min(prompt)}..{max(prompt)} leave the model's vocabulary of {self._vocab_size}: "
                "tokenizer and model do not belong together"
            )


def response_routes(recorded: np.ndarray | None) -> np.ndarray | None:
    """Return `Response.routes`, from the experts of all tokens but the last one."""
    return None if recorded is None else np.concatenate([recorded, unknown_routes(1, recorded)])


def _response(output: Any) -> Response:
    versions: list[int] = []
    for span in output.weight_versions or ():
        number = -1 if span.version == "default" else int(span.version)  # before the first sync
        versions.extend([number] * (span.end - span.start))
    return Response(
        list(output.token_ids),
        list(output.logprobs.logprobs),
        output.finish_reason == "length",
        versions,
        stop=output.stop_reason if isinstance(output.stop_reason, str) else None,  # a number is a token's id
        routes=response_routes(output.routed_experts),
    )


def _sampling_params(sampling: SamplingSettings, stop_token_ids: list[int]) -> SamplingParams:
    options = asdict(sampling) | {"stop": list(sampling.stop), "bad_words": list(sampling.bad_words)}
    options["routed_experts_prompt_start"] = options.pop("routes_from")
    try:
        return SamplingParams(
            **options,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            stop_token_ids=[] if sampling.ignore_eos else stop_token_ids,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except (ValueError, VLLMError) as error:
        raise ConfigError(f"actor_rollout_ref.rollout: vLLM refuses the sampling settings: {error}") from None


def _stop_token_ids(model_config: Any) -> list[int]:
    named = [model_config.hf_text_config.eos_token_id, model_config.try_get_generation_config().get("eos_token_id")]
    ids: list[int] = []
    for value in named:
        ids.extend(value if isinstance(value, list) else [value] if value is not None else [])
    return sorted(set(ids))
