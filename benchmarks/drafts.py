"""Engine steps and seconds with drafts from earlier responses, and without, on the same seeds, in turns.

usage: python -m benchmarks.drafts [--model FOLDER] [--prompts 4] [--n 8] [--tokens 256] [--epochs 3]
                                   [--draft-tokens 8] [--temperature 1] [--dtype float32] [--threads 2] [--output FILE]

Two engines, each in a process of its own, sample n responses to each prompt at once; each epoch has other seeds.
One drafts; its table knows the responses of the epochs before. Tail: the steps with at most a quarter of all sequences
left. `same` is the share of responses with the same tokens, and `nats` the largest difference of their log-probs.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import record
from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.tokenizer import load_tokenizer
from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import EngineSettings, SamplingSettings
from grpo_dist.runtime.cluster import prepare

# Most answers are short and some are long, so that a batch has a tail.
QUESTIONS = (
    "A baker makes 12 loaves an hour. How many loaves does he make in 7 hours?",
    "What is 45 - 27? Answer with the number only.",
    "How far does a train go in 2 hours at 60 km an hour? Answer with the number only.",
    "Name a colour. Answer with one word.",
)
TAIL_SHARE = 4


class Engine:
    """An engine in a process, whose steps are timed."""

    def __init__(self, settings: EngineSettings) -> None:
        from grpo_dist.engines.vllm import vllm_engine

        self.engine = vllm_engine(settings)
        self.steps: list[tuple[int, float]] = []  # running sequences and seconds

    async def start(self) -> None:
        """Load the model."""
        await self.engine.start()
        local: Any = self.engine._llm  # type: ignore[attr-defined]
        step = local.engine.step

        def timed() -> Any:
            started = time.perf_counter()
            outputs = step()
            running, _ = local._core.scheduler.get_request_counts()
            self.steps.append((running, time.perf_counter() - started))
            return outputs

        local.engine.step = timed

    async def sample(self, prompts: list[list[int]], sampling: SamplingSettings) -> tuple[list[Response], float, list]:
        """Responses to all prompts, the seconds that they took, and the steps."""
        self.steps = []
        started = time.perf_counter()
        groups = await asyncio.gather(
            *(self.engine.generate(prompt, sampling, str(i)) for i, prompt in enumerate(prompts))
        )
        seconds = time.perf_counter() - started
        return [response for group in groups for response in group or []], seconds, self.steps

    async def counts(self) -> dict[str, int]:
        """What drafts have done."""
        return asdict(await self.engine.draft_counts())  # type: ignore[attr-defined]


def prompts_of(model: str, count: int) -> list[list[int]]:
    """The questions in the model's chat template, or what its tokenizer makes of them."""
    tokenizer = load_tokenizer(model, trust_remote_code=False)
    asked = [QUESTIONS[i % len(QUESTIONS)] for i in range(count)]
    if tokenizer.chat_template is None:
        return [list(tokenizer(question)["input_ids"]) for question in asked]
    turns = [[{"role": "user", "content": question}] for question in asked]
    template = tokenizer.apply_chat_template
    return [[*template(turn, add_generation_prompt=True, return_dict=False)] for turn in turns]  # type: ignore[list-item]


def row(epoch: int, plain: Any, drafted: Any, sequences: int, accepted: float) -> dict[str, Any]:
    """What an epoch has cost on both engines."""
    (responses, seconds, steps), (others, seconds_drafted, steps_drafted) = plain, drafted

    def tail(each: list[tuple[int, float]]) -> list[float]:
        return [length for running, length in each if running <= sequences / TAIL_SHARE]

    pairs = [(a, b) for a, b in zip(responses, others, strict=True) if a.token_ids == b.token_ids]
    differences = [abs(p - q) for a, b in pairs for p, q in zip(a.log_probs, b.log_probs, strict=True)]
    return {
        "epoch": epoch,
        "tokens": sum(len(response.token_ids) for response in responses),
        "accepted": accepted,
        "steps": len(steps),
        "with drafts": len(steps_drafted),
        "fewer": len(steps) / len(steps_drafted),
        "tail": len(tail(steps)),
        "tail with drafts": len(tail(steps_drafted)),
        "tail fewer": len(tail(steps)) / max(len(tail(steps_drafted)), 1),
        "tail faster": sum(tail(steps)) / max(sum(tail(steps_drafted)), 1e-9),
        "faster": seconds / seconds_drafted,
        "same": len(pairs) / len(responses),
        "nats": max(differences, default=0.0),
    }


def main() -> None:
    """Measure, print and write."""
    address = prepare("local")  # before Ray is imported
    from benchmarks import throughput
    from grpo_dist.runtime.connection import connect

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:tiny-qwen3")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/drafts.json"))
    asked = parser.parse_args()
    result = record.begun()
    connect(address, None)
    model = resolve_model_path(asked.model)
    prompts = prompts_of(model, asked.prompts)
    longest = max(map(len, prompts)) + asked.tokens
    plain = throughput.engine_settings(model, dtype=asked.dtype, longest=longest)
    drafting = replace(plain, rollout=plain.rollout.replaced(draft_tokens=asked.draft_tokens))
    engines = [
        throughput.spawn(f"engine{i}", Engine, (each,), asked.threads) for i, each in enumerate((plain, drafting))
    ]
    for engine in engines:
        engine.call(0, "start", "start")
    rows, before = [], {"drafted": 0, "accepted": 0}
    for epoch in range(asked.epochs):
        sampling = SamplingSettings(asked.n, asked.temperature, 1.0, -1, asked.tokens, seed=1000 * epoch)
        turns = (1, 0) if epoch % 2 else (0, 1)
        runs = {turn: engines[turn].call(0, "sample", "sample", prompts, sampling) for turn in turns}
        counts = engines[1].call(0, "counts", "counts")
        share = (counts["accepted"] - before["accepted"]) / max(counts["drafted"] - before["drafted"], 1)
        rows.append(row(epoch + 1, runs[0], runs[1], asked.prompts * asked.n, share))
        before = counts
    result["drafts"] = rows
    name = f"{asked.prompts} prompts x {asked.n}, at most {asked.tokens} tokens, {asked.dtype}"
    print(record.table(name, rows))
    record.write(
        asked.output, result, {f"drafts/epoch {each['epoch']}, tail steps": each["tail fewer"] for each in rows}
    )


if __name__ == "__main__":
    main()
