"""What an update asks of a GPU, counted without one: `make bench` compares the counts with benchmarks/gpu_counts.json.

    python -m benchmarks.gpu_counts             counts, compares, estimates; exit code 1 if a count grew
    python -m benchmarks.gpu_counts --write     makes the counts the baseline

The engine's own update runs on tensors that have sizes and no memory (meta_engine.py), so the counts are the same on
every machine with these versions of torch and transformers. The times that are expected of them are a simple model.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import record, workload
from benchmarks.device_counter import Counts
from benchmarks.gpu_check.scale import QWEN3_06B, Groups
from benchmarks.meta_engine import count_update

BASELINE = record.ROOT / "benchmarks/gpu_counts.json"
TOLERANCE = 0.01
QWEN3_8B = QWEN3_06B | {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
GROUPS = Groups(groups=4, n=8, prompt=1024, response=1920)  # of `update_16k` of gpu_check: 16,384 tokens each

# The model of time; docs/performance.md says which of these numbers were measured, and which are assumed.
PEAK = 989e12  # operations per second of an H100 in bf16, by NVIDIA
ATTENTION_RATE = 219e12  # of FlexAttention forward and backward, measured: 1.27e12 in 5.8 ms at 16,384 tokens
BANDWIDTH = 2.6e12  # bytes per second that element-wise kernels of a large tensor reach
LINK = 350e9  # bytes per second between the GPUs of a machine, by NCCL
LAUNCH_S = 33e-6  # of the CPU for one kernel: an update in micro-batches of 2,048 tokens took 1.7 s for 52,127
MEASURED = {"Qwen3-0.6B, 1 GPU": "25,227 tokens/s, 12.3 % (16.0 % of a large product's rate)"}
PUBLISHED = (
    "torchtitan, Llama 3 8B on 8 H100, tokens/s and GPU: eager 5,762, compiled 6,667",
    "prime-rl, Qwen3-0.6B on 1 H100, 16k tokens, recomputed, FlashAttention 3: 11,896 tokens/s, MFU 11.1 %",
    "prime-rl, 4B, 16k tokens: MFU 13.9 %",
)


@dataclass(frozen=True)
class Case:
    """An update that is counted.

    Attributes:
        name: of the model and the GPUs.
        config: of the model.
        ranks: GPUs that hold the weights together.
        product_rate: operations per second of its products in bf16: measured for the layers of 0.6B, assumed for 8B.
        compiled: with `use_torch_compile`.
    """

    name: str
    config: Mapping[str, Any]
    ranks: int
    product_rate: float
    compiled: bool = False

    @property
    def title(self) -> str:
        """The name, and how the layers run."""
        return f"{self.name}, {'compiled' if self.compiled else 'eager'}"


CASES = [
    Case(name, config, ranks, rate, compiled)
    for name, config, ranks, rate in (
        ("Qwen3-0.6B, 1 GPU", QWEN3_06B, 1, 578e12),
        ("Qwen3-8B, 8 GPUs", QWEN3_8B, 8, 700e12),
    )
    for compiled in (False, True)
]


@dataclass(frozen=True)
class Counted:
    """The counts of an update of several micro-batches, and what is useful of it.

    Attributes:
        layer: of one layer in all passes.
        passes: from the inputs' arrival to the end of the backward pass, of all micro-batches.
        inputs: of making and sending the micro-batches.
        step: of the rest.
        tokens: of a micro-batch.
        groups: micro-batches.
        useful: operations that are useful.
    """

    layer: Counts
    passes: Counts
    inputs: Counts
    step: Counts
    tokens: int
    groups: int
    useful: float

    def numbers(self) -> dict[str, float]:
        """The counts by the names of the table, of which none should grow."""
        whole = self.passes + self.inputs + self.step
        each = 1 / self.groups
        return {
            "kernels a layer and micro-batch": self.layer.launches * each,
            "kernels a micro-batch": self.passes.launches * each,
            "kernels of the optimizer step": self.step.launches,
            "element-wise bytes a token and layer": self.layer.bytes * each / self.tokens,
            "element-wise bytes a token": self.passes.bytes * each / self.tokens,
            "element-wise bytes of the optimizer step": self.step.bytes,
            "products, TFLOP a micro-batch": (self.passes.flops - self.passes.attention_flops) * each / 1e12,
            "attention, TFLOP a micro-batch": self.passes.attention_flops * each / 1e12,
            "host waits between forward and backward": self.passes.waits * each,
            "host waits of the optimizer step": self.step.waits,
            "copies to the GPU a micro-batch": self.inputs.copies * each,
            "of these, not non_blocking": self.inputs.blocking * each,
            "bytes of these copies": self.inputs.copied * each,
            "collectives a step": whole.collectives,
            "bytes of collectives a step": whole.sent,
        }


def count(config: Mapping[str, Any], groups: Groups, *, ranks: int = 1, compiled: bool = False) -> Counted:
    """Count an update of a model: from one of two and one of three layers, as all layers are alike."""
    data = workload.batch(groups.groups, groups.n, groups.prompt, groups.response, config["vocab_size"], equal=True)
    plans: dict[Any, Any] = {}
    options: dict[str, Any] = {"tokens": groups.tokens, "ranks": ranks, "compiled": compiled, "plans": plans}
    (two, useful_two), (three, useful_three) = (
        count_update({**config, "num_hidden_layers": layers}, data, **options) for layers in (2, 3)
    )
    more = config["num_hidden_layers"] - 3
    layer = {phase: three.phases[phase] - two.phases[phase] for phase in three.phases}
    of = {phase: three.phases[phase] + layer[phase] * more for phase in three.phases}
    useful = useful_three + (useful_three - useful_two) * more
    return Counted(layer["pass"], of["pass"], of["inputs"], of["step"], groups.tokens, groups.groups, useful)


def expected(case: Case, counted: Counted) -> dict[str, float]:
    """Expect the time of an update from its counts.

    The CPU launches kernels while the GPU computes, and links carry weights while it does: the slowest of them decides.
    """
    work = counted.passes + counted.step
    times = {
        "products, ms": (work.flops - work.attention_flops) / case.product_rate,
        "attention, ms": work.attention_flops / ATTENTION_RATE,
        "element-wise, ms": work.bytes / BANDWIDTH,
        "launches, ms": work.launches * LAUNCH_S,
        "collectives, ms": work.sent / LINK,
    }
    gpu = sum(list(times.values())[:3])
    seconds = max(gpu, times["launches, ms"], times["collectives, ms"])
    each = {name: 1e3 * time / counted.groups for name, time in times.items()}
    speed = counted.groups * counted.tokens / seconds
    return each | {"tokens/s and GPU": speed, "MFU, % of 989 TFLOP/s": 100 * counted.useful / seconds / PEAK}


def compare(now: Mapping[str, float], then: Mapping[str, float]) -> list[str]:
    """The counts that grew by more than `TOLERANCE`, or are gone."""
    gone = [f"{name} is no longer counted" for name in then.keys() - now.keys()]
    grown = [
        f"{name}: {then[name]:,.6g} -> {value:,.6g}"
        for name, value in now.items()
        if name in then and not value <= then[name] * (1 + TOLERANCE)
    ]
    return grown + gone


def tables(counted: Mapping[str, Counted]) -> str:
    """The counts, and the times that are expected of them."""
    parts = {case.title: case for case in CASES}
    numbers = {title: counts.numbers() for title, counts in counted.items()}
    times = {title: expected(parts[title], counts) for title, counts in counted.items()}
    shown = []
    for heading, columns in (("Counts", numbers), ("Expected of them, a micro-batch", times)):
        names = next(iter(columns.values()))
        rows = [{heading: name, **{title: of[name] for title, of in columns.items()}} for name in names]
        shown.append(record.table(f"{heading} (micro-batches of {GROUPS.tokens:,} tokens)", rows))
    measured = [f"measured: {name}, eager: {text}" for name, text in MEASURED.items()]
    return "\n".join([*shown, *measured, *PUBLISHED])


def main() -> None:
    """Count, compare, print; exit with 1 if a count grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="make the counts the baseline")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    counted = {}
    for case in CASES:
        print(f"{case.title} ...", file=sys.stderr)
        counted[case.title] = count(case.config, GROUPS, ranks=case.ranks, compiled=case.compiled)
    print(tables(counted))
    now = {title: counts.numbers() for title, counts in counted.items()}
    versions = {name: record.machine()[name] for name in record.PACKAGES}
    if arguments.write:
        BASELINE.write_text(json.dumps({"versions": versions, "counts": now}, indent=2) + "\n")
        return
    baseline = json.loads(BASELINE.read_text())
    grown = [
        f"{title}: {line}" for title, then in baseline["counts"].items() for line in compare(now.get(title, {}), then)
    ]
    if grown and baseline["versions"] != versions:
        print(f"The baseline was counted with {baseline['versions']}, not {versions}.")
    print("\n".join(["", *grown, f"{len(grown)} counts grew"] if grown else ["", "no count grew"]))
    sys.exit(bool(grown))


if __name__ == "__main__":
    main()
