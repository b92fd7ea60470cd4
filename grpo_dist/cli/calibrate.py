"""`grpo-dist doctor --calibrate`: measures how fast this machine is, for the dry run's estimate of a step.

Processes of their own (probe.py) measure small random models, with the threads and types that roles have. The rates are
those with which `config/step_estimate.py` counts the same work: fitted by least squares of relative errors, none is
negative. A short run shows what a step takes besides.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from grpo_dist.config.load import load_config
from grpo_dist.config.memory import DTYPE_BYTES
from grpo_dist.config.model_shape import model_config_at_hand
from grpo_dist.config.processor import has_bf16, physical_cores
from grpo_dist.config.schema_roles import Device
from grpo_dist.config.step_estimate import OPTIMIZER_BYTES, step_estimate
from grpo_dist.config.step_rates import (
    GPU_SYNC,
    DecodeRates,
    MachineRates,
    PassRates,
    Rates,
    gpu_name,
    machine_key,
    store_rates,
)
from grpo_dist.errors import GrpoDistError

TIMEOUT_S = 300.0
# The built-in job with an engine that answers at once.
FAKED_RUN = (
    "actor_rollout_ref.rollout.name=grpo_dist.engines.fakes:FakeRolloutEngine",
    "trainer.total_training_steps=5",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.resume_mode=disable",
    "trainer.export_hf_model=false",
    "trainer.logger=[]",
)
WARM_UP = 2  # steps that are not counted
# A rate for what takes no time that can be seen.
_FREE = 1e18
Point = Mapping[str, float]


def calibrate(device: str, tell: Callable[[str], None]) -> None:
    """Measure this machine, which must be quiet, and store its rates.

    Raises:
        GrpoDistError: a measurement failed; the message has the end of its output.
    """
    kind: Device = "cuda" if device == "gpu" else "cpu"
    kinds = {}
    for threads, dtype in _kinds(kind):
        tell(f"measuring in {dtype}" + (f" with {threads} thread{'s' * (threads > 1)}" if kind == "cpu" else ""))
        rates = rates_of(_probe(kind, threads, dtype), kind, dtype)
        kinds[f"{threads} {dtype}"] = rates
        tell(f"  {described(rates)}")
    today = date.today().isoformat()
    machine = MachineRates(f"measured here on {today}", kinds, today)
    if kind == "cpu":
        tell("measuring the driver")
        machine = replace(machine, driver_s=_driver_seconds(machine))
        tell(f"  {1e3 * machine.driver_s:.2g} ms a sequence")
    file = store_rates(machine_key(kind, gpu_name() if kind == "cuda" else None), machine)
    tell(f"written to {file}; trainer.dry_run=config estimates steps by it")


def _driver_seconds(machine: MachineRates) -> float:
    """Seconds of a step for each sequence that no phase explains: of a run whose engine answers at once."""
    with tempfile.TemporaryDirectory() as folder:
        _run([sys.executable, "-m", "grpo_dist.main", *FAKED_RUN, f"trainer.default_local_dir={folder}"])
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "timing_s/step" in row][WARM_UP:]
    length = round(median(row["response_length/mean"] for row in steps))
    config, _ = load_config([*FAKED_RUN, f"trainer.expected_response_length={length}"])
    found = step_estimate(config, model_config_at_hand(config.actor_rollout_ref.model.path), machine)
    assert found is not None
    rest = median(row["timing_s/step"] for row in steps) - (found.total - found.phases["generation"])
    return max(0.0, rest / (config.data.train_batch_size * config.actor_rollout_ref.rollout.n))


def _kinds(kind: Device) -> list[tuple[int, str]]:
    """Threads and type of the processes that runs have: the built-in model's, and those of others."""
    if kind == "cuda":
        return [(1, "bf16")]
    return list(dict.fromkeys([(1, "fp32"), (physical_cores(), "bf16" if has_bf16() else "fp32")]))


def described(rates: Rates) -> str:
    """The rates in a line."""
    products = ", ".join(
        f"{flops / 1e9:.3g} at hidden size {size}" for size, flops in sorted(rates.update.flops.items())
    )
    sync = next(iter(rates.sync.values()))
    return (
        f"GFLOP/s of an update {products}; memory {rates.bandwidth / 1e9:.3g} GB/s; decoding step "
        f"{1e3 * rates.decode.step_s:.2g} ms + {1e3 * rates.decode.layer_s:.2g} ms a layer + "
        f"{1e3 * rates.decode.sequence_s:.2g} ms a sequence; weight sync {sync / 1e9:.2g} GB/s"
    )


def _probe(kind: Device, threads: int, dtype: str) -> dict[str, Any]:
    env = {"OMP_NUM_THREADS": str(threads)} if kind == "cpu" else {}
    found = json.loads(_run([sys.executable, "-m", "grpo_dist.cli.probe", kind, dtype], env).splitlines()[-1])
    assert isinstance(found, dict)
    return found


def _run(command: list[str], env: Mapping[str, str] | None = None) -> str:
    """The output of a command.

    Raises:
        GrpoDistError: it failed, or took too long.
    """
    whole = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(command, env=whole, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise GrpoDistError(f"a measurement took longer than {TIMEOUT_S:.0f} s: is this machine busy?") from None
    if done.returncode:
        raise GrpoDistError(f"a measurement failed:\n{(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def rates_of(found: Mapping[str, Any], kind: Device, dtype: str) -> Rates:
    """The rates behind a probe's measurements."""
    number, bandwidth = DTYPE_BYTES[dtype], found["bandwidth"]
    forward = _pass_rates(found["passes"], [point["forward"] for point in found["passes"]], times=1)
    stepped = [OPTIMIZER_BYTES * sum(_matrices(point)) / bandwidth for point in found["passes"]]
    seconds = [max(point["update"] - step, 1e-9) for point, step in zip(found["passes"], stepped, strict=True)]
    update = _pass_rates(found["passes"], seconds, times=3)
    decode = _decode_rates(found.get("decoding", ()), forward, bandwidth, number)
    sync_s, sync = _line(found.get("syncs", ()))
    exchange_s, exchange = _line([{**p, "bytes": p["bytes"] / 2} for p in found.get("exchanges", ())])
    transports = {"object_store": sync} if kind == "cpu" else GPU_SYNC | {"object_store": sync}
    others = {"exchange": exchange, "exchange_s": exchange_s} if "exchanges" in found else {}
    return Rates(bandwidth, forward, update, decode, transports, sync_s if kind == "cpu" else 0.0, **others)


def _matrices(point: Point) -> tuple[float, float]:
    """Numbers in the matrices of the layers, and of the output layer; see probe.py's models."""
    hidden = point["hidden"]
    query, key = _widths(point)
    return point["layers"] * (2 * hidden * (query + key) + 9 * hidden**2), point["vocabulary"] * hidden


def _widths(point: Point) -> tuple[float, float]:
    """Widths of queries and of keys."""
    return max(point["hidden"], 64), max(point["hidden"] // 2, 64)


def _pass_rates(points: Sequence[Point], seconds: Sequence[float], times: int) -> PassRates:
    sizes = sorted({int(point["hidden"]) for point in points})
    rows = []
    for point in points:
        layers, head = _matrices(point)
        prompts, responses = point["prompts"] * point["prompt"], point["sequences"] * point["response"]
        products = 2 * times * (layers * (prompts + responses) + head * responses)
        pairs = prompts * point["prompt"] / 2 + responses * (point["prompt"] + point["response"] / 2)
        attention = 4 * times * point["layers"] * _widths(point)[0] * pairs
        rows.append(
            [
                1.0,
                point["layers"],
                point["sequences"],
                attention,
                *(products * (point["hidden"] == size) for size in sizes),
            ]
        )
    pass_s, layer_s, sequence_s, attention_s, *products_s = fitted(rows, seconds)
    flops = {size: 1 / max(each, 1 / _FREE) for size, each in zip(sizes, products_s, strict=True)}
    return PassRates(flops, 1 / max(attention_s, 1 / _FREE), pass_s, layer_s, sequence_s)


def _decode_rates(points: Sequence[Point], forward: PassRates, bandwidth: float, number: int) -> DecodeRates:
    if not points:
        return DecodeRates(0.0)  # without vLLM
    rows = []
    for point in points:
        weights, running = sum(_matrices(point)), point["sequences"]
        products = max(weights * number / bandwidth, running * 2 * weights / forward.rate(int(point["hidden"])))
        cache = running * 2 * point["layers"] * _widths(point)[1] * number * point["context"] / bandwidth
        rows.append([1.0, point["layers"], running, running * point["vocabulary"], products, cache])
    return DecodeRates(*fitted(rows, [point["step"] for point in points]))


def _line(points: Sequence[Point]) -> tuple[float, float]:
    """(seconds of nothing, bytes per second) of some transfers."""
    if not points:
        return 0.0, _FREE
    seconds, each = fitted([[1.0, point["bytes"]] for point in points], [point["seconds"] for point in points])
    return seconds, 1 / max(each, 1 / _FREE)


def fitted(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """The costs, none negative, whose sums over each row come nearest to its seconds, relative to those."""
    scaled = np.array(rows) / np.array(seconds)[:, None]
    units = np.maximum(scaled.max(axis=0), 1e-300)  # the columns differ by many powers of ten
    kept = list(range(scaled.shape[1]))
    found = np.zeros(scaled.shape[1])
    while kept:
        costs = np.linalg.lstsq(scaled[:, kept] / units[kept], np.ones(len(seconds)), rcond=None)[0]
        if (costs >= 0).all():
            found[kept] = costs / units[kept]
            break
        kept.pop(int(np.argmin(costs)))
    return [float(cost) for cost in found]
