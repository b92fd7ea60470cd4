"""How far the probabilities of an engine's tokens are from those that the trainer computes for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from benchmarks.throughput import engine_settings, kill, spawn
from grpo_dist.data import load_prompts, load_tokenizer, tokenize_prompts
from grpo_dist.data.tokenize import TokenizedPrompt
from grpo_dist.engines.settings import PassLimits, RankSettings, SamplingSettings
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.workers.gang import Gang, PolicyWorker
from grpo_dist.workers.rollout import RolloutGroup, RolloutWorker
from tests.worker_settings import model_settings, policy_settings

PROMPTS, N, PROMPT_LENGTH, RESPONSE_LENGTH = 16, 4, 96, 32
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def compare(path: str, threads: int) -> list[dict[str, Any]]:
    """For each type, one engine and one trainer rank that hold the model as a run of that type has them."""
    return [_compare(path, threads, dtype) for dtype in DTYPES]


def _compare(path: str, threads: int, dtype: str) -> dict[str, Any]:
    of_engine, of_trainer = log_probs(path, threads, sampler=dtype, trainer=dtype)
    difference = (of_engine.exp() - of_trainer.exp()).abs()
    return {
        "type": dtype,
        "responses": PROMPTS * N,
        "tokens": len(difference),
        "mean |p_vllm - p_trainer|": float(difference.mean()),
        "max": float(difference.max()),
        "mean p_vllm": float(of_engine.exp().mean()),
        "mean log p_vllm - log p_trainer": float((of_engine - of_trainer).mean()),
    }


def log_probs(path: str, threads: int, *, sampler: str, trainer: str, head: str | None = None) -> tuple[Tensor, Tensor]:
    """(log-probs of sampled tokens by an engine, by a trainer rank), each with the model in a type of its own.

    Args:
        path: of the model.
        threads: of each.
        sampler: "fp32", "bf16" or "fp16"; the same of `trainer`, whose weights are float32.
        head: `actor_rollout_ref.model.head_dtype`.
    """
    engine = spawn("rollout", RolloutWorker, (), threads, max_concurrency=1000)
    settings = engine_settings(path, dtype=DTYPES[sampler])
    run(RolloutGroup(engine).start([replace(settings, model=settings.model.replaced(head_dtype=head))]))
    sampled = _sample(engine, _prompts(path))
    rank = spawn("ref", PolicyWorker, (0, 1), threads)
    gang = Gang(rank)
    run(gang.start(_policy_settings(path, threads, trainer, head)))
    computed = run(gang.compute_log_probs("log_probs", sampled))
    of_engine = sampled.fetch(("rollout_log_probs",))["rollout_log_probs"].values
    of_trainer = computed.fetch(("ref_log_probs",))["ref_log_probs"].values
    kill([engine, rank])
    return of_engine, of_trainer


def _prompts(path: str) -> list[TokenizedPrompt]:
    """Questions of the built-in task."""
    chosen = {"prompt_key": "prompt", "reward_fn_key": "data_source", "max_samples": PROMPTS, "shuffle_seed": 0}
    prompts = load_prompts(["builtin:arithmetic/train"], key="prompts", **chosen)  # type: ignore[arg-type]
    tokenizer = load_tokenizer(path, trust_remote_code=False)
    tokenized, _ = tokenize_prompts(
        prompts,
        tokenizer,
        max_prompt_length=PROMPT_LENGTH,
        truncation="error",
        filter_overlong_prompts=False,
        apply_chat_template_kwargs={},
    )
    return tokenized


def _sample(engine: WorkerGroup, prompts: Sequence[TokenizedPrompt]) -> DataProtoRef:
    """All at the same time, as in a run."""
    calls = []
    for each in prompts:
        number = each.prompt.index
        sampling = SamplingSettings(N, 1.0, 1.0, -1, RESPONSE_LENGTH, number, ignore_eos=True)
        calls.append(engine.submit_for_data(0, "generate", "generate", str(number), each.token_ids, sampling))
    labels = [label for label, *_ in engine.gather(calls)]
    return DataProtoRef.concat([call.handle(label) for call, label in zip(calls, labels, strict=True)])


def _policy_settings(path: str, threads: int, dtype: str, head: str | None) -> RankSettings:
    model = model_settings(path, compute_dtype=dtype, head_dtype=head)
    forward, columns = PassLimits("actor_rollout_ref.rollout.log_prob_", 8), ("ref_log_probs",)
    return policy_settings(model, num_threads=threads, forward=forward, columns=columns, optimizer=None)
