"""Tokens per second of our rollout group, of vLLM offline and of Hugging Face, each in a process of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import ray

from grpo_dist.engines.settings import EngineSettings, SamplingSettings
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.placement import slots_of
from grpo_dist.runtime.event_loop import TimeLimits, run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.resources import reserve
from grpo_dist.workers.rollout import GroupRequest, RolloutGroup, RolloutWorker
from grpo_dist.workers.scorer import Task

HF_BATCH = 32
MAX_NUM_SEQS = 64
TIMEOUT_S = 1800.0


class Load(NamedTuple):
    """What is sampled: n responses to each prompt, all of a length; lengths in tokens."""

    prompts: int
    n: int
    prompt_length: int
    response_length: int

    @property
    def tokens(self) -> int:
        """Sampled in all."""
        return self.prompts * self.n * self.response_length

    def token_ids(self) -> list[list[int]]:
        """Of the prompts."""
        rng = np.random.default_rng(0)
        return [[int(i) for i in rng.integers(10, 100, self.prompt_length)] for _ in range(self.prompts)]


LOAD = Load(prompts=32, n=4, prompt_length=32, response_length=64)


def compare(models: dict[str, str], threads: int, rounds: int) -> list[dict[str, Any]]:
    """For each model the best of some rounds, taken in turns."""
    rows = []
    for name, path in models.items():
        ways = {"ours": _ours(path, threads), "vllm": _remote(Offline, threads, engine_settings(path), LOAD)}
        ways["hf"] = _remote(HuggingFace, threads, path, threads)
        for sample in ways.values():
            sample()  # warms up
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, sample in ways.items():
                times[way].append(sample())
        rates = {f"{way} tokens/s": LOAD.tokens / min(each) for way, each in times.items()}
        rates |= {"of vllm": min(times["vllm"]) / min(times["ours"]), "of hf": min(times["hf"]) / min(times["ours"])}
        rows.append({"model": name, "responses": LOAD.prompts * LOAD.n, "tokens": LOAD.tokens, **rates})
    return rows


def engine_settings(path: str, *, dtype: str = "float32", longest: int = 128, **changes: Any) -> EngineSettings:
    """An engine on CPU."""
    roles = load_config([])[0].actor_rollout_ref
    limits = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 8192, "kv_cache_memory_gib": 1.0}
    rollout = roles.rollout.replaced(enforce_eager=True, enable_chunked_prefill=False, **limits)
    return EngineSettings(rollout, roles.model.replaced(path=path), "cpu", dtype, longest, longest, seed=0, **changes)


def spawn(role: str, worker_class: type, args: tuple[Any, ...], threads: int, **options: Any) -> WorkerGroup:
    """One process."""
    _, bundles = reserve(slots_of({role: [0]}, {role: (0.01, 0.0)}))
    env = {"OMP_NUM_THREADS": str(threads)}
    return WorkerGroup.spawn(
        role, worker_class, bundles[role], args=[args], env=env, limits=TimeLimits(TIMEOUT_S), **options
    )


def _ours(path: str, threads: int) -> Callable[[], float]:
    workers = spawn("rollout", RolloutWorker, (), threads, max_concurrency=1000)
    group = RolloutGroup(workers)
    run(group.start([engine_settings(path)]))
    return runs_of(group, LOAD)


def runs_of(group: RolloutGroup, load: Load) -> Callable[[], float]:
    """A function that has started engines sample the load, and returns the seconds that it took."""
    sampling = SamplingSettings(load.n, 1.0, 1.0, -1, load.response_length, None, ignore_eos=True)

    async def sample(requests: list[GroupRequest]) -> None:
        await asyncio.gather(*(group.generate(request) for request in requests))

    def seconds() -> float:
        prompts = [np.array(prompt, np.int32) for prompt in load.token_ids()]
        requests = [GroupRequest(f"p{i}", prompt, sampling, Task("", "", {})) for i, prompt in enumerate(prompts)]
        started = time.perf_counter()
        run(sample(requests))
        return time.perf_counter() - started

    return seconds


def _remote(worker_class: type, threads: int, *args: Any) -> Callable[[], float]:
    worker = spawn(worker_class.__name__, worker_class, args, threads)
    return lambda: float(worker.call(0, "run", "run"))


class Offline:
    """vLLM's `LLM`, as one would use it without us."""

    def __init__(self, settings: EngineSettings, load: Load) -> None:
        from grpo_dist.engines.vllm.starting import quiet_environment

        quiet_environment(settings.device)
        from vllm import LLM, SamplingParams

        options: dict[str, Any] = {
            "gpu_memory_utilization": settings.rollout.gpu_memory_utilization,
            "enforce_eager": settings.rollout.enforce_eager,
            "enable_chunked_prefill": settings.rollout.enable_chunked_prefill,
        }
        if settings.device == "cpu":  # as our engine has it there
            options = {"block_size": 32, "kv_cache_memory_bytes": 1 << 30}
            options |= {"enforce_eager": True, "enable_chunked_prefill": False}
        options["dtype"] = settings.dtype
        self.llm = LLM(
            model=settings.model.path,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.rollout.max_num_seqs,
            max_num_batched_tokens=settings.rollout.max_num_batched_tokens,
            skip_tokenizer_init=True,
            **options,
        )
        self.load = load
        self.sampling = SamplingParams(
            n=load.n, max_tokens=load.response_length, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False
        )

    def run(self) -> float:
        """Seconds of all prompts."""
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in self.load.token_ids()]
        started = time.perf_counter()
        self.llm.generate(prompts, self.sampling, use_tqdm=False)
        return time.perf_counter() - started


class HuggingFace:
    """transformers' `generate`, in batches."""

    def __init__(self, path: str, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def run(self) -> float:
        """Seconds of all prompts."""
        import torch

        ids = torch.tensor(LOAD.token_ids()).repeat_interleave(LOAD.n, 0)
        lengths = {"max_new_tokens": LOAD.response_length, "min_new_tokens": LOAD.response_length}
        started = time.perf_counter()
        for part in ids.split(HF_BATCH):
            self.model.generate(part, attention_mask=torch.ones_like(part), do_sample=True, **lengths)
        return time.perf_counter() - started


def kill(groups: Sequence[WorkerGroup]) -> None:
    """End processes whose measurement is over."""
    for group in groups:
        for handle in group.handles:
            ray.kill(handle)
