"""vLLM without us: the `LLM` with our engine's settings and prompts, under both of its model runners.

vLLM 0.32 has two, V1 and V2, and takes V2 on a GPU unless the model or the settings speak against it.
VLLM_USE_V2_MODEL_RUNNER in the environment of a run, 0 or 1, decides for its engines too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_check.results import SHOWN_REASON, Findings
from benchmarks.gpu_check.roles import OURS, run_config
from benchmarks.gpu_check.scale import SCALES
from benchmarks.gpu_check.work import Work

if TYPE_CHECKING:
    import torch.distributed as dist

    from benchmarks.throughput import Offline

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
# Samplings of which the fastest counts; a greedy one comes before.
ROUNDS = 2
LIMIT_S = 170.0


def vllm_alone(work: Work) -> None:
    """Tokens per second with the runner that our engines have, and with the other one; and whether the two agree."""
    from grpo_dist.engines.vllm.starting import quiet_environment
    from grpo_dist.plan.placement import placement

    quiet_environment(work.device)  # this and the threads: before the processes import torch
    threads = {}
    if work.device == "cpu":
        threads = {"OMP_NUM_THREADS": str(placement(run_config(work)).num_threads["rollout"])}
    from benchmarks.gpu_check.ranks import run_ranks

    scale = next(name for name, scale in SCALES.items() if scale is work.scale)
    arguments = {"device": work.device, "scale": scale, "folder": str(work.folder)}
    note_runners(work, *run_ranks("benchmarks.gpu_check.runners:side", [threads] * 2, arguments, LIMIT_S))


def note_runners(work: Work, own: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """The figures of the runner that is taken by itself, and of the other one, which may be refused."""
    work.found.note("vLLM alone: tokens", own["rate"], "/s", note=f"model runner {own['runner']}")
    ours = work.figure_of("roles", OURS)
    if ours is None:
        work.found.missing("our rollout group, of vLLM alone", "the part roles has not measured it")
    else:
        work.found.note("our rollout group, of vLLM alone", ours / own["rate"])
    name = f"vLLM alone, model runner {other['runner']}: tokens"
    if "refused" in other:
        work.found.missing(name, other["refused"])
        return
    work.found.note(name, other["rate"], "/s", note=f"{VARIABLE}={int(other['runner'] == 'V2')}")
    same, off = agreement(own["sampled"], other["sampled"])
    total = sum(len(tokens) for tokens, _ in own["sampled"])
    work.found.note("greedy tokens before V1 and V2 differ", same / total, note=f"{same:,} of {total:,}")
    work.found.note("largest difference of their log-probs", off, "nats")


def agreement(first: list[Any], second: list[Any]) -> tuple[int, float]:
    """How many tokens two greedy samplings share, each response up to where they differ; of these, how far log-probs
    are apart at most. Behind the first other token two responses have nothing to do with each other.

    Args:
        first: of each response its tokens and their log-probs.
        second: as `first`.
    """
    same, off = 0, 0.0
    for (tokens, log_probs), (others, other_log_probs) in zip(first, second, strict=True):
        pairs = list(zip(tokens, others, strict=True))
        shared = next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))
        same += shared
        differences = zip(log_probs[:shared], other_log_probs[:shared], strict=True)
        off = max([off, *(abs(a - b) for a, b in differences)])
    return same, off


def side(store: dist.TCPStore, rank: int, *, device: str, scale: str, folder: str) -> dict[str, Any]:
    """One process: rank 0 with vLLM's own choice of a runner; rank 1 afterwards with the other one.

    Rank 0 keeps its memory until rank 1 is done: memory that is freed while another engine measures how much there is
    makes that engine fail.
    """
    from benchmarks.throughput import Load, Offline
    from grpo_dist.plan.plan import make_plan

    work = Work(device, SCALES[scale], Path(folder), Findings(holds=False))
    config = run_config(work)
    load = Load(*astuple(work.scale.rollout))
    settings = make_plan(config).engine(0)
    if rank == 0:
        offline = Offline(settings, load)
        store.wait(["imported"])  # or that would disturb the measurement
        runner = "V2" if offline.llm.llm_engine.vllm_config.use_v2_model_runner else "V1"
        found = _sampled(offline, runner)
        store.set("runner", runner)
        store.wait(["done"])
        return found
    import vllm  # noqa: F401 - while the other engine starts, and not after it

    store.set("imported", "")
    runner = "V1" if store.get("runner") == b"V2" else "V2"
    os.environ[VARIABLE] = str(int(runner == "V2"))
    try:
        return _sampled(Offline(settings, load), runner)
    except Exception as error:  # noqa: BLE001 - vLLM's processes and pydantic raise errors of many kinds
        return {"runner": runner, "refused": " ".join(str(error).split())[:SHOWN_REASON]}
    finally:
        store.set("done", "")


def _sampled(offline: Offline, runner: str) -> dict[str, Any]:
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0.0,
        max_tokens=offline.load.response_length,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
    )
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in offline.load.token_ids()]
    outputs: list[Any] = [each.outputs[0] for each in offline.llm.generate(prompts, greedy, use_tqdm=False)]
    sampled = [[list(output.token_ids), list(output.logprobs.logprobs)] for output in outputs]
    rate = offline.load.tokens / min(offline.run() for _ in range(ROUNDS))
    return {"runner": runner, "rate": rate, "sampled": sampled}
