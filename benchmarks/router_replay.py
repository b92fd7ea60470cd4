"""What recording experts costs an engine, and what replaying them saves the trainer, on this machine's CPU.

    python -m benchmarks.router_replay [--rounds 5] [--layers 2] [--dtype bf16]

Two engines of the same random mixture of experts (Qwen3-MoE, 2 of 8 experts) sample the same requests in
turns, one of them with its experts recorded: the ratio of tokens per second is that of the medians. Then the trainer
computes the log-probs of what was sampled, with the recorded experts and without: the mean of the k3 estimate of
KL(sampler || trainer), over all tokens, with a 95 % interval by resampling responses.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from grpo_dist.engines.rendezvous import alone
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.vllm import vllm_engine
from grpo_dist.protocol import DataProto
from grpo_dist.protocol.sequences import PROMPT_ROUTES, ROUTES
from grpo_dist.workers.rollout import group_batch
from tests.engines.vllm.test_engine import sampling
from tests.models import EXPERTS, random_model
from tests.worker_settings import engine_settings, model_settings

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
SAMPLING = sampling(n=8, max_tokens=64, temperature=1.0, ignore_eos=True)
RESAMPLES = 1000


def serve(path: str, dtype: str, records: bool, orders: Any) -> None:
    """A process with an engine: for each order it samples all prompts, and answers with the seconds and the groups."""

    async def run() -> None:
        engine = vllm_engine(engine_settings(path, records_routes=records, dtype=DTYPES[dtype]))
        await engine.start()
        while (prompts := orders.recv()) is not None:
            begun = time.perf_counter()
            groups = await asyncio.gather(*(engine.generate(prompt.tolist(), SAMPLING) for prompt in prompts))
            seconds = time.perf_counter() - begun
            rows = zip(prompts, groups, strict=True)
            orders.send((seconds, [group_batch(str(i), prompt, group or []) for i, (prompt, group) in enumerate(rows)]))
        engine.shutdown()

    asyncio.run(run())


def sampled(path: str, dtype: str, rounds: int) -> tuple[dict[bool, list[float]], DataProto]:
    """Tokens per second of each round, with experts recorded and without; and the first round's responses."""
    context, pipes, processes = get_context("spawn"), {}, []
    for records in (False, True):
        pipes[records], other = context.Pipe()
        processes.append(context.Process(target=serve, args=(path, dtype, records, other), daemon=True))
        processes[-1].start()
        other.close()  # so that an engine that has failed is noticed
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 96, 8 + i).astype(np.int32) for i in range(16)]
    rates: dict[bool, list[float]] = {False: [], True: []}
    data = DataProto()
    for number in range(rounds + 1):  # the first one warms up
        for records in sorted(pipes, reverse=bool(number % 2)):
            pipes[records].send(prompts)
            seconds, groups = pipes[records].recv()
            if number:
                rates[records].append(len(prompts) * SAMPLING.n * SAMPLING.max_tokens / seconds)
            elif records:
                data = DataProto.concat(groups)
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send(None)
        process.join()
    return rates, data


def mismatch(engine: FSDPEngine, data: DataProto) -> str:
    """The mean k3 of the tokens, in nats, with its interval."""
    log_probs = engine.compute_log_probs(data, PassLimits("", 64))
    ratio = (log_probs.values - data["rollout_log_probs"].values).double()
    k3 = (ratio.expm1() - ratio).reshape(len(data), -1).mean(1).numpy()  # all responses are of one length
    drawn = np.random.default_rng(0).choice(k3, (RESAMPLES, len(k3))).mean(1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return f"{k3.mean():.3g} ({low:.3g} to {high:.3g}), largest difference of a log-prob {ratio.abs().max():.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    options = parser.parse_args()
    os.nice(15)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the engines, as in a run; threads that wait for each other spin
    with tempfile.TemporaryDirectory() as folder:
        path = random_model("Qwen3Moe", Path(folder), head_dim=32, num_hidden_layers=options.layers, **EXPERTS)
        rates, data = sampled(path, options.dtype, options.rounds)
        without, recording = (statistics.median(rates[records]) for records in (False, True))
        print(f"tokens/s without {without:.0f}, recording {recording:.0f}: {recording / without:.3f}", flush=True)
        columns = [data[name].values for name in (PROMPT_ROUTES, ROUTES)]
        print(
            f"bytes of experts a token: {sum(c.nbytes for c in columns) / sum(len(c) for c in columns):.0f}", flush=True
        )
        settings = model_settings(path, compute_dtype=options.dtype, replays_routes=True)
        free = DataProto({name: column for name, column in data.batch.items() if name not in (PROMPT_ROUTES, ROUTES)})
        with alone("cpu"):
            engine = FSDPEngine(settings, device="cpu", temperature=SAMPLING.temperature)
            print(f"KL, routers choose:   {mismatch(engine, free)}", flush=True)
            print(f"KL, experts replayed: {mismatch(engine, data)}", flush=True)


if __name__ == "__main__":
    main()
