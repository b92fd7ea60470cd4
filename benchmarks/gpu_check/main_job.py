"""Whole runs as a user starts them: the main job, and settings that change how engine and actor work together."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu_check.gpu import used_gib
from benchmarks.gpu_check.work import Work
from benchmarks.peak import Peak

# In six steps the built-in job's score goes from a third to more than four fifths.
LEAST_RISE = 0.2
MODEL, ACTOR, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SEEDS = (f"{ROLLOUT}.deterministic=true",)
FACTORS = (f"{MODEL}.lora_rank=8", f"{MODEL}.lora.merge=false")
SLEEP = (f"{ROLLOUT}.free_cache_engine=true",)
FLOAT32 = (f"{ROLLOUT}.dtype=fp32", f"{ACTOR}.fsdp_config.dtype=fp32")
STORE = f"{ROLLOUT}.checkpoint_engine"
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


def main_job(work: Work) -> None:
    """A few steps of the built-in job on this machine, from the command to its exit code."""
    if rows := _run(work, work.scale.job):
        first, last = (float(row["critic/score/mean"]) for row in (rows[0], rows[-1]))
        rise, note = f"rise of the score in {len(rows)} steps", f"{first:.3g} to {last:.3g}"
        work.found.at_least(rise, last - first, LEAST_RISE, note=note)


def changed_job(work: Work, overrides: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Three steps of it. The run itself compares the first log-probs of engine and trainer, and ends where they differ.

    Where samples are seeded, the first ones are those of a second run.
    """
    few = (*work.scale.job, "trainer.total_training_steps=3", "trainer.test_freq=-1", "trainer.val_before_train=false")
    samples: list[list[str]] = []
    for _ in range(1 + (overrides == SEEDS)):
        if not _run(work, [*few, *overrides], environment, samples):
            return
    if len(samples) > 1:
        others = sum(one != other for one, other in zip(*samples, strict=True))
        work.found.right("responses of the first step that differ in a second run", others, 0)


in_turns = functools.partial(changed_job, overrides=(*SLEEP, f"{ACTOR}.fsdp_config.param_offload=true"))
factors = functools.partial(changed_job, overrides=(*FACTORS, *SLEEP))
seeds = functools.partial(changed_job, overrides=SEEDS)
seeds_v1 = functools.partial(changed_job, overrides=SEEDS, environment=V1)
head = functools.partial(changed_job, overrides=(f"{MODEL}.head_dtype=fp32",))
changes = functools.partial(changed_job, overrides=(f"{STORE}.backend=object_store", f"{STORE}.changes_only=true"))
float32 = functools.partial(changed_job, overrides=FLOAT32)
eight_bit = functools.partial(
    changed_job, overrides=(f"{ACTOR}.optim.optimizer=AdamW8bit", f"{ACTOR}.fsdp_config.model_dtype=bf16")
)


def routes(work: Work) -> None:
    """A mixture of experts with random weights, whose routes the engine records and the actor replays."""
    import torch
    import transformers

    from grpo_dist.assets import resolve_model_path

    builtin = resolve_model_path("builtin:tiny-qwen3")
    known = transformers.AutoConfig.from_pretrained(builtin).to_dict()
    config = transformers.Qwen3MoeConfig(**{key: known[key] for key in known if key != "model_type"} | EXPERTS)
    torch.manual_seed(0)
    folder = work.folder / "experts"
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(builtin).save_pretrained(folder)
    changed_job(work, [f"{MODEL}.path={folder}", f"{ACTOR}.router_replay.mode=R3", f"{ROLLOUT}.kv_cache_memory_gib=2"])


def _run(
    work: Work,
    overrides: Sequence[str],
    environment: Mapping[str, str] | None = None,
    samples: list[list[str]] | None = None,
) -> list[dict[str, Any]]:
    """The rows of a run's metrics, [] if it fails; what its first step has sampled is appended to `samples`."""
    from grpo_dist.tracking.jsonl import METRICS, read_metrics

    run_dir = work.folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    cluster = "single_gpu" if work.device == "cuda" else "cpu"
    command = [sys.executable, "-m", "grpo_dist.main", "algorithm.adv_estimator=grpo", f"cluster={cluster}"]
    command += [f"trainer.default_local_dir={run_dir}", "ray_kwargs.ray_init.address=local", *overrides]
    started = time.perf_counter()
    with Peak(lambda: used_gib() or 0.0, 0.5) as memory:
        code = subprocess.run(command, env=os.environ | (environment or {}), check=False).returncode
    work.found.right("exit code", abs(code), 0)
    if work.device == "cuda":
        work.found.note("peak of the GPU's memory", memory.largest, "GiB")
    work.found.note("from the command to its end", time.perf_counter() - started, "s")
    if code:
        return []
    rows = [row for row in read_metrics(run_dir / METRICS) if "critic/score/mean" in row]
    work.found.note("a step", float(rows[-1]["perf/time_per_step"]), "s")
    difference = float(rows[-1]["training/rollout_probs_diff_mean"])
    work.found.note("mean difference of token probability, trainer against vLLM", difference)
    if samples is not None:
        samples.append(sorted((run_dir / "rollouts" / "1.jsonl").read_text(encoding="utf-8").splitlines()))
    shutil.rmtree(run_dir)
    return rows
